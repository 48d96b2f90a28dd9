"""An engine of vLLM's in this process, for one checkpoint at a time."""

import gc
import os
from contextlib import contextmanager

# Before vLLM is imported: what its modules read once.
for key, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}.items():
    os.environ.setdefault(key, value)
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


@contextmanager
def served(directory, **options):
    """vLLM's `LLM` over a directory, without the code that the directory carries; taken down at the end."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "max_model_len": 256,
        "max_num_seqs": 8,
        # Of a GPU's memory, which others may share.
        "gpu_memory_utilization": 0.1,
        # VLLM_CPU_KVCACHE_SPACE, where it is set, has its way over this.
        "kv_cache_memory_bytes": 64 << 20,
        **options,
    }
    engine = None
    try:
        engine = LLM(str(directory), **given)
        yield engine
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def answers(engine, prompts, new_tokens):
    """Greedy tokens after each prompt, all running together, and the log-probabilities of each prompt's tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, prompt_logprobs=0, detokenize=False
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(given, sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [
        [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], prompt[1:])]
        for output, prompt in zip(outputs, prompts)
    ]
    return tokens, logprobs


def cache_bytes_per_token(engine):
    """Bytes of keys and values that each attention layer holds for a token, by the layer's name."""
    [specs] = engine.collective_rpc("get_kv_cache_spec")
    return {name: spec.page_size_bytes // spec.block_size for name, spec in specs.items()}
