"""vLLM: all that is known of its interface. The rest of the helper asks for engines here.

Run with 0.32 on CPUs and 0.26 on a GPU. Beside `LLM` and its `llm_engine` this touches the
scheduler (who runs, who was put back, how blocks are laid out) and the attention layers (head sizes).
"""

import gc
import hashlib
import json
import os
import platform
import re
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import espalier_vllm

from . import PROTOCOL, device, memory, needs
from .clock import HostClock
from .failure import Failure, invalid
from .prompts import Prompts

TESTED = ("0.26", "0.32")
DTYPES = {"bf16": "bfloat16", "f32": "float32"}
# What decides what is measured, and what a user may have set otherwise.
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_MODULE_LOADING": "LAZY",
}
# Options that say where a model comes from. The others are how it is measured, and anybody can serve it with them.
SOURCE = ("load_format", "skip_tokenizer_init", "trust_remote_code")
# What a CPU engine's threads hang on, and its allocator, as this process was started: vLLM changes the latter.
CPU_VARIABLES = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
PRELOAD = os.environ.get("LD_PRELOAD", "")

# Words of the names of those variables of vLLM's that say nothing of how long something takes.
UNTIMED = {"ASSETS", "HOST", "KEY", "LOG", "LOGGING", "PATH", "PORT", "ROOT", "STATS"}


def prepare_environment(environment):
    """Before vLLM is imported, since its modules read it once."""
    environment.update(SETTINGS)
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
    # In GiB, and has its way over the bytes that a request names.
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)


def settings_of(environment):
    """What a user has set of vLLM's and may change how long something takes: all that is not known not to."""
    ours = {**SETTINGS, **DEFAULTS}
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith("VLLM_") and UNTIMED.isdisjoint(name.split("_")) and ours.get(name) != value
    }


def check_version(version, trusted):
    """Whether the version was tested; refuses one that was not and is not trusted."""
    minor = ".".join(version.split(".")[:2])
    if minor not in TESTED and minor not in trusted:
        known = " and ".join(TESTED)
        raise Failure("version", f"vLLM is {version}, expected {known}, which were tested, or one of trusted_versions")
    return minor in TESTED


class Platform:
    """The device that this process measures on, and what its engines share."""

    def __init__(self):
        self.cuda = self.alone = False
        self.settings = {}
        self.open_engines = []

    def hello(self, trusted, stage):
        stage("import")
        # Before vLLM sets some itself.
        self.settings = settings_of(os.environ)
        try:
            import vllm

            tested = check_version(vllm.__version__, trusted)
            import torch
            from vllm import LLM  # noqa: F401  (most of the time that importing takes)
            from vllm.platforms import current_platform
        except ImportError as error:
            raise Failure("no_vllm", f"vLLM cannot be imported: {error}") from error
        # vLLM does this itself where the plugin is installed; not where it is only on PYTHONPATH.
        espalier_vllm.register()
        self.cuda = current_platform.is_cuda()
        if not self.cuda and not current_platform.is_cpu():
            kind = type(current_platform).__name__
            raise Failure("no_vllm", f"vLLM runs on {kind}, expected a CPU or CUDA")
        if self.cuda:
            device.watch_graphs()
            self.alone = device.is_ours_alone()
        supported = current_platform.supported_dtypes
        return {
            "protocol": PROTOCOL,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "plugin": espalier_vllm.VERSION,
            "tested": tested,
            "platform": "cuda" if self.cuda else "cpu",
            "device": device.name() if self.cuda else memory.processor_name(),
            "threads": torch.get_num_threads(),
            "preload": os.environ.get("LD_PRELOAD", ""),
            "driver": device.driver() if self.cuda else None,
            "multiprocessors": device.multiprocessors() if self.cuda else None,
            "settings": self.settings,
            "head_sizes": None if self.cuda else cpu_head_sizes(),
            "precisions": [name for name, dtype in DTYPES.items() if getattr(torch, dtype) in supported],
            "graphs": self.cuda,
            "block_tokens": {"default": 16, "multiple": 16} if self.cuda else {"default": 128, "multiple": 32},
            "memory_bytes": device.memory()["total_bytes"] if self.cuda else memory.limit(),
            "cache_bytes": device.cache_bytes() if self.cuda else None,
        }

    def memory(self):
        return device.take_memory(self.alone) if self.cuda else None

    def open(self, fields, stage):
        """An engine and what is told of it."""
        start = time.perf_counter()
        self.check(fields)
        engine = Engine(fields["directory"] or place_of(fields["config"]), fields, self, stage)
        self.open_engines.append(engine)
        try:
            engine.check_head_sizes()
            answer = engine.describe()
        except Exception:
            engine.close()
            raise
        return engine, {**answer, "seconds": round(time.perf_counter() - start, 3)}

    def check(self, fields):
        """Refuses what vLLM would fall over later, or take the machine down with."""
        if fields["graph_sizes"] is not None and not (self.cuda and fields["compiled"]):
            raise invalid("graph_sizes", fields["graph_sizes"], "none on a CPU or without compiled")
        multiple = 16 if self.cuda else 32
        if fields["block_tokens"] is not None and fields["block_tokens"] % multiple:
            raise invalid("block_tokens", fields["block_tokens"], f"a multiple of {multiple}")
        if fields["max_tokens"] < fields["max_sequences"]:
            raise invalid("max_tokens", fields["max_tokens"], f"at least max_sequences, {fields['max_sequences']}")
        config = fields["config"]
        if config is None:
            config = needs.read_config(fields["directory"])
        positions = config.get("max_position_embeddings")
        if isinstance(positions, int) and fields["max_context"] > positions:
            raise invalid("max_context", fields["max_context"], f"at most max_position_embeddings, {positions}")
        wanted = fields["kv_bytes"] + needs.weight_bytes(config, fields["directory"], fields["precision"])
        held = device.memory() if self.cuda else {"free_bytes": memory.available(), "total_bytes": memory.limit()}
        free, total = held["free_bytes"], held["total_bytes"]
        if free is not None and wanted > free:
            others = self.cuda and not self.open_engines and wanted <= total
            says = f"weights, keys and values take {wanted} bytes and {free} of {total} are free"
            raise Failure("busy" if others else "out_of_memory", says)

    def failure(self, error):
        """What an exception of vLLM's or torch's means."""
        says = " ".join(f"{type(error).__name__}: {error}".split())
        if is_out_of_memory(error, says):
            return Failure("out_of_memory", says)
        if re.search(r"CUDA error|CUDA driver error|cudaError|device-side assert", says):
            return Failure("engine", says, fatal=True)
        if "Free memory on device" in says:
            return Failure("out_of_memory" if self.open_engines else "busy", says)
        if re.search(r"larger than the available KV cache memory|No available memory for the cache blocks", says):
            return Failure("invalid", f"kv_bytes is too small for one sequence of max_context: {says}")
        if is_refusal(error, says):
            return Failure("unsupported", says)
        return Failure("engine", says)

    def give_back(self):
        """Memory of what is not referenced any more, to the system or the device."""
        gc.collect()
        if self.cuda:
            device.empty_cache()
        memory.trim()


def is_out_of_memory(error, says):
    # torch's own class by its name: without torch there is nothing of it to compare with.
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    # vLLM's on a processor counts one of its memory nodes; then torch's, Triton's and cuBLAS's of a device.
    words = (
        r"can't allocate memory|not enough memory|Available memory on node \d+ .* is less than requested memory"
        r"|CUDA (driver )?error: out of memory|Triton Error \[CUDA\]: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    )
    return named or bool(re.search(words, says))


def is_refusal(error, says):
    """Whether vLLM, or our class in it, says that it cannot run this. A `ValueError` alone says no such thing: a cache
    that is damaged raises one too, and is mended by another try. What a system does not support is its machine's matter.
    """
    if isinstance(error, OSError):
        return False
    # pydantic's own by its name, as it checks what an engine is asked for.
    named = isinstance(error, (NotImplementedError, espalier_vllm.Unsupported)) or any(
        kind.__name__ == "ValidationError" for kind in type(error).__mro__
    )
    # The last: of the config of our class.
    words = r"\b(not |un)supported\b|\bnot support\b|\bonly supports?\b|\bconfig blocks\b|`blocks` has"
    return named or bool(re.search(words, says, re.IGNORECASE))


def cpu_head_sizes():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend.get_supported_head_sizes()


def place_of(config):
    """A directory with this config and no weights, the same one each time: vLLM finds what it has compiled by a model's path
    among other things. So it lies beside that, and stays as long."""
    from vllm import envs

    text = json.dumps(config, sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    directory = Path(envs.VLLM_CACHE_ROOT, "espalier-configs", name)
    directory.mkdir(parents=True, exist_ok=True)
    # Another process may read it.
    partial = directory / f"config.json.{os.getpid()}"
    partial.write_text(text)
    partial.replace(directory / "config.json")
    return directory


class Engine:
    """One model in vLLM, driven step by step in this process."""

    def __init__(self, directory, fields, owner, stage):
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = {
            "dtype": DTYPES[fields["precision"]],
            "load_format": "auto" if fields["config"] is None else "dummy",
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "enforce_eager": not fields["compiled"],
            "max_model_len": fields["max_context"],
            "max_num_seqs": fields["max_sequences"],
            "max_num_batched_tokens": fields["max_tokens"],
            "kv_cache_memory_bytes": fields["kv_bytes"],
            "gpu_memory_utilization": fields["gpu_memory_utilization"],
        }
        if fields["block_tokens"] is not None:
            options["block_size"] = fields["block_tokens"]
        if fields["graph_sizes"] is not None:
            options["compilation_config"] = {"cudagraph_capture_sizes": sorted(set(fields["graph_sizes"]))}
        self.options = options
        with weights_counted(stage) as counted:
            self.llm = LLM(str(directory), **options)
        self.owner = owner
        self.weight_bytes = counted[0]
        self.llm_engine = self.llm.llm_engine
        self.scheduler = self.llm_engine.engine_core.engine_core.scheduler
        self.clock = HostClock()
        self.device_steps = device.STEPS if owner.cuda else 0
        # As it is served: where vLLM schedules a step while the one before is computed, what a step gives is of that.
        self.ahead = int(bool(self.llm_engine.vllm_config.scheduler_config.async_scheduling))
        self.vocabulary = self.llm_engine.vllm_config.model_config.get_vocab_size()
        cache, layout = self.llm_engine.vllm_config.cache_config, self.scheduler.kv_cache_config
        self.block_bytes = pool_bytes(layout) // layout.num_blocks
        self.limits = {
            **{key: fields[key] for key in ("max_tokens", "max_sequences", "max_context", "kv_bytes")},
            "block_tokens": cache.block_size,
            "kv_blocks": layout.num_blocks,
            "windows": [window_of(group.kv_cache_spec) for group in layout.kv_cache_groups],
        }
        self.sampling = lambda new_tokens, **more: SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            **{"output_kind": RequestOutputKind.DELTA, **more},
        )
        self.whole = RequestOutputKind.FINAL_ONLY
        self.prompts = Prompts(self.vocabulary, fields["max_context"])
        self.asked, self.live, self.lost = 0, set(), {}

    def attention_layers(self):
        """By their place in the model: `{"0": layer, ..}`, the number in `model.layers.0.self_attn.attn`."""
        context = self.llm_engine.vllm_config.compilation_config.static_forward_context
        found = {}
        for name, layer in context.items():
            number = re.search(r"\.(\d+)\.", name)
            if number is not None and hasattr(layer, "head_size"):
                found[number[1]] = layer
        return found

    def check_head_sizes(self):
        """vLLM on a CPU would only fall over at the first step."""
        for number, layer in self.attention_layers().items():
            if not layer.attn_backend.supports_head_size(layer.head_size):
                name = layer.attn_backend.get_name()
                raise Failure(
                    "unsupported", f"layer {number} has a head size of {layer.head_size}, which {name} refuses"
                )

    def describe(self):
        import torch

        [specs] = self.llm.collective_rpc("get_kv_cache_spec")
        by_token = {}
        for name, spec in specs.items():
            number = re.search(r"\.(\d+)\.", name)
            by_token[number[1] if number else name] = spec.page_size_bytes // spec.block_size
        return {
            "weight_bytes": self.weight_bytes,
            "kv_blocks": self.limits["kv_blocks"],
            "block_tokens": self.limits["block_tokens"],
            "block_bytes": self.block_bytes,
            "kv_bytes": self.limits["kv_blocks"] * self.block_bytes,
            "kv_bytes_per_token": by_token,
            "captured": self.captured_sizes(),
            "async_scheduling": self.ahead > 0,
            "threads": torch.get_num_threads(),
            "serve_arguments": serve_arguments(self.options),
            "serve_environment": serve_environment(self.owner.settings, self.owner.cuda, os.environ),
        }

    def captured_sizes(self):
        """Batch sizes of captured graphs; none without a GPU or in eager mode."""
        if not self.owner.cuda:
            return []
        return sorted(self.llm_engine.vllm_config.compilation_config.cudagraph_capture_sizes or [])

    def add(self, length, new_tokens):
        self.asked += 1
        return self.ask(self.prompts.take(self.asked, length), self.sampling(new_tokens))

    def ask(self, prompt, sampling):
        name = f"r{self.asked}"
        self.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self.live.add(name)
        return name

    def step(self):
        tokens, ended = {}, []
        for output in self.llm_engine.step():
            tokens[output.request_id] = sum(len(each.token_ids) for each in output.outputs)
            if output.finished:
                ended.append(output.request_id)
        self.live.difference_update(ended)
        # Who was put back is still there: it cannot have ended in the same step.
        for name, request in self.scheduler.requests.items():
            if request.num_preemptions:
                self.lost[name] = request.num_preemptions
        return tokens, ended

    def running(self):
        return len(self.scheduler.running)

    def preempted(self):
        return sum(self.lost.values())

    def abort(self):
        if self.live:
            self.llm_engine.abort_request(sorted(self.live))
            self.live.clear()

    def device_times(self, step):
        if not self.owner.cuda:
            return {"device_ms": None, "device_source": None, "outside_ms": None, "captured": None}
        return device.times(step, self.captured_sizes())

    def generate(self, given, new_tokens, log_probabilities, stage):
        kind = {"prompt_logprobs": 0} if log_probabilities else {}
        sampling = self.sampling(new_tokens, output_kind=self.whole, **kind)
        names = []
        for prompt in given:
            self.asked += 1
            names.append(self.ask(prompt, sampling))
        outputs, taken = {}, 0
        while self.llm_engine.has_unfinished_requests():
            for output in self.llm_engine.step():
                if output.finished:
                    outputs[output.request_id] = output
                    self.live.discard(output.request_id)
            taken += 1
            stage("generate", taken)
        tokens = [list(outputs[name].outputs[0].token_ids) for name in names]
        if not log_probabilities:
            return tokens, None
        rows = [outputs[name].prompt_logprobs[1:] for name in names]
        found = [[row[token].logprob for row, token in zip(each, prompt[1:])] for each, prompt in zip(rows, given)]
        return tokens, found

    def close(self):
        """Gives the engine's memory back, and leaves what others that are open share with it."""
        start = time.perf_counter()
        self.owner.open_engines.remove(self)
        try:
            self.abort()
            with ExitStack() as kept:
                if self.owner.open_engines:
                    keep_shared(kept)
                self.llm_engine.engine_core.shutdown()
        except Exception as error:
            raise Failure("engine", f"the engine could not be closed: {error}", fatal=True) from error
        self.llm = self.llm_engine = self.scheduler = None
        self.owner.give_back()
        return {"seconds": round(time.perf_counter() - start, 3)}


def serve_arguments(options):
    """What follows `vllm serve DIRECTORY` where a server is to run as an engine with these options does."""
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if name in SOURCE:
            continue
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def serve_environment(settings, cuda, environment):
    """The variables that a server needs to run as this process does: settings of vLLM's, and what a CPU's threads hang on."""
    return settings if cuda else {**settings, **cpu_variables(environment)}


def cpu_variables(environment):
    found = {name: environment.get(name) for name in CPU_VARIABLES} | {"LD_PRELOAD": PRELOAD}
    return {name: value for name, value in found.items() if value}


def pool_bytes(layout):
    """Bytes of all pages: 0.26 gives each tensor its size, 0.32 each the size of the one allocation that all lie in."""
    sizes = [tensor.size for tensor in layout.kv_cache_tensors]
    return sizes[0] if hasattr(layout.kv_cache_tensors[0], "layers") else sum(sizes)


def window_of(spec):
    """The sliding window of a group of layers, or None. Layers with unequal pages are one group, a spec for each."""
    specs = getattr(spec, "kv_cache_specs", None)
    return getattr(next(iter(specs.values())) if specs else spec, "sliding_window", None)


def keep_shared(kept):
    """While one of several engines is shut down: process groups and workspaces are the whole process's."""
    kept.enter_context(mock.patch("vllm.v1.engine.core.cleanup_dist_env_and_memory"))
    kept.enter_context(mock.patch("vllm.v1.worker.workspace.reset_workspace_manager"))


@contextmanager
def weights_counted(stage):
    """While a model is loaded: the bytes of its tensors. vLLM then packs them for its kernels, out of sight."""
    from vllm.model_executor.model_loader import base_loader

    counted, whole = [], base_loader.process_weights_after_loading

    def count(model, *arguments):
        storages = {}
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        counted.append(sum(storages.values()))
        stage("start")
        return whole(model, *arguments)

    with mock.patch.object(base_loader, "process_weights_after_loading", count):
        yield counted
