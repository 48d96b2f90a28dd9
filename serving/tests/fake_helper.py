"""The helper without vLLM: the same lines, costs by a formula, and every kind of misbehaviour. Needs only Python 3.10.

    python3 fake_helper.py [whatever follows is passed over, so that it can stand for `python -m espalier_vllm.helper`]

A step costs, in microseconds, with n the tokens it computes, k the keys it reads over all sequences, h the width:

    base        200 + n / 2
    attention   10 + w / 500 + n w / 20000 + k (2 kv_heads head_dim) / 400      w = 2 h head_dim (heads + kv_heads)
    MLP         10 + w / 500 + n w / 20000                                      w = 3 h width

Time passes as if it were slept. The environment says what else is different:

    FAKE_VLLM          what goes wrong, `VERB[:N]=WHAT` with commas between: at the Nth request of that verb or each.
                       VERB may be `start`, before any request is read. WHAT is one of
                         hang          nothing more is said, and the end of input is not looked for
                         stall         signs of life go on, with nothing done
                         die           killed by signal 9, after a first `progress`
                         killed        as the worker is left where the system did that for want of memory
                         exit          status 1 with a traceback on standard error
                         flood         50 MB on standard output and error first
                         long_line     20 MiB without a line feed on descriptor 3
                         garbage       bytes on descriptor 3 that are no JSON
                         half          half of the answer, then the end
                         wrong_id      the answer to another request
                         twice         the answer, twice
                         nothing       an answer without its fields
                         orphan        a child is left behind in the process group, then as usual
                         litter        a file is left behind among the temporary ones, then as usual
                         closed        the answers end, the process does not
                         raise         an exception within, which closes the engine
                         fatal         an error that ends the process with 3
                         no_vllm, version, invalid, unsupported, out_of_memory, busy, engine   an error of that kind
                         protocol      an error that the other side speaks another version
    FAKE_VLLM_ONCE     path of a file that is made at the first misbehaviour; once it is there, all goes well
    FAKE_VLLM_ENGINES  engines that fit into memory at a time; one more is out_of_memory
    FAKE_VLLM_MEMORY   bytes of weights, keys and values that fit, all engines together
    FAKE_VLLM_NOISE    1: others take up to half of the processors; times up to twice as long, and `busy` says so
    FAKE_VLLM_BUSY     `3-8`: the third to the eighth request for times are answered as if others used half of the
                       processors, with times twice as long; without an end, `3-`, from the third on
    FAKE_VLLM_LITTER   path of a file that is told where `litter` was left
    FAKE_VLLM_MIXING   0.1 means that a model with d different block shapes costs 1 + 0.1 × (d − 2) times the sum
    FAKE_VLLM_VERSION  the version it says it is, "0.32.0"
    FAKE_VLLM_CUDA     1: a GPU, with graphs. Its own time of a step is 60% of the above; by the clock a step of n blocks
                       takes the longer of that and 100 µs, and of 300 + 60 n
    FAKE_VLLM_SHARED   1: others have memory of the GPU, so that nobody knows what its context takes
    FAKE_VLLM_PRELOAD  what it says was preloaded
    FAKE_VLLM_THREADS  threads of the engines that it opens, 1, which is what it says it has
    FAKE_VLLM_LOG      path of a file to which each request's line is appended
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from espalier_vllm.helper import PROTOCOL  # noqa: E402
from espalier_vllm.helper.channel import Channel  # noqa: E402
from espalier_vllm.helper.clock import Moment  # noqa: E402
from espalier_vllm.helper.engine import settings_of  # noqa: E402
from espalier_vllm.helper.failure import Failure  # noqa: E402
from espalier_vllm.helper.session import Session  # noqa: E402

ANSWERS = 3
TESTED = ("0.26", "0.32")
HEAD_SIZES = [32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512]
CUDA = os.environ.get("FAKE_VLLM_CUDA") == "1"
# A GPU's share of a step, and the host's part: what the device waits for, and what it needs itself; microseconds.
DEVICE_SHARE, ALONE, FLOOR, BLOCK = 0.6, 100, 300, 60
# What an engine takes while it serves, of a GPU's memory or really of the process's. Of a GPU's also what the process
# keeps beside weights, keys and values from its first engine on, and the context.
ACTIVATIONS, GRAPHS, OUTSIDE = 32 << 20, 64 << 20, 512 << 20


class FakeClock:
    """Time that passes only when a step is said to take some."""

    def __init__(self):
        self.at = Moment(0.0, 0.0)
        self.noise = float(os.environ.get("FAKE_VLLM_NOISE", "0"))
        self.random = random.Random(1)

    def now(self):
        return self.at

    def load(self):
        return self.at

    def busy_share(self, load):
        took = self.at.since(load)
        return round(1 - took.cpu / took.wall, 4) if took.wall else 0.0

    def pass_by(self, seconds):
        slower = 2 if BUSY["now"] else 1 + self.noise * self.random.random()
        self.at = Moment(self.at.wall + seconds * slower, self.at.cpu + seconds)


class Sequence:
    def __init__(self, length, new_tokens):
        self.known, self.end = length, length + new_tokens
        self.computed = 0


class FakeEngine:
    """Sequences in blocks of keys and values: those that run first, then prompts, cut to what a step may hold."""

    device_steps, ahead = 1 if CUDA else 0, 0

    def __init__(self, config, limits, graph_sizes):
        self.config, self.limits, self.graph_sizes = config, limits, graph_sizes
        self.vocabulary = config["vocab_size"]
        self.clock = FakeClock()
        self.waiting, self.active, self.lost, self.asked = {}, {}, 0, 0
        self.last, self.ran = (0, 0), False

    def add(self, length, new_tokens):
        self.asked += 1
        name = f"r{self.asked}"
        self.waiting[name] = Sequence(length, new_tokens)
        return name

    def blocks(self, tokens):
        return -(-tokens // self.limits["block_tokens"])

    def free(self):
        return self.limits["kv_blocks"] - 1 - sum(self.blocks(each.computed) for each in self.active.values())

    def make_room(self, name, tokens):
        """Whether the sequence may hold so many tokens; the youngest others lose theirs for it."""
        sequence = self.active[name]
        while self.blocks(tokens) - self.blocks(sequence.computed) > self.free():
            youngest = list(self.active)[-1]
            victim = self.active.pop(youngest)
            victim.computed = 0
            self.waiting = {youngest: victim, **self.waiting}
            self.lost += 1
            if youngest == name:
                return False
        return True

    def step(self):
        room, keys, tokens = self.limits["max_tokens"], 0, 0
        for name in list(self.active):
            if name in self.active:
                sequence = self.active[name]
                take = min(room, sequence.known - sequence.computed)
                if take and self.make_room(name, sequence.computed + take):
                    sequence.computed += take
                    room, tokens, keys = room - take, tokens + take, keys + take * sequence.computed
        while self.waiting and room > 0 and len(self.active) < self.limits["max_sequences"]:
            name, sequence = next(iter(self.waiting.items()))
            take = min(room, sequence.known)
            if self.blocks(take) > self.free():
                break
            self.active[name] = self.waiting.pop(name)
            sequence.computed = take
            room, tokens, keys = room - take, tokens + take, keys + take * take
        self.last, self.ran = (tokens, keys), True
        self.clock.pass_by(1e-6 * self.wall(microseconds(self.config, tokens, keys)))
        got, ended = {}, []
        for name, sequence in list(self.active.items()):
            if sequence.computed == sequence.known:
                sequence.known += 1
                got[name] = 1
                if sequence.known == sequence.end:
                    ended.append(name)
                    del self.active[name]
        return got, ended

    def wall(self, computing):
        if not CUDA:
            return computing
        return max(DEVICE_SHARE * computing + ALONE, FLOOR + BLOCK * len(self.config["blocks"]))

    def running(self):
        return len(self.active)

    def preempted(self):
        return self.lost

    def abort(self):
        self.waiting, self.active = {}, {}

    def device_times(self, step):
        if not CUDA:
            return {"device_ms": None, "device_source": None, "outside_ms": None, "captured": None}
        step()
        tokens, keys = self.last
        fitting = [size for size in self.graph_sizes if size >= tokens]
        captured = min(fitting) if fitting else None
        value = round(1e-3 * DEVICE_SHARE * microseconds(self.config, captured or tokens, keys), 6)
        source = "graph" if captured else "kernels"
        outside = round(value / 10, 6) if captured else None
        return {"device_ms": [value] * 3, "device_source": source, "outside_ms": outside, "captured": captured}

    def generate(self, prompts, new_tokens, log_probabilities, stage):
        stage("generate")
        tokens = [[(sum(prompt) + 7 * place) % self.vocabulary for place in range(new_tokens)] for prompt in prompts]
        found = [[-1.0 - token % 7 / 7 for token in prompt[1:]] for prompt in prompts]
        return tokens, found if log_probabilities else None

    def close(self):
        OPEN.remove(self)
        return {"seconds": 0.0}


OPEN = []
# How many requests for times there were, and whether others are at work.
BUSY = {"times": 0, "now": False}


def look_for_others():
    """Before times are taken."""
    first, _, last = os.environ.get("FAKE_VLLM_BUSY", "0-0").partition("-")
    BUSY["times"] += 1
    BUSY["now"] = int(first) <= BUSY["times"] <= (int(last) if last else BUSY["times"])


def block_weights(config, block):
    if block["type"] == "mlp":
        return 3 * config["hidden_size"] * block["intermediate_size"]
    heads = block["num_attention_heads"] + block["num_key_value_heads"]
    return 2 * config["hidden_size"] * block["head_dim"] * heads


def microseconds(config, tokens, keys):
    total = 200 + tokens / 2
    for block in config["blocks"]:
        weights = block_weights(config, block)
        total += 10 + weights / 500 + tokens * weights / 20000
        if block["type"] == "attention":
            total += keys * 2 * block["num_key_value_heads"] * block["head_dim"] / 400
    different = len({json.dumps(block, sort_keys=True) for block in config["blocks"]})
    return total * (1 + float(os.environ.get("FAKE_VLLM_MIXING", "0")) * max(0, different - 2))


class FakePlatform:
    graphs = 0

    def hello(self, trusted, stage):
        stage("import")
        version = os.environ.get("FAKE_VLLM_VERSION", "0.32.0")
        tested = any(version.startswith(f"{each}.") for each in TESTED)
        if not tested and not any(version.startswith(f"{each}.") for each in trusted):
            raise Failure("version", f"vLLM is {version}, expected 0.26 or 0.32, which were tested, or a trusted one")
        return {
            "protocol": PROTOCOL,
            "vllm": version,
            "torch": "2.13.0",
            "python": "3.12.0",
            "plugin": "0.1.0",
            "tested": tested,
            "platform": "cuda" if CUDA else "cpu",
            "device": "fake GPU" if CUDA else "fake processor",
            "threads": 1,
            "preload": os.environ.get("FAKE_VLLM_PRELOAD", ""),
            "settings": settings_of(os.environ),
            "head_sizes": None if CUDA else HEAD_SIZES,
            "precisions": ["bf16", "f32"],
            "graphs": CUDA,
            "block_tokens": {"default": 16, "multiple": 16} if CUDA else {"default": 128, "multiple": 32},
            "memory_bytes": 8 << 30,
            # Of its processor too: how deep stacks are is not to depend on the machine that runs the tests.
            "cache_bytes": 1 << 20,
        }

    def memory(self):
        if not CUDA:
            return None
        held = sum(engine.bytes for engine in OPEN) + self.graphs
        most = held + max((ACTIVATIONS for engine in OPEN if engine.ran), default=0)
        for engine in OPEN:
            engine.ran = False
        return {
            "reserved_bytes": held,
            "peak_reserved_bytes": most,
            "outside_bytes": None if os.environ.get("FAKE_VLLM_SHARED") == "1" else OUTSIDE,
            "used_bytes": held + OUTSIDE,
            "total_bytes": 8 << 30,
        }

    def open(self, fields, stage):
        config = fields["config"]
        if config is None:
            try:
                config = json.loads(Path(fields["directory"], "config.json").read_text())
            except (OSError, ValueError) as error:
                raise Failure("unsupported", f"{fields['directory']}: {error}") from None
        config = as_blocks(config)
        attention = [block for block in config["blocks"] if block["type"] == "attention"]
        if not attention:
            raise Failure("unsupported", "config blocks has no attention, expected at least one block of it")
        for block in attention:
            if block["head_dim"] not in HEAD_SIZES:
                raise Failure(
                    "unsupported", f"head size {block['head_dim']} is not supported, expected one of {HEAD_SIZES}"
                )
        size = 2 if fields["precision"] == "bf16" else 4
        by_token = {
            str(index): 2 * block["num_key_value_heads"] * block["head_dim"] * size
            for index, block in enumerate(config["blocks"])
            if block["type"] == "attention"
        }
        block_tokens = fields["block_tokens"] or (16 if CUDA else 128)
        block_bytes = block_tokens * sum(by_token.values())
        limits = {key: fields[key] for key in ("max_tokens", "max_sequences", "max_context", "kv_bytes")}
        limits.update(block_tokens=block_tokens, kv_blocks=fields["kv_bytes"] // block_bytes, windows=[None])
        tables = config["vocab_size"] * config["hidden_size"] * (1 if config.get("tie_word_embeddings") else 2)
        weights = size * (tables + sum(block_weights(config, block) for block in config["blocks"]))
        engine = FakeEngine(config, limits, fields["graph_sizes"] or [1, 2, 4, 8, 16, 32, 64])
        engine.bytes = weights + fields["kv_bytes"]
        if len(OPEN) >= int(os.environ.get("FAKE_VLLM_ENGINES", "1000000")):
            raise Failure("out_of_memory", f"no memory for an engine beside the {len(OPEN)} that are open")
        if sum(each.bytes for each in [*OPEN, engine]) > int(os.environ.get("FAKE_VLLM_MEMORY", str(1 << 60))):
            raise Failure("out_of_memory", f"no memory for {engine.bytes} bytes more")
        OPEN.append(engine)
        self.graphs = GRAPHS
        return engine, {
            "weight_bytes": weights,
            "kv_blocks": limits["kv_blocks"],
            "block_tokens": block_tokens,
            "block_bytes": block_bytes,
            "kv_bytes": limits["kv_blocks"] * block_bytes,
            "kv_bytes_per_token": by_token,
            "captured": engine.graph_sizes if CUDA and fields["compiled"] else [],
            "async_scheduling": False,
            "threads": int(os.environ.get("FAKE_VLLM_THREADS", "1")),
            "serve_arguments": ["--max-num-seqs", str(fields["max_sequences"]), "--no-enable-prefix-caching"],
            "serve_environment": {**settings_of(os.environ), **({} if CUDA else {"OMP_NUM_THREADS": "1"})},
            "seconds": 0.1,
        }

    def give_back(self):
        pass

    def failure(self, error):
        return Failure("engine", f"{type(error).__name__}: {error}")


def as_blocks(config):
    """The flat form of a config; a plain family's layers become two blocks each."""
    if "blocks" in config:
        return config
    heads = config["num_attention_heads"]
    attention = {
        "type": "attention",
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }
    mlp = {"type": "mlp", "intermediate_size": config["intermediate_size"]}
    return {**config, "blocks": [attention, mlp] * config["num_hidden_layers"]}


def planned():
    """What goes wrong, by verb and by number of the request (None: at each)."""
    plan = {}
    for entry in filter(None, os.environ.get("FAKE_VLLM", "").split(",")):
        where, what = entry.split("=")
        verb, _, number = where.partition(":")
        plan[verb, int(number) if number else None] = what
    return plan


class FakeSession(Session):
    """A session that misbehaves where the plan says so."""

    def __init__(self, channel, platform):
        super().__init__(channel, platform)
        self.plan, self.counts = planned(), {}

    def due(self, verb):
        self.counts[verb] = self.counts.get(verb, 0) + 1
        what = self.plan.get((verb, self.counts[verb])) or self.plan.get((verb, None))
        once = os.environ.get("FAKE_VLLM_ONCE")
        if what and once:
            try:
                os.close(os.open(once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return None
        return what

    def serve(self, fields, stage):
        activations = None if CUDA else b"x" * ACTIVATIONS
        served = super().serve(fields, stage)
        del activations
        return served

    def handle(self, request):
        what = self.due(request.verb)
        if request.verb in ("steps", "serve"):
            look_for_others()
        if what is None:
            return super().handle(request)
        if what != "hang":
            self.channel.stage("open")
        misbehave(what, self.channel, request.id)
        answer = super().handle(request)
        if what == "half":
            os.write(ANSWERS, json.dumps({"id": request.id, "done": answer}).encode()[:-9])
            os._exit(0)
        if what == "wrong_id":
            self.channel.done(request.id + 1000, answer)
        if what == "twice":
            self.channel.done(request.id, answer)
        return {} if what == "nothing" else answer


def misbehave(what, channel, number):
    """Does its worst; comes back where the request is then answered as usual."""
    if what == "hang":
        channel.lock.acquire()
        # The end of input ends what is asked something.
        channel.id = None
        channel.write({"id": number, "progress": {"stage": "open", "done": 0, "cpu_seconds": 0.0}})
        while True:
            time.sleep(1)
    elif what == "stall":
        while True:
            time.sleep(0.2)
            channel.write({"id": number, "progress": {"stage": "open", "done": 0, "cpu_seconds": 0.1}})
    elif what == "die":
        os.kill(os.getpid(), 9)
    elif what == "killed":
        raise Failure("out_of_memory", "the system killed it", fatal=True)
    elif what == "exit":
        print("Traceback (most recent call last):\nRuntimeError: fell over", file=sys.stderr, flush=True)
        os._exit(1)
    elif what == "flood":
        for _ in range(500):
            os.write(1, b"out " * 12500)
            os.write(2, b"err " * 12499 + b"\xff\xfe\n\0")
    elif what == "long_line":
        for _ in range(20):
            channel_write(b"x" * (1 << 20))
    elif what == "garbage":
        channel_write(b"\xff\x00 not JSON\n")
    elif what == "orphan":
        subprocess.Popen(["sleep", "600"])
    elif what == "litter":
        tempfile.mkstemp(prefix="vllm_dist_")
        Path(os.environ["FAKE_VLLM_LITTER"]).write_text(tempfile.gettempdir())
    elif what == "closed":
        os.close(ANSWERS)
        while True:
            time.sleep(1)
    elif what == "raise":
        raise RuntimeError("fell over within")
    elif what == "fatal":
        raise Failure("engine", "CUDA error: an illegal memory access was encountered", fatal=True)
    elif what not in ("half", "wrong_id", "twice", "nothing"):
        raise Failure(what, f"a fake failure of kind {what}")


def channel_write(data):
    while data:
        data = data[os.write(ANSWERS, data) :]


class LoggedChannel(Channel):
    """A channel whose requests are written down."""

    def lines(self):
        for line in super().lines():
            if path := os.environ.get("FAKE_VLLM_LOG"):
                with open(path, "ab") as log:
                    log.write(line)
            yield line


def main():
    os.set_inheritable(ANSWERS, False)
    channel = LoggedChannel(os.dup(0), ANSWERS)
    session = FakeSession(channel, FakePlatform())
    what = session.due("start")
    if what:
        misbehave(what, channel, None)
    channel.start()
    return session.run()


if __name__ == "__main__":
    STATUS = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STATUS)
