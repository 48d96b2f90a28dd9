"""Whether costs of vLLM's steps add up block by block on this machine: differences between depths, and a mix predicted.

    python bench/vllm-depths.py [--rounds 5] [--prompt 256] [--batch 1] [--compiled]

Engines of a few distinct copies of one block, with random weights and the plugin's model class, live in one process;
their steps are timed in turns. (T_deep - T_shallow) / copies between them is what a copy costs; what is left of
T_shallow is the engine's own share. A mix that was not timed is then predicted, and timed. Needs vLLM and the plugin.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "serving" / "tests"))

import engine  # noqa: E402, F401  (sets vLLM's environment, so it comes before vLLM)

HIDDEN, HEAD, HEADS, KV_HEADS, WIDTH = 576, 64, 9, 3, 1536
SHALLOW, DEEP = 4, 12


def attention(kv_heads=KV_HEADS):
    return {
        "type": "attention",
        "num_attention_heads": kv_heads * (HEADS // KV_HEADS),
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD,
        "qkv_bias": False,
        "output_bias": False,
        "qk_norm": False,
        "sliding_window": None,
    }


def mlp(width=WIDTH):
    return {"type": "mlp", "intermediate_size": width, "bias": False}


# An engine without attention is none: each MLP stack carries one attention block, which the difference removes.
STACKS = {
    "attention 9/3": lambda copies: [attention()] * copies,
    "attention 3/1": lambda copies: [attention(1)] * copies,
    "mlp 1536": lambda copies: [attention()] + [mlp()] * copies,
    "mlp 512": lambda copies: [attention()] + [mlp(512)] * copies,
}
MIX = {"attention 9/3": 5, "attention 3/1": 3, "mlp 1536": 6, "mlp 512": 4}


def mixed():
    return [attention()] * 5 + [mlp()] * 6 + [mlp(512)] * 4 + [attention(1)] * 3


def build(directory, blocks, compiled, batch, prompt):
    import json

    from vllm import LLM

    directory.mkdir()
    config = {
        "model_type": "espalier",
        "architectures": ["EspalierForCausalLM"],
        "family": "llama",
        "dtype": "bfloat16",
        "vocab_size": 4096,
        "hidden_size": HIDDEN,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "blocks": blocks,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return LLM(
        str(directory),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=not compiled,
        max_model_len=2048,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, batch * prompt),
        async_scheduling=False,
        kv_cache_memory_bytes=256 << 20,
    ).llm_engine


def time_steps(stack, prompt, batch, new_tokens, number):
    """Seconds by the wall and by the processor of the prefill step and of each decode step."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    for index in range(batch):
        tokens = [(7 * index + 13 * place + number) % 4000 + 3 for place in range(prompt)]
        stack.add_request(f"{number}-{index}", {"prompt_token_ids": tokens}, sampling)
    seconds = []
    while stack.has_unfinished_requests():
        start = time.perf_counter(), time.process_time()
        stack.step()
        seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    if len(seconds) != new_tokens:
        raise RuntimeError(f"{len(seconds)} steps for {new_tokens} tokens: the prompts did not run in one step")
    return seconds[0], seconds[1:]


def low(values):
    """The lower quartile: what the machine does when least disturbed, without trusting one lucky step."""
    return statistics.quantiles(values, n=4)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds is {given.rounds}, expected at least 2: quartiles of one say nothing")
    wanted = {f"{name} x {copies}": stack(copies) for name, stack in STACKS.items() for copies in (SHALLOW, DEEP)}
    wanted["mix"] = mixed()
    # On a machine that others use, the wall says how busy they are; with one thread the processor's time does not.
    phases = [(phase, clock) for phase in ("prefill", "decode") for clock in ("wall", "processor")]
    times = {phase: {name: [] for name in wanted} for phase in phases}
    with tempfile.TemporaryDirectory() as work:
        os.environ.setdefault("VLLM_CACHE_ROOT", f"{work}/cache")
        built = {}
        for number, (name, blocks) in enumerate(wanted.items()):
            start = time.perf_counter()
            built[name] = build(Path(work) / str(number), blocks, given.compiled, given.batch, given.prompt)
            print(f"built {name} in {time.perf_counter() - start:.1f} s", flush=True)
        for number in range(given.rounds + 1):
            for name, stack in built.items():
                first, rest = time_steps(stack, given.prompt, given.batch, given.new_tokens, number)
                # The first round warms up.
                if number > 0:
                    for place, clock in enumerate(("wall", "processor")):
                        times["prefill", clock][name].append(first[place])
                        times["decode", clock][name].extend(step[place] for step in rest)
    for phase in phases:
        report(" by the ".join(phase), times[phase])


def report(phase, times):
    """Each block's cost, and the mix predicted from them beside the mix measured."""
    cost, base = {}, []
    for name in STACKS:
        shallow, deep = low(times[f"{name} x {SHALLOW}"]), low(times[f"{name} x {DEEP}"])
        cost[name] = (deep - shallow) / (DEEP - SHALLOW)
        others = cost["attention 9/3"] if name.startswith("mlp") else 0.0
        base.append(shallow - SHALLOW * cost[name] - others)
        spread = statistics.quantiles(times[f"{name} x {DEEP}"], n=4)
        print(
            f"{phase}, {name}: {1e6 * cost[name]:.1f} us a copy, base {1e6 * base[-1]:.0f} us, "
            f"quartiles of {DEEP} copies {1e3 * spread[0]:.2f} to {1e3 * spread[2]:.2f} ms"
        )
    predicted = statistics.median(base) + sum(cost[name] * copies for name, copies in MIX.items())
    measured = low(times["mix"])
    print(
        f"{phase}, a mix: predicted {1e3 * predicted:.3f} ms, measured {1e3 * measured:.3f} ms, "
        f"{100 * (predicted / measured - 1):+.1f}%"
    )


if __name__ == "__main__":
    main()
