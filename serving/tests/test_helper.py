"""The helper's lines, timing and ends, by the fake one, which has no vLLM.

python3 -m unittest discover -s serving/tests -p test_helper.py
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from types import SimpleNamespace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from client import Client, Refused  # noqa: E402
import espalier_vllm  # noqa: E402
from espalier_vllm.helper import clock, device, engine, measure, memory, needs, prompts, requests  # noqa: E402
from espalier_vllm.helper.failure import Failure  # noqa: E402

# Seconds: longer than any of these may take.
PATIENCE = 300

FAKE = [sys.executable, str(HERE / "fake_helper.py"), "-m", "espalier_vllm.helper"]


def attention(heads=2, kv_heads=1, head_dim=32):
    return {
        "type": "attention",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def mlp(width):
    return {"type": "mlp", "intermediate_size": width}


def config(*blocks):
    return {"model_type": "espalier", "vocab_size": 100, "hidden_size": 64, "blocks": list(blocks)}


OPTIONS = {
    "precision": "f32",
    "max_tokens": 64,
    "max_sequences": 8,
    "max_context": 256,
    "kv_bytes": 1 << 20,
    "block_tokens": 32,
}


class Helper(unittest.TestCase):
    def fake(self, greeted=True, **environment):
        client = Client(FAKE, {f"FAKE_VLLM{'_' * bool(key)}{key}": value for key, value in environment.items()})
        self.addCleanup(client.__exit__)
        if greeted:
            client.ask("hello", protocol=1)
        return client

    def misbehaving(self, plan, **more):
        client = Client(FAKE, {"FAKE_VLLM": plan, **more})
        self.addCleanup(client.__exit__)
        return client

    def refused(self, kind, client, verb, **fields):
        with self.assertRaises(Refused) as caught:
            client.ask(verb, **fields)
        self.assertEqual(caught.exception.kind, kind, str(caught.exception))
        return str(caught.exception)


class Lines(Helper):
    def test_a_session_opens_times_and_closes_an_engine(self):
        client = self.fake()
        opened = client.ask("open", engine="a", config=config(attention(), mlp(64)), **OPTIONS)
        self.assertEqual(opened["block_bytes"], 32 * 2 * 32 * 4)
        self.assertEqual(opened["kv_bytes_per_token"], {"0": 2 * 32 * 4})
        timed = client.ask("steps", engine="a", point={"decode": {"context": 40, "sequences": 4}}, repeats=7)
        self.assertEqual(len(timed["wall_ms"]), 7)
        self.assertEqual(timed["context"], 40)
        client.ask("close", engine="a")
        self.refused("unknown_engine", client, "close", engine="a")
        self.assertEqual(client.end(), 0)

    def test_nothing_is_answered_before_hello_and_hello_comes_once(self):
        client = self.fake(greeted=False)
        self.refused("protocol", client, "memory")
        client.ask("hello", protocol=1)
        self.assertIn("twice", self.refused("protocol", client, "hello", protocol=1))

    def test_another_protocol_is_refused_with_both_versions(self):
        client = self.fake(greeted=False)
        says = self.refused("protocol", client, "hello", protocol=2)
        self.assertIn("protocol 1, found 2", says)

    def test_an_untested_version_is_refused_unless_it_is_trusted(self):
        client = self.fake(greeted=False, VERSION="0.33.1")
        self.refused("version", client, "hello", protocol=1)
        self.assertFalse(client.ask("hello", protocol=1, trusted_versions=["0.33"])["tested"])

    def test_lines_that_are_no_requests_are_answered_and_the_session_goes_on(self):
        client = self.fake()
        for line in (b"\xff\xfe\n", b"{\n", b"[1]\n", b'{"memory":{}}\n', b"[" * 100_000 + b"\n"):
            client.send(line)
            answer = client.line()
            self.assertIsNone(answer["id"])
            self.assertEqual(answer["error"]["kind"], "protocol")
        client.send(b'{"id":7,"memory":{},"close":{"engine":"a"}}\n')
        self.assertEqual(client.line()["id"], 7)
        self.assertGreater(client.ask("memory")["held_bytes"], 0)

    def test_requests_are_refused_by_the_field_that_is_wrong(self):
        client = self.fake()
        good = {"engine": "a", "config": config(attention()), **OPTIONS}
        for changes, says in (
            ({"precision": "fp8"}, "'precision'"),
            ({"max_tokens": True}, "'max_tokens'"),
            ({"kv_bytes": 1.5}, "'kv_bytes'"),
            ({"directory": "/x"}, "either 'config' or 'directory'"),
            ({"spped": 1}, "'spped'"),
            ({"gpu_memory_utilization": 0}, "'gpu_memory_utilization'"),
        ):
            self.assertIn(says, self.refused("protocol", client, "open", **{**good, **changes}))
        del good["max_context"]
        self.assertIn("'max_context'", self.refused("protocol", client, "open", **good))

    def test_a_line_that_is_too_long_is_told_and_ends_the_session(self):
        client = self.fake()
        for _ in range(17):
            client.send(b"x" * (1 << 20))
        self.assertTrue(client.line()["error"]["fatal"])
        self.assertEqual(client.process.wait(PATIENCE), 3)

    def test_without_descriptor_3_it_does_not_begin(self):
        command = [sys.executable, "-m", "espalier_vllm.helper"]
        run = subprocess.run(command, cwd=HERE.parent, capture_output=True, stdin=subprocess.DEVNULL)
        self.assertEqual(run.returncode, 2)
        self.assertIn(b"descriptor 3", run.stderr)


class Ends(Helper):
    def test_the_end_of_input_ends_it_in_the_middle_of_a_request(self):
        client = self.misbehaving("hello=stall")
        client.send(b'{"id":1,"hello":{"protocol":1}}\n')
        client.line()
        self.assertEqual(client.end(), -signal.SIGKILL)

    def test_input_that_cannot_be_taken_is_told_and_ends_it_in_the_middle_of_a_request(self):
        request = b'{"id":10,"memory":{}}\n'
        for chunks in ([b"x" * (1 << 20)] * 16 + [b"xx"], [request] * 9):
            client = self.misbehaving("memory=stall")
            client.ask("hello", protocol=1)
            client.send(b'{"id":9,"memory":{}}\n')
            client.line()
            for chunk in chunks:
                client.send(chunk)
            said = []
            while (line := client.line()) is not None:
                said.append(line)
            refused = [line["error"] for line in said if "error" in line]
            self.assertEqual([(each["kind"], each["fatal"]) for each in refused], [("protocol", True)])
            self.assertEqual(client.process.wait(PATIENCE), -signal.SIGKILL)

    def test_what_it_started_ends_with_it(self):
        client = self.misbehaving("hello=orphan,memory=stall")
        client.ask("hello", protocol=1)
        client.send(b'{"id":9,"memory":{}}\n')
        client.line()
        client.end()
        self.assertTrue(becomes(lambda: not running(client.process.pid)))

    def test_it_ends_when_its_parent_does(self):
        reader, writer = os.pipe()
        holder = os.pipe()
        answers = os.pipe()
        middle = os.fork()
        if middle == 0:
            # The grandparent keeps the input and the answers open, so that only the parent's death is left to see.
            os.dup2(holder[0], 0)
            child = os.fork()
            if child == 0:
                os.dup2(answers[1], 3)
                os.setsid()
                os.execve(sys.executable, FAKE, dict(os.environ))
            os.write(writer, str(child).encode())
            os.close(answers[1])
            # It has seen who its parent is once it answers.
            os._exit(0 if os.read(answers[0], 1) else 1)
        child = int(os.read(reader, 32))
        os.close(answers[1])
        os.write(holder[1], b'{"id":1,"hello":{"protocol":1}}\n')
        self.assertEqual(os.waitpid(middle, 0), (middle, 0), "it answered")
        self.assertTrue(becomes(lambda: not running(child)))
        for each in (reader, writer, *holder, answers[0]):
            os.close(each)


def running(group):
    """Processes of a group that have not ended, whether or not anybody has waited for them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of, *_ = stat.read_text(errors="replace").rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(of) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def becomes(is_so):
    """Whether something becomes so, in as long as a machine that others use too may take."""
    until = time.monotonic() + PATIENCE
    while not is_so():
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True


class Measures(Helper):
    def setUp(self):
        self.client = self.fake()
        self.client.ask("open", engine="a", config=config(attention(), mlp(64)), **OPTIONS)

    def test_prompts_in_several_steps_leave_all_sequences_at_the_same_context(self):
        # 8 × 40 tokens are five steps of 64 and more: early sequences run ahead meanwhile.
        point = {"decode": {"context": 40, "sequences": 8}}
        self.assertEqual(self.client.ask("steps", engine="a", point=point, repeats=5)["context"], 40)
        self.assertEqual(self.client.ask("steps", engine="a", point=point, repeats=4)["context"], 39.5)

    def test_the_step_in_the_middle_finds_the_context_of_the_point_in_the_cache(self):
        timed = self.client.ask("steps", engine="a", point={"decode": {"context": 40, "sequences": 2}}, repeats=9)
        # By the fake's formula: each of two sequences reads 40 keys and its own.
        weights = [2 * 64 * 32 * 3, 3 * 64 * 64]
        expected = 200 + 2 / 2 + sum(10 + w / 500 + 2 * w / 20000 for w in weights) + 2 * 41 * 2 * 32 / 400
        self.assertAlmostEqual(statistics.median(timed["wall_ms"]), expected / 1e3, places=5)

    def test_a_prefill_is_one_step_of_all_prompts(self):
        timed = self.client.ask("steps", engine="a", point={"prefill": {"tokens": 32, "sequences": 2}}, repeats=3)
        hidden = 64
        weights = [2 * hidden * 32 * 3, 3 * hidden * 64]
        expected = 200 + 64 / 2 + sum(10 + w / 500 + 64 * w / 20000 for w in weights) + 2 * 32 * 32 * 2 * 32 / 400
        for value in timed["wall_ms"]:
            self.assertAlmostEqual(value, expected / 1e3, places=5)

    def test_points_that_the_engine_cannot_hold_are_invalid_by_name(self):
        for point, says in (
            ({"prefill": {"tokens": 33, "sequences": 2}}, "max_tokens, 64"),
            ({"decode": {"context": 256, "sequences": 1}}, "max_context, 256"),
            ({"decode": {"context": 40, "sequences": 9}}, "max_sequences, 8"),
            ({"decode": {"context": 3, "sequences": 1}}, "point.decode.context is 3"),
        ):
            found = self.refused("invalid", self.client, "steps", engine="a", point=point, repeats=4)
            self.assertIn(says, found)
        # And the next is measured as if nothing had been.
        self.client.ask("steps", engine="a", point={"decode": {"context": 40, "sequences": 8}}, repeats=4)

    def test_a_workload_keeps_its_concurrency_until_the_last_requests(self):
        workload = {"prompt_tokens": 20, "output_tokens": 10, "concurrency": 4}
        answer = self.client.ask("serve", engine="a", workload=workload, requests=8)
        for key in ("first_token_ms", "per_token_ms", "end_to_end_ms"):
            self.assertEqual(len(answer[key]), 8)
        self.assertEqual(answer["peak_running"], 4)
        self.assertEqual(answer["preemptions"], 0)
        self.assertEqual(answer["steps"], 21)
        self.assertAlmostEqual(answer["output_tokens_per_second"], 80 / answer["seconds"], delta=1)
        alone = self.client.ask("serve", engine="a", workload={**workload, "output_tokens": 1}, requests=4)
        self.assertEqual(alone["per_token_ms"], [])

    def test_requests_beyond_max_sequences_wait(self):
        self.client.ask("open", engine="two", config=config(attention()), **{**OPTIONS, "max_sequences": 2})
        workload = {"prompt_tokens": 20, "output_tokens": 10, "concurrency": 4}
        answer = self.client.ask("serve", engine="two", workload=workload, requests=4)
        self.assertEqual((answer["peak_running"], answer["preemptions"]), (2, 0))
        first, _, third, _ = answer["first_token_ms"]
        self.assertGreater(third, answer["end_to_end_ms"][0])
        self.assertLess(first, third)

    def test_blocks_that_are_too_few_show_as_preemptions(self):
        # Four sequences of 64 tokens need eight blocks of 32 beside the null block.
        block = 32 * 2 * 32 * 4
        workload = {"prompt_tokens": 31, "output_tokens": 33, "concurrency": 4}
        found = {}
        for blocks in (9, 8):
            self.client.ask(
                "open",
                engine=f"b{blocks}",
                config=config(attention()),
                **{**OPTIONS, "max_tokens": 256, "kv_bytes": blocks * block},
            )
            found[blocks] = self.client.ask("serve", engine=f"b{blocks}", workload=workload, requests=4)["preemptions"]
        self.assertEqual(found[9], 0)
        self.assertGreater(found[8], 0)

    def test_generated_text_has_log_probabilities_of_prompts_where_they_are_asked_for(self):
        answer = self.client.ask("generate", engine="a", prompts=[[1, 2, 3], [4]], new_tokens=5, log_probabilities=True)
        self.assertEqual([len(row) for row in answer["tokens"]], [5, 5])
        self.assertEqual([len(row) for row in answer["log_probabilities"]], [2, 0])
        answer = self.client.ask("generate", engine="a", prompts=[[1]], new_tokens=1)
        self.assertIsNone(answer["log_probabilities"])
        self.refused("invalid", self.client, "generate", engine="a", prompts=[[100]], new_tokens=1)

    def test_what_others_take_of_the_processors_shows(self):
        client = self.fake(NOISE="1")
        client.ask("open", engine="a", config=config(attention()), **OPTIONS)
        timed = client.ask("steps", engine="a", point={"decode": {"context": 40, "sequences": 1}}, repeats=8)
        self.assertGreater(timed["busy"], 0.1)
        self.assertGreater(max(timed["wall_ms"]), 1.2 * max(timed["cpu_ms"]))


class Misbehaviour(Helper):
    def test_errors_of_each_kind_leave_the_session_open(self):
        for kind in ("no_vllm", "version", "unsupported", "out_of_memory", "busy", "engine", "protocol", "invalid"):
            client = self.misbehaving(f"hello:1={kind}")
            self.refused(kind, client, "hello", protocol=1)
            client.ask("hello", protocol=1)

    def test_an_engine_that_raised_is_closed_and_others_stay_open(self):
        client = self.misbehaving("steps:1=raise")
        client.ask("hello", protocol=1)
        for name in "ab":
            client.ask("open", engine=name, config=config(attention()), **OPTIONS)
        timing = {"point": {"decode": {"context": 40, "sequences": 4}}, "repeats": 2}
        self.assertIn("fell over", self.refused("engine", client, "steps", engine="a", **timing))
        self.refused("unknown_engine", client, "steps", engine="a", **timing)
        client.ask("steps", engine="b", **timing)

    def test_a_failure_is_planned_for_one_request_of_many(self):
        client = self.misbehaving("memory:2=busy")
        client.ask("hello", protocol=1)
        client.ask("memory")
        self.refused("busy", client, "memory")
        client.ask("memory")

    def test_with_a_marker_it_misbehaves_once_over_all_processes(self):
        with tempfile.TemporaryDirectory() as work:
            for expected in (-signal.SIGKILL, 0):
                client = self.misbehaving("hello=die", FAKE_VLLM_ONCE=f"{work}/once")
                if expected:
                    with self.assertRaises(EOFError):
                        client.ask("hello", protocol=1)
                else:
                    client.ask("hello", protocol=1)
                self.assertEqual(client.end(), expected)

    def test_a_fatal_error_ends_the_process_with_3(self):
        client = self.misbehaving("memory=fatal")
        client.ask("hello", protocol=1)
        with self.assertRaises(Refused) as caught:
            client.ask("memory")
        self.assertTrue(caught.exception.fatal)
        self.assertEqual(client.process.wait(PATIENCE), 3)

    def test_a_helper_that_hangs_stays_silent_even_at_the_end_of_input(self):
        client = self.misbehaving("hello=hang")
        client.send(b'{"id":1,"hello":{"protocol":1}}\n')
        client.line()
        with self.assertRaises(subprocess.TimeoutExpired):
            client.end(1.5)
        client.process.kill()

    def test_more_engines_than_fit_are_out_of_memory_and_one_less_is_not(self):
        client = self.fake(ENGINES="2")
        for name in "ab":
            client.ask("open", engine=name, config=config(attention()), **OPTIONS)
        self.refused("out_of_memory", client, "open", engine="c", config=config(attention()), **OPTIONS)
        client.ask("close", engine="a")
        client.ask("open", engine="c", config=config(attention()), **OPTIONS)

    def test_wrong_lines_are_wrong(self):
        client = self.misbehaving("hello=wrong_id")
        with self.assertRaises(ValueError):
            client.ask("hello", protocol=1)
        client = self.misbehaving("hello=garbage")
        with self.assertRaises(ValueError):
            client.ask("hello", protocol=1)
        client = self.misbehaving("hello=half")
        with self.assertRaises(EOFError):
            client.ask("hello", protocol=1)


class FakeGpu:
    """torch, as far as a step's own time is taken from it: a GPU that runs what it is told, in microseconds."""

    def __init__(self):
        self.ran, self.clock = [], 0.0
        gpu = self

        class Graph:
            def __init__(self, kernels):
                self.kernels = kernels

            def replay(self):
                for kernel in self.kernels:
                    gpu.launch(*kernel)

        class Event:
            def __init__(self, enable_timing):
                self.enable_timing = enable_timing

            def record(self):
                self.at = gpu.clock

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return (other.at - self.at) / 1e3

        class Profile:
            def __init__(self, activities):
                self.activities = activities

            def __enter__(self):
                gpu.ran = []
                return self

            def __exit__(self, *error):
                self.found = gpu.ran

            def key_averages(self):
                names = {}
                for name, took in self.found:
                    names.setdefault(name, []).append(took)
                found = [(name, len(each), sum(each), False) for name, each in names.items()]
                # What the host did, and a range that somebody named around it all.
                found += [("cudaLaunchKernel", 7, 0, False), ("forward", 1, sum(each[2] for each in found), True)]
                return [
                    SimpleNamespace(key=key, count=count, self_device_time_total=took, is_user_annotation=named)
                    for key, count, took, named in found
                ]

        self.Graph = Graph
        self.cuda = SimpleNamespace(
            CUDAGraph=Graph,
            Event=Event,
            synchronize=lambda: None,
            mem_get_info=lambda: (self.total - self.others - self.reserved, self.total),
            memory_reserved=lambda: self.reserved,
            max_memory_reserved=lambda: self.peak,
            empty_cache=lambda: setattr(self, "reserved", self.live),
            reset_peak_memory_stats=lambda: setattr(self, "peak", self.reserved),
        )
        # Bytes: what is referenced, what the allocator holds of it and for it, and what is beside the allocator.
        self.live, self.reserved, self.peak, self.others, self.total = 0, 0, 0, 1 << 29, 1 << 37
        self.profiler = SimpleNamespace(profile=Profile, ProfilerActivity=SimpleNamespace(CUDA="cuda"))

    def launch(self, name, microseconds):
        self.ran.append((name, microseconds))
        self.clock += microseconds


class Device(unittest.TestCase):
    LAYERS = [("gemm", 5), ("attention", 20)] * 10

    def setUp(self):
        self.gpu = FakeGpu()
        patched = unittest.mock.patch.dict(sys.modules, {"torch": self.gpu})
        patched.start()
        self.addCleanup(patched.stop)
        device.watch_graphs()

    def timed(self, *parts):
        def step():
            for part in parts:
                part.replay() if isinstance(part, self.gpu.Graph) else self.gpu.launch(*part)
            return 3

        return device.times(step, [1, 2, 4, 8])

    def test_a_steps_own_time_is_its_graph_and_what_it_runs_beside(self):
        # The head runs the same kernel as layers do, for longer.
        timed = self.timed(("copy", 2), self.gpu.Graph(self.LAYERS), ("gemm", 40), ("argmax", 8))
        self.assertEqual(timed["device_source"], "graph")
        self.assertEqual(timed["captured"], 4)
        self.assertAlmostEqual(timed["outside_ms"], 0.050)
        self.assertEqual([round(value, 6) for value in timed["device_ms"]], [0.300] * device.TIMES)

    def test_a_step_of_several_graphs_or_none_is_the_sum_of_its_kernels(self):
        piecewise = [self.gpu.Graph(self.LAYERS), ("attention", 30), self.gpu.Graph(self.LAYERS), ("head", 40)]
        timed = self.timed(*piecewise)
        self.assertEqual((timed["device_source"], timed["outside_ms"]), ("kernels", None))
        self.assertAlmostEqual(timed["device_ms"][0], 0.570)
        eager = self.timed(*self.LAYERS, ("head", 40))
        self.assertEqual((eager["device_source"], eager["captured"]), ("kernels", None))
        self.assertAlmostEqual(eager["device_ms"][0], 0.290)

    def test_what_scatters_within_a_graph_is_no_time_beside_it(self):
        whole = {"attention": (10, 0.205), "head": (1, 0.04), "gemm": (11, 0.09)}
        self.assertAlmostEqual(device.beyond(whole, {"attention": (10, 0.2), "gemm": (10, 0.05)}), 0.08)
        self.assertEqual(device.beyond({"gemm": (11, 0.05)}, {"gemm": (10, 0.06)}), 0.0)


    def test_memory_is_told_without_what_lies_about_and_the_most_with_it(self):
        self.assertTrue(device.is_ours_alone())
        self.gpu.live, self.gpu.reserved, self.gpu.peak = 100, 150, 180
        first = device.take_memory(alone=True)
        self.assertEqual((first["reserved_bytes"], first["peak_reserved_bytes"]), (100, 180))
        self.assertEqual((first["outside_bytes"], first["used_bytes"]), (1 << 29, 100 + (1 << 29)))
        self.gpu.others = 5 << 30
        self.assertFalse(device.is_ours_alone())
        again = device.take_memory(alone=False)
        self.assertEqual((again["peak_reserved_bytes"], again["outside_bytes"]), (100, None))
        self.gpu.others = 1 << 29
        self.assertEqual(device.take_memory(alone=False)["outside_bytes"], 1 << 29, "they have left")


class Ahead:
    """An engine that computes a step before it tells what the one before gave, as vLLM does on a GPU."""

    def __init__(self, inner):
        self.inner, self.ahead, self.queue = inner, 1, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self):
        self.queue.append(self.inner.step())
        return self.queue.pop(0) if len(self.queue) > self.ahead else ({}, [])

    def abort(self):
        self.inner.abort()
        self.queue = [({}, []) for _ in self.queue]


class WorksAhead(unittest.TestCase):
    def setUp(self):
        import fake_helper

        self.limits = {**OPTIONS, "kv_blocks": 100, "windows": [None]}
        self.inner = fake_helper.FakeEngine(config(attention(), mlp(64)), self.limits, [])
        self.engine = Ahead(self.inner)

    def times(self, engine, **point):
        return measure.steps(engine, point.popitem(), 5, 1, lambda *stage: None)

    def test_decode_steps_are_told_apart_by_their_tokens(self):
        decode = {"context": 40, "sequences": 8}
        for _ in range(2):
            ahead = self.times(self.engine, decode=decode)
            self.assertEqual(ahead["context"], 40)
            self.assertEqual(ahead["wall_ms"], self.times(self.inner, decode=decode)["wall_ms"])

    def test_a_prefill_ends_with_the_step_that_gives_its_tokens(self):
        # Whether the engine was idle or still has an empty step of the last prompts in its queue.
        prefill = {"tokens": 32, "sequences": 2}
        ahead = self.times(self.engine, prefill=prefill)["wall_ms"]
        alone = self.times(self.inner, prefill=prefill)["wall_ms"]
        for value in ahead:
            self.assertGreater(value, alone[0] - 1e-6)
            # A step without tokens costs the fake's base.
            self.assertLess(value, alone[0] + 3 * 0.2)

    def test_a_workload_is_served_to_the_end(self):
        workload = {"prompt_tokens": 20, "output_tokens": 10, "concurrency": 4}
        served = measure.serve(self.engine, workload, 12, lambda *stage: None)
        self.assertEqual(len(served["end_to_end_ms"]), 12)
        self.assertEqual((served["peak_running"], served["preemptions"]), (4, 0))


    def test_a_throughput_is_that_of_requests_that_end_one_after_another(self):
        import fake_helper

        workload = {"prompt_tokens": 20, "output_tokens": 40, "concurrency": 4}
        served = measure.serve(self.inner, workload, 16, lambda *stage: None)
        # In the course of 40 steps each of four requests ends once, and a prompt joins the step of the other three.
        only = fake_helper.microseconds(self.inner.config, 4, 4 * 40)
        joined = fake_helper.microseconds(self.inner.config, 3 + 20, 3 * 40 + 20 * 20)
        expected = 1e6 * 4 * 40 / (36 * only + 4 * joined)
        self.assertAlmostEqual(served["output_tokens_per_second"] / expected, 1, delta=0.02)
        self.assertEqual(served["peak_running"], 4)
        first, later = served["end_to_end_ms"][:4], served["end_to_end_ms"][4:]
        self.assertTrue(all(one < other for one, other in zip(first, first[1:])), first)
        self.assertLess(max(later) - min(later), 0.1 * max(later))
        self.assertEqual(len(served["per_token_ms"]), 16)

    def test_of_requests_that_come_at_once_none_is_cut_short_however_few_run_together(self):
        self.limits["max_sequences"] = 2
        workload = {"prompt_tokens": 20, "output_tokens": 10, "concurrency": 8}
        served = measure.serve(self.inner, workload, 8, lambda *stage: None)
        course, first = served["end_to_end_ms"][0], served["first_token_ms"][0]
        # Four pairs, one after another: the middle ones have waited for one and a half.
        self.assertAlmostEqual(statistics.median(served["end_to_end_ms"]) / (2.5 * course), 1, delta=0.01)
        self.assertAlmostEqual(statistics.median(served["first_token_ms"]) / (1.5 * course + first), 1, delta=0.01)

    def test_the_first_requests_are_shorter_only_where_there_are_enough_others(self):
        steady = measure.Steady(12, 10, 4, 4)
        self.assertEqual([steady.output_of(request) for request in range(6)], [3, 5, 8, 10, 10, 10])
        # Two tokens a second from the end of the fourth to that of the eighth.
        for now, ended in ((1, 3), (2, 4), (3, 6), (4, 8), (5, 12)):
            steady.step(now, 2, ended)
        self.assertEqual(steady.tokens_per_second(), 2)
        whole = measure.Steady(11, 10, 4, 4)
        self.assertEqual([whole.output_of(request) for request in range(4)], [10] * 4)
        whole.begin(0)
        whole.step(1, 30, 4)
        whole.step(10, 80, 11)
        self.assertEqual(whole.tokens_per_second(), 11)


class Pure(unittest.TestCase):
    @unittest.skipUnless(memory.resident(), "the system does not say what is resident")
    def test_what_was_freed_is_given_back_to_the_system(self):
        taken = [b"x" * 60_000 for _ in range(3000)]
        last = b"x" * 60_000
        del taken
        held = memory.resident()[0]
        memory.trim()
        self.assertGreater(held - memory.resident()[0], 100_000_000)
        self.assertEqual(len(last), 60_000)

    def test_weights_are_told_from_a_flat_config_before_anything_is_loaded(self):
        shape = config(attention(), mlp(64))
        parameters = 64 * (2 * 100 + 2 * 32 * 3 + 3 * 64)
        self.assertEqual(needs.weight_bytes(shape, None, "f32"), 4 * parameters)
        self.assertEqual(
            needs.weight_bytes({**shape, "tie_word_embeddings": True}, None, "bf16"), 2 * (parameters - 6400)
        )
        self.assertEqual(needs.weight_bytes({"model_type": "other"}, None, "bf16"), 0)
        with tempfile.TemporaryDirectory() as work:
            def write(name, *shapes, stored="F32"):
                tensors = {f"t{at}": {"dtype": stored, "shape": shape} for at, shape in enumerate(shapes)}
                header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
                Path(work, name).write_bytes(len(header).to_bytes(8, "little") + header)

            self.assertEqual(needs.weight_bytes({}, work, "bf16"), 0)
            write("b.safetensors", [5, 2])
            self.assertEqual(needs.weight_bytes({}, work, "bf16"), 2 * 10)
            # The same once more in one file, and then in two that an index names.
            write("model.safetensors", [3, 4], [5], [])
            self.assertEqual(needs.weight_bytes({}, work, "bf16"), 2 * 18)
            self.assertEqual(needs.weight_bytes({}, work, "f32"), 4 * 18)
            write("one.safetensors", [100], stored="BF16")
            write("two.safetensors", [7])
            index = Path(work, "model.safetensors.index.json")
            index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
            self.assertEqual(needs.weight_bytes({}, work, "f32"), 4 * 107)
            for damaged in (b"", bytes(7) + b"\xff", b"\2" + bytes(7) + b"[]", bytes(100)):
                Path(work, "two.safetensors").write_bytes(damaged)
                with self.assertRaises(Failure) as caught:
                    needs.weight_bytes({}, work, "f32")
                self.assertIn("two.safetensors is no safetensors file", caught.exception.says)
            index.write_text("[]")
            with self.assertRaises(Failure):
                needs.weight_bytes({}, work, "f32")

    def test_exceptions_of_vllm_become_kinds_that_say_what_to_do(self):
        platform = engine.Platform()
        memory_class = type("OutOfMemoryError", (RuntimeError,), {})
        for error, kind, fatal in (
            (memory_class("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory", False),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory", False),
            (MemoryError(), "out_of_memory", False),
            (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), "out_of_memory", False),
            (RuntimeError("Triton Error [CUDA]: out of memory"), "out_of_memory", False),
            (
                RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
                "out_of_memory",
                False,
            ),
            (
                ValueError(
                    "Available memory on node 0 (14.0/64.0 GiB) on kv cache allocation is less than requested memory "
                    "for kv (40.0 GiB). Decrease --kv-cache-memory-bytes"
                ),
                "out_of_memory",
                False,
            ),
            (RuntimeError("CUDA error: an illegal memory access was encountered"), "engine", True),
            (ValueError("Free memory on device cuda:0 (1/139 GiB) on startup is less"), "busy", False),
            (
                ValueError("2 GiB KV cache is needed, which is larger than the available KV cache memory"),
                "invalid",
                False,
            ),
            (RuntimeError("Unsupported CPU attention configuration"), "unsupported", False),
            (NotImplementedError("no such layer"), "unsupported", False),
            (ValueError("Model architectures ['X'] are not supported for now"), "unsupported", False),
            (ValueError("config blocks[3] lacks head_dim"), "unsupported", False),
            (espalier_vllm.Unsupported("the checkpoint lacks model.norm.weight"), "unsupported", False),
            (type("ValidationError", (ValueError,), {})("1 validation error for ModelConfig"), "unsupported", False),
            # A file of a cache that was torn: the next try makes it anew.
            (ValueError("malformed node or string on line 1"), "engine", False),
            (SyntaxError("unexpected EOF while parsing"), "engine", False),
            (AssertionError(), "engine", False),
            # A cache's directory on a file system without locks.
            (OSError(95, "Operation not supported"), "engine", False),
        ):
            failure = platform.failure(error)
            self.assertEqual((failure.kind, failure.fatal), (kind, fatal), failure.says)
        platform.open_engines.append(None)
        self.assertEqual(platform.failure(ValueError("Free memory on device cuda:0")).kind, "out_of_memory")

    def test_only_versions_that_were_tested_or_are_trusted_are_gone_on_with(self):
        self.assertTrue(engine.check_version("0.32.0+cpu", []))
        self.assertTrue(engine.check_version("0.26.1", []))
        self.assertFalse(engine.check_version("0.3.2", ["0.3"]))
        for version in ("0.3.2", "0.33.0", "1.26.0", "0.260.0"):
            with self.assertRaises(Failure) as caught:
                engine.check_version(version, ["0.31"])
            self.assertEqual(caught.exception.kind, "version")

    def test_the_environment_is_settled_whatever_the_user_has(self):
        found = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
        engine.prepare_environment(found)
        self.assertNotIn("VLLM_CPU_KVCACHE_SPACE", found)
        self.assertEqual(found["VLLM_ENABLE_V1_MULTIPROCESSING"], "0")
        self.assertEqual(found["VLLM_LOGGING_LEVEL"], "DEBUG")
        self.assertEqual(found["HF_HUB_OFFLINE"], "1")

    def test_what_others_had_is_counted_over_the_processors_that_may_be_used(self):
        def took(wall, cpu):
            return clock.Moment(wall, cpu)

        # Alone on two of two; beside one that took a half of both; beside those who took all that this one left.
        self.assertEqual(clock.taken_share(took(10, 20), 20, 2), 0)
        self.assertAlmostEqual(clock.taken_share(took(10, 10), 20.02, 2), 0.5)
        self.assertAlmostEqual(clock.taken_share(took(10, 5), 20.02, 2), 0.75)
        # Whole ticks of both processors say nothing of a step of 5 ms.
        self.assertEqual(clock.taken_share(took(0.005, 0.005), 0.02, 2), 0)
        # A quota of 2 of 64: others outside of it take no share while they leave it two, whoever they are.
        self.assertEqual(clock.taken_share(took(10, 20), 20 + 620, 64, 2, 20), 0)
        self.assertAlmostEqual(clock.taken_share(took(10, 10), 10 + 630 + 0.64, 64, 2, 10), 0.5)
        # One within it that uses a half of it.
        self.assertAlmostEqual(clock.taken_share(took(10, 10), 20, 64, 2, 20), 0.5)

    def test_waiting_for_a_processor_counts_unless_threads_wait_for_each_other(self):
        took = clock.Moment(0.01, 0.01)
        self.assertAlmostEqual(clock.waiting_share(took, 0.01, 2), 0.5)
        self.assertEqual(clock.waiting_share(took, 0.01, 1), 0)
        self.assertEqual(clock.waiting_share(took, 0, 2), 0)

    def test_a_quota_is_found_in_both_versions_of_control_groups_and_the_tightest_counts(self):
        with tempfile.TemporaryDirectory() as work:
            root, groups = Path(work, "root"), Path(work, "groups")
            inner = root / "outer" / "inner"
            inner.mkdir(parents=True)
            groups.write_text("0::/outer/inner\n")
            self.assertIsNone(clock.Quota.of_this_process(root, groups))
            (inner / "cpu.max").write_text("max 100000\n")
            (root / "outer" / "cpu.max").write_text("150000 100000\n")
            (root / "outer" / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
            quota = clock.Quota.of_this_process(root, groups)
            self.assertEqual((quota.processors, quota.used()), (1.5, 2.5))
            groups.write_text("5:cpu,cpuacct:/far/away\n0::/\n")
            (root / "cpu").mkdir()
            for name, text in (("cfs_quota_us", "50000"), ("cfs_period_us", "100000")):
                (root / "cpu" / f"cpu.{name}").write_text(text)
            (root / "cpuacct").mkdir()
            (root / "cpuacct" / "cpuacct.usage").write_text("3000000000\n")
            quota = clock.Quota.of_this_process(root, groups)
            self.assertEqual((quota.processors, quota.used()), (0.5, 3.0))
            (root / "cpu" / "cpu.cfs_quota_us").write_text("-1")
            self.assertIsNone(clock.Quota.of_this_process(root, groups))

    def test_checks_measure_with_the_threads_of_a_worker(self):
        checks = str(HERE.parent.parent / "tests" / "checks")
        with unittest.mock.patch.object(sys, "path", [*sys.path, checks]):
            import measured
        for processors, quota, threads in (({0}, None, "1"), ({0, 1, 2}, 2.5, "2"), ({0, 1}, 0.5, "1")):
            host = clock.HostClock()
            host.processors, host.quota = processors, quota and clock.Quota(quota, None)
            with (
                unittest.mock.patch.object(measured, "HostClock", lambda: host),
                unittest.mock.patch.object(measured, "Client") as client,
                measured.vllm_helper(None),
            ):
                pass
            self.assertEqual(client.call_args.args[1], {"OMP_NUM_THREADS": threads})

    def test_the_machines_own_clock_says_a_share(self):
        host = clock.HostClock()
        load = host.load()
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        share = host.busy_share(load)
        if share is None:
            self.skipTest("the system does not say how busy its processors are")
        self.assertTrue(0 <= share <= 1)

    def test_what_a_living_child_computes_is_counted(self):
        before = clock.group_seconds()
        spins = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        self.addCleanup(spins.wait)
        self.addCleanup(spins.kill)
        self.assertTrue(becomes(lambda: clock.group_seconds() >= before + 0.2))

    def test_what_a_living_child_has_waited_for_is_counted(self):
        spins = "import time\nwhile time.process_time() < 0.3: pass"
        waits = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spins!r}]); print(flush=True); sys.stdin.read()"
        before = clock.group_seconds()
        child = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(child.communicate)
        child.stdout.readline()
        self.assertGreaterEqual(clock.group_seconds(), before + 0.25)

    def test_what_times_depend_on_is_told_and_what_they_do_not_is_not(self):
        found = {"VLLM_CACHE_ROOT": "/a", "VLLM_LOG_STATS_INTERVAL": "1", "HF_HOME": "/b", "VLLM_ATTENTION_BACKEND": "X"}
        engine.prepare_environment(found)
        self.assertEqual(engine.settings_of(found), {"VLLM_ATTENTION_BACKEND": "X"})
        found["VLLM_CPU_OMP_THREADS_BIND"] = "0-15"
        self.assertIn("VLLM_CPU_OMP_THREADS_BIND", engine.settings_of(found))

    def test_whatever_a_user_has_set_of_vllms_a_server_is_told_too(self):
        settings = {"VLLM_ATTENTION_BACKEND": "X"}
        self.assertEqual(engine.serve_environment(settings, True, {"OMP_NUM_THREADS": "4"}), settings)
        on_cpu = engine.serve_environment(settings, False, {"OMP_NUM_THREADS": "4"})
        self.assertEqual({**on_cpu, "LD_PRELOAD": ""}, {**settings, "OMP_NUM_THREADS": "4", "LD_PRELOAD": ""})

    def test_a_config_has_the_same_place_each_time_and_another_one_another(self):
        with tempfile.TemporaryDirectory() as root:
            vllm = SimpleNamespace(envs=SimpleNamespace(VLLM_CACHE_ROOT=root))
            with unittest.mock.patch.dict(sys.modules, {"vllm": vllm}):
                shape = config(attention(), mlp(64))
                place = engine.place_of(shape)
                self.assertEqual(engine.place_of(dict(reversed(shape.items()))), place)
                self.assertNotEqual(engine.place_of(config(attention(), mlp(65))), place)
            self.assertEqual([file.name for file in place.iterdir()], ["config.json"])
            self.assertEqual(json.loads((place / "config.json").read_text()), shape)

    def test_a_window_needs_no_more_blocks_than_it_keeps(self):
        limits = {"block_tokens": 32, "max_tokens": 64, "windows": [None]}
        self.assertEqual(measure.blocks_of(limits, 1000), 32)
        self.assertEqual(measure.blocks_of({**limits, "windows": [100, None]}, 1000), 32 + 7)
        self.assertEqual(measure.blocks_of({**limits, "windows": [100]}, 33), 2)

    def test_the_most_that_was_held_is_seen_after_it_was_given_back_and_forgotten_once_told(self):
        for marked in (True, False):
            peak = memory.Peak()
            if marked and not peak.marked:
                continue
            peak.marked = marked
            peak.start()
            peak.take()
            taken = bytearray(64 << 20)
            self.assertTrue(becomes(lambda: marked or peak.seen >= memory.held() - (1 << 20)))
            del taken
            held, most = peak.take()
            self.assertGreater(most - held, 60 << 20)
            self.assertLess(most - held, 80 << 20)
            held, most = peak.take()
            self.assertLess(most - held, 8 << 20)

    def test_what_others_share_counts_whole_however_many_they_are(self):
        taken = bytearray(b"x" * (64 << 20))
        before = memory.held()
        goes_on = os.pipe()
        # It shares every page until one of both writes on it.
        sharer = os.fork()
        if sharer == 0:
            os.close(goes_on[1])
            os.read(goes_on[0], 1)
            os._exit(0)
        try:
            shared = memory.held()
        finally:
            os.close(goes_on[1])
            os.waitpid(sharer, 0)
            os.close(goes_on[0])
        for held in (shared, memory.held()):
            self.assertLess(abs(held - before), 1 << 20)
        self.assertGreater(before, len(taken))

    def test_memory_of_a_control_group_leaves_out_files_that_can_be_dropped(self):
        with tempfile.TemporaryDirectory() as work:
            for name, text in (("max", "1000"), ("current", "700"), ("stat", "anon 400\ninactive_file 250\n")):
                Path(work, f"memory.{name}").write_text(text)
            group = memory.ControlGroup(Path(work))
            self.assertEqual((group.most, group.used), (1000, 450))
            Path(work, "memory.max").write_text("max")
            self.assertIsNone(memory.ControlGroup(Path(work)).most)

    def test_prompts_are_the_same_in_each_run_and_begin_differently(self):
        first, again = (prompts.Prompts(100, 64) for _ in range(2))
        found = [first.take(number, 16) for number in range(4096)]
        self.assertEqual(found, [again.take(number, 16) for number in range(4096)])
        self.assertEqual(len({tuple(each) for each in found}), 4096)
        self.assertTrue(all(3 <= token < 100 for each in found for token in each))
        self.assertEqual(len(first.take(4095, 64)), 64)
        self.assertEqual(prompts.Prompts(1, 4).take(5, 3), [0, 0, 0])

    def test_level_lengths_make_up_for_sequences_that_run_ahead(self):
        for sequences, length, budget in ((8, 40, 64), (64, 1000, 2048), (16, 4000, 8192), (64, 128, 512), (1, 1, 2)):
            lengths = prompts.level_lengths(sequences, length, budget)
            begun = prompts.begin_steps(lengths, budget)
            levels = [each + begun[-1] - step for each, step in zip(lengths, begun)]
            self.assertLessEqual(max(levels) - min(levels), 1, (sequences, length, budget))
            self.assertEqual(levels[-1], length)

    def test_a_request_is_parsed_with_its_defaults(self):
        request, failure = requests.parse(
            b'{"id":3,"steps":{"engine":"a","point":{"prefill":{"tokens":4,"sequences":1}},"repeats":2}}'
        )
        self.assertIsNone(failure)
        self.assertEqual(request.fields["warm_ups"], 1)
        self.assertEqual(request.fields["point"], ("prefill", {"tokens": 4, "sequences": 1}))


if __name__ == "__main__":
    unittest.main()
