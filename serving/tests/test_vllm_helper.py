"""The helper with the real vLLM: one process for all tests, as a worker keeps it. Skipped without vLLM."""

import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from client import Client, Refused  # noqa: E402

HELPER = [sys.executable, "-m", "espalier_vllm.helper"]
OPTIONS = {
    "precision": "f32",
    "max_tokens": 256,
    "max_sequences": 8,
    "max_context": 256,
    "kv_bytes": 8 << 20,
    "block_tokens": 32,
}


def attention(heads, kv_heads, head_dim=32):
    return {
        "type": "attention",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "qkv_bias": False,
        "output_bias": False,
        "qk_norm": False,
        "sliding_window": None,
    }


def mlp(width):
    return {"type": "mlp", "intermediate_size": width, "bias": False}


def config(*blocks, **changes):
    plain = {
        "model_type": "espalier",
        "architectures": ["EspalierForCausalLM"],
        "family": "llama",
        "vocab_size": 301,
        "hidden_size": 96,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "blocks": list(blocks),
    }
    return {**plain, **changes}


def start(**more):
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return Client(HELPER, {**variables, **more}, sys.stderr.fileno())


@unittest.skipUnless(importlib.util.find_spec("vllm"), "vLLM is not installed here")
class Helper(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cache = tempfile.TemporaryDirectory()
        cls.client = start(VLLM_CACHE_ROOT=cls.cache.name)
        cls.hello = cls.client.ask("hello", protocol=1)
        cls.opened = []

    @classmethod
    def tearDownClass(cls):
        status = cls.client.end()
        cls.client.__exit__()
        cls.cache.cleanup()
        assert status == 0, status

    def tearDown(self):
        for name in self.opened:
            try:
                self.client.ask("close", engine=name)
            except Refused as refused:
                self.assertEqual(refused.kind, "unknown_engine")
        self.opened.clear()

    def open(self, name, *blocks, changes=(), **options):
        answer = self.client.ask("open", engine=name, config=config(*blocks, **dict(changes)), **{**OPTIONS, **options})
        self.opened.append(name)
        return answer

    def refused(self, kind, verb, **fields):
        with self.assertRaises(Refused) as caught:
            self.client.ask(verb, **fields)
        self.assertEqual(caught.exception.kind, kind, str(caught.exception))
        return str(caught.exception)

    def test_hello_says_what_measures(self):
        self.assertTrue(self.hello["tested"])
        if self.hello["platform"] == "cpu":
            self.assertIn(64, self.hello["head_sizes"])
            self.assertEqual(self.hello["block_tokens"], {"default": 128, "multiple": 32})
        else:
            self.assertTrue(self.hello["graphs"])
            self.assertEqual(self.hello["block_tokens"], {"default": 16, "multiple": 16})

    def test_an_engine_holds_what_its_blocks_say(self):
        answer = self.open("a", attention(6, 2), mlp(160), attention(2, 1))
        # Two norms a layer of the list and one at the end are parameters too, and the rotary table is a buffer.
        blocks = 96 * 32 * 2 * (8 + 3) + 3 * 96 * 160
        self.assertGreaterEqual(answer["weight_bytes"], 4 * (blocks + 320 * 96))
        self.assertLess(answer["weight_bytes"], 4 * (blocks + 320 * 96) + 200_000)
        self.assertEqual(answer["kv_bytes_per_token"], {"0": 2 * 2 * 32 * 4, "2": 2 * 32 * 4})
        self.assertEqual(answer["block_bytes"], 32 * 3 * 2 * 32 * 4)
        # VLLM_CPU_KVCACHE_SPACE would have made it a GiB.
        self.assertEqual(answer["kv_blocks"], (8 << 20) // answer["block_bytes"])

    def test_a_server_takes_the_options_of_an_engine_as_it_tells_them(self):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        options = {"max_tokens": 300, "max_sequences": 3, "max_context": 256, "kv_bytes": 8 << 20, "block_tokens": 32}
        answer = self.open("a", attention(6, 2), mlp(160), **options)
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        found = parser.parse_args(["--model", "m", *answer["serve_arguments"]])
        expected = {
            "dtype": "float32",
            "max_num_batched_tokens": 300,
            "max_num_seqs": 3,
            "max_model_len": 256,
            "kv_cache_memory_bytes": 8 << 20,
            "block_size": 32,
            "enable_prefix_caching": False,
            "enforce_eager": True,
        }
        self.assertEqual({key: getattr(found, key) for key in expected}, expected)
        self.assertEqual(self.hello["settings"]["VLLM_USE_FLASHINFER_SAMPLER"], "0")
        self.assertEqual(answer["serve_environment"]["VLLM_USE_FLASHINFER_SAMPLER"], "0", "what a user sets, a server needs")
        if self.hello["platform"] == "cpu":
            self.assertEqual(answer["serve_environment"]["VLLM_CPU_OMP_THREADS_BIND"], "nobind")

    def test_a_shape_that_vllm_refuses_leaves_the_helper_and_other_engines_well(self):
        self.open("good", attention(3, 1), mlp(64))
        point = {"decode": {"context": 64, "sequences": 4}}
        refusals = [([mlp(64)], "expected at least one")]
        if self.hello["platform"] == "cpu":
            refusals.append(([attention(2, 1, 16), mlp(64)], "head size of 16"))
        for blocks, says in refusals:
            found = self.refused("unsupported", "open", engine="bad", config=config(*blocks), **OPTIONS)
            self.assertIn(says, found)
            self.assertEqual(len(self.client.ask("steps", engine="good", point=point, repeats=3)["wall_ms"]), 3)
        self.refused("unsupported", "open", engine="bad", config={"model_type": "nothing"}, **OPTIONS)
        self.refused("unsupported", "open", engine="bad", directory="/nonexistent", **OPTIONS)
        self.open("bad", attention(2, 1), mlp(64))

    def test_space_that_is_not_there_is_told_before_anything_is_loaded(self):
        shape = config(attention(2, 1), mlp(64))
        self.refused("out_of_memory", "open", engine="big", config=shape, **{**OPTIONS, "kv_bytes": 1 << 45})
        self.refused("invalid", "open", engine="small", config=shape, **{**OPTIONS, "kv_bytes": 1 << 14})
        self.refused("invalid", "open", engine="long", config=shape, **{**OPTIONS, "max_context": 513})

    def test_engines_that_are_open_together_survive_each_others_end(self):
        point = {"decode": {"context": 64, "sequences": 8}}
        for name in "abc":
            self.open(name, attention(3, 1), mlp(64))
        for name in "abc":
            # Prompts of eight sequences do not fit into one step of 256 tokens.
            timed = self.client.ask("steps", engine=name, point=point, repeats=5)
            self.assertEqual(timed["context"], 64)
            self.assertTrue(all(value > 0 for value in timed["wall_ms"] + timed["cpu_ms"]))
            self.assertTrue(0 <= timed["busy"] <= 1)
        self.client.ask("close", engine="a")
        self.client.ask("steps", engine="b", point=point, repeats=4)
        self.open("d", attention(3, 1))
        for name in "bd":
            self.client.ask("close", engine=name)
        prefill = {"prefill": {"tokens": 100, "sequences": 2}}
        self.assertEqual(len(self.client.ask("steps", engine="c", point=prefill, repeats=2)["wall_ms"]), 2)

    def test_windows_need_fewer_blocks_than_the_context_has(self):
        windowed = {**attention(2, 1), "sliding_window": 32}
        # A sequence of 200 tokens keeps ⌈(31 + 64) / 32⌉ + 1 = 4 blocks: 8 of them fit into 39, of 7 blocks each not.
        block = 32 * 2 * 32 * 4
        point = {"decode": {"context": 200, "sequences": 8}}
        more = {"changes": {"family": "mistral"}, "max_tokens": 64, "kv_bytes": 39 * block}
        self.open("windowed", windowed, mlp(64), **more)
        self.assertEqual(len(self.client.ask("steps", engine="windowed", point=point, repeats=3)["wall_ms"]), 3)
        self.open("whole", attention(2, 1), mlp(64), **{**more, "changes": {}})
        self.refused("invalid", "steps", engine="whole", point=point, repeats=3)

    def test_a_workload_is_served_with_its_concurrency_and_runs_out_of_blocks_where_one_is_missing(self):
        # Four sequences of 64 tokens fill two blocks each; one more block is never given to a sequence.
        workload = {"prompt_tokens": 31, "output_tokens": 33, "concurrency": 4}
        block = 32 * 2 * 32 * 4
        found = {}
        for blocks in (9, 8):
            self.open(f"b{blocks}", attention(2, 1), mlp(64), kv_bytes=blocks * block, max_context=64)
            answer = self.client.ask("serve", engine=f"b{blocks}", workload=workload, requests=8)
            self.assertEqual(answer["peak_running"], 4)
            self.assertEqual(len(answer["end_to_end_ms"]), 8)
            for first, whole in zip(answer["first_token_ms"], answer["end_to_end_ms"]):
                self.assertLess(first, whole)
            found[blocks] = answer["preemptions"]
        self.assertEqual(found[9], 0)
        self.assertGreater(found[8], 0)

    def test_compiled_engines_are_timed_beside_eager_ones(self):
        self.open("compiled", attention(3, 1), mlp(64), compiled=True)
        self.open("eager", attention(3, 1), mlp(64))
        for name in ("compiled", "eager"):
            point = {"decode": {"context": 40, "sequences": 2}}
            self.assertEqual(len(self.client.ask("steps", engine=name, point=point, repeats=3)["wall_ms"]), 3)

    def test_what_was_compiled_of_a_shape_is_found_again(self):
        blocks = attention(3, 1), mlp(64), attention(2, 1)
        found = []
        for name in ("first", "again"):
            self.open(name, *blocks, compiled=True)
            found.append(sorted(Path(self.cache.name, "torch_compile_cache").rglob("rank_0_0")))
        first, again = found
        self.assertTrue(first)
        self.assertEqual(first, again)

    def held(self):
        """Bytes now, and at most since this was last asked, where weights lie."""
        answer = self.client.ask("memory")
        if self.hello["platform"] == "cpu":
            self.assertIsNone(answer["device"])
            return answer["held_bytes"], answer["peak_held_bytes"]
        return answer["device"]["reserved_bytes"], answer["device"]["peak_reserved_bytes"]

    def test_memory_shows_weights_and_keys_and_values(self):
        self.open("small", attention(2, 1))
        before, _ = self.held()
        space = 256 << 20
        opened = self.open("large", attention(8, 8), mlp(20_000), kv_bytes=space)
        _, peak = self.held()
        rise = (peak - before) / (opened["weight_bytes"] + opened["kv_bytes"])
        self.assertTrue(0.97 < rise < 1.15, rise)
        self.client.ask("close", engine="large")
        self.assertLess(self.held()[0] - before, space // 8)

    def test_what_failed_to_open_holds_nothing(self):
        import torch
        from safetensors.torch import save_file

        self.open("small", attention(2, 1))
        before, _ = self.held()
        with tempfile.TemporaryDirectory() as work:
            # 115 MB of weights are there before one is found missing.
            Path(work, "config.json").write_text(json.dumps(config(attention(2, 1), mlp(100_000))))
            weights = {f"model.layers.1.mlp.{name}_proj.weight": torch.ones(100_000, 96) for name in ("gate", "up")}
            weights["model.layers.1.mlp.down_proj.weight"] = torch.ones(96, 100_000)
            save_file(weights, Path(work, "model.safetensors"), metadata={"format": "pt"})
            found = self.refused("unsupported", "open", engine="damaged", directory=work, **OPTIONS)
            self.assertIn("the checkpoint lacks", found)
        after, peak = self.held()
        self.assertGreater(peak - before, 100 << 20)
        self.assertLess(after - before, 20 << 20)

    def test_a_gpu_says_its_own_time_and_the_graph_that_ran(self):
        if self.hello["platform"] == "cpu":
            self.skipTest("a CPU has no clock of its own")
        self.open("graphs", attention(3, 1), mlp(64), compiled=True, graph_sizes=[1, 2, 4, 8])
        self.open("eager", attention(3, 1), mlp(64))
        for name, source, captured in (("graphs", "graph", 4), ("eager", "kernels", None)):
            point = {"decode": {"context": 40, "sequences": 3}}
            timed = self.client.ask("steps", engine=name, point=point, repeats=4)
            self.assertEqual((timed["device_source"], timed["captured"]), (source, captured))
            self.assertEqual(len(timed["device_ms"]), 5)
            self.assertTrue(all(0 < value < min(timed["wall_ms"]) * 1.1 for value in timed["device_ms"]), timed)

    def test_weights_of_a_checkpoint_give_the_text_of_transformers(self):
        import odd_shapes
        import torch

        with tempfile.TemporaryDirectory() as work:
            directory = Path(work, "checkpoint")
            changes, blocks = odd_shapes.SHAPES["every block another size"]
            model = odd_shapes.write(directory, changes, blocks)
            generator = torch.Generator().manual_seed(3)
            given = [torch.randint(3, 301, (length,), generator=generator).tolist() for length in (1, 7, 33, 70)]
            self.client.ask("open", engine="real", directory=str(directory), **OPTIONS)
            self.opened.append("real")
            answer = self.client.ask("generate", engine="real", prompts=given, new_tokens=8, log_probabilities=True)
            self.assertEqual(answer["tokens"], odd_shapes.greedy(model, given, 8))
            for prompt, found in zip(given, answer["log_probabilities"]):
                wanted = odd_shapes.log_probabilities(model, prompt)
                self.assertEqual(len(found), len(wanted))
                self.assertTrue(all(abs(a - b) < 2e-4 for a, b in zip(found, wanted)))


@unittest.skipUnless(importlib.util.find_spec("vllm"), "vLLM is not installed here")
class End(unittest.TestCase):
    def test_the_end_of_input_ends_it_in_the_middle_of_an_engine_start(self):
        with start() as client:
            client.ask("hello", protocol=1)
            asked = threading.Thread(target=ask_and_forget, args=(client,))
            asked.start()
            time.sleep(1.5)
            begun = time.monotonic()
            client.end(10)
            self.assertLess(time.monotonic() - begun, 5)
            asked.join()


def ask_and_forget(client):
    try:
        client.ask("open", engine="a", config=config(attention(3, 1), mlp(64)), **{**OPTIONS, "compiled": True})
    except EOFError:
        pass


if __name__ == "__main__":
    unittest.main()
