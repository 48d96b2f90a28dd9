"""Drives one engine by steps and times it.

An engine here is what `engine.Engine` offers, and the tests' own without vLLM: `add(length, new_tokens)`, which gives a
new request's name; `step()`, which gives the number of new tokens by name and the names that ended; `ahead`, how many
steps it computes before it tells what the first of them gave; `running()`, how many hold blocks; `preempted()`, how
often one lost them, in all; `abort()`, which ends them all; `limits`, what it was opened with; `vocabulary`; `clock`;
`device_times(step)`, of a step that gives how many tokens it computed, and `device_steps`, how many more of them that
takes; `generate`.

Steps of an engine that works ahead are told apart by the tokens that come, never by their number. While it is kept busy
each gives one token, the time between two being that of a step: the longer of what the host and the device need. The
first tokens after it was idle come with its second step, and took as long as both.
"""

from . import prompts
from .failure import Failure, invalid


def check_fits(limits, sequences, context, field):
    """Refuses sequences that the engine cannot hold, all together, at `context` tokens each."""
    if sequences > limits["max_sequences"]:
        raise invalid(f"{field} sequences", sequences, f"at most max_sequences, {limits['max_sequences']}")
    if context > limits["max_context"]:
        raise invalid(f"{field} tokens of a sequence", context, f"at most max_context, {limits['max_context']}")
    blocks = sequences * blocks_of(limits, context)
    # One block is never given to a sequence.
    if blocks >= limits["kv_blocks"]:
        expected = f"at most {limits['kv_blocks'] - 1}, which is what kv_bytes {limits['kv_bytes']} holds"
        raise invalid(f"{field} blocks of keys and values", blocks, expected)


def blocks_of(limits, context):
    """Blocks of one sequence: each group of layers has its own, and frees those that its window has left behind."""
    size = limits["block_tokens"]
    whole = -(-context // size)
    kept = [
        whole if window is None else -(-(window - 1 + limits["max_tokens"]) // size) + 1 for window in limits["windows"]
    ]
    return sum(min(whole, blocks) for blocks in kept)


class Times:
    """Times of single steps, and of all of them together."""

    def __init__(self, clock):
        self.clock = clock
        self.wall_ms, self.cpu_ms = [], []
        self.load = clock.load()

    def step(self, engine, sequences):
        """Times a step, in which each of `sequences` must get one token."""
        start = self.clock.now()
        tokens, _ = next_tokens(engine)
        took = self.clock.now().since(start)
        check_step(tokens, sequences)
        self.wall_ms.append(milliseconds(took.wall))
        self.cpu_ms.append(milliseconds(took.cpu))

    def answer(self):
        return {"wall_ms": self.wall_ms, "cpu_ms": self.cpu_ms, "busy": self.clock.busy_share(self.load)}


def milliseconds(seconds):
    return round(1e3 * seconds, 6)


def next_tokens(engine):
    """Steps until one gives tokens: the first, or as many more as the engine works ahead."""
    for _ in range(1 + engine.ahead):
        tokens, ended = engine.step()
        if tokens:
            break
    return tokens, ended


def check_step(tokens, sequences):
    if len(tokens) != sequences or any(number != 1 for number in tokens.values()):
        says = (
            f"a step gave {sum(tokens.values())} tokens to {len(tokens)} sequences, expected one to each of {sequences}"
        )
        raise Failure("engine", says)


def steps(engine, point, repeats, warm_ups, stage):
    """Times `repeats` steps: each the prefill of all sequences, or one more token for all of them."""
    phase, sizes = point
    try:
        return PHASES[phase](engine, sizes, repeats, warm_ups, stage)
    finally:
        engine.abort()


def prefill(engine, sizes, repeats, warm_ups, stage):
    length, sequences = sizes["tokens"], sizes["sequences"]
    check_fits(engine.limits, sequences, length + 1, "point.prefill")
    most = engine.limits["max_tokens"]
    if length * sequences > most:
        raise invalid("point.prefill tokens × sequences", length * sequences, f"at most max_tokens, {most}")

    def ask():
        for _ in range(sequences):
            engine.add(length, 1)

    def step():
        ask()
        check_step(next_tokens(engine)[0], sequences)
        return length * sequences

    for number in range(warm_ups):
        stage("warm_up", number)
        step()
    times = Times(engine.clock)
    for number in range(repeats):
        stage("steps", number)
        ask()
        times.step(engine, sequences)
    answer = times.answer()
    stage("device")
    return {**answer, "context": None, **engine.device_times(step)}


def decode(engine, sizes, repeats, warm_ups, stage):
    context, sequences = sizes["context"], sizes["sequences"]
    # A step finds a prompt's tokens in the cache, and one more each time. Where the engine works ahead the token that a
    # step computes is not the one that it gives.
    before = repeats // 2 + warm_ups + engine.ahead
    if context <= before:
        raise invalid(
            "point.decode.context", context, f"at least {before + 1}, for {repeats} repeats, {warm_ups} warm-ups"
        )
    # What comes after the last timed step: those that look at the device, and one so that no sequence ends.
    longest = context + repeats - repeats // 2 + engine.device_steps + 2 + engine.ahead
    check_fits(engine.limits, sequences, longest, "point.decode")
    if sequences >= engine.limits["max_tokens"]:
        raise invalid("point.decode.sequences", sequences, f"less than max_tokens, {engine.limits['max_tokens']}")
    lengths = prompts.level_lengths(sequences, context - before, engine.limits["max_tokens"])
    contexts = {}
    for length in lengths:
        name = engine.add(length, longest - length)
        contexts[name] = length
    begun, number = set(), 0
    while len(begun) < sequences:
        stage("prefill", number)
        number += 1
        tokens, ended = engine.step()
        if ended or number > sum(lengths) + sequences:
            raise Failure("engine", f"{sequences} sequences were asked for and only {len(begun)} ran together")
        for name, new in tokens.items():
            begun.add(name)
            contexts[name] += new

    def step():
        check_step(next_tokens(engine)[0], sequences)
        return sequences

    for number in range(warm_ups):
        stage("warm_up", number)
        step()
    times = Times(engine.clock)
    for number in range(repeats):
        stage("steps", number)
        times.step(engine, sequences)
    answer = times.answer()
    stage("device")
    # The token that came last is not in the cache before the next step.
    middle = sum(contexts.values()) / sequences - 1 + warm_ups + (repeats - 1) / 2 + engine.ahead
    return {**answer, "context": middle, **engine.device_times(step)}


PHASES = {"prefill": prefill, "decode": decode}


class Course:
    """One request of a workload: its output, when it came, got its first token and ended, seconds."""

    def __init__(self, came, new_tokens):
        self.came, self.new_tokens = came, new_tokens
        self.first = self.ended = None


class Steady:
    """The time in which as many requests run as can, each in another part of its course, and its tokens.

    Requests that began together would end together, and so would all that come after them, as no server's do. So the
    first ones are shorter, each by another part, and what counts begins when these have ended and ends when there is
    nothing left to take a request's place. Where there are too few requests for that, all of them count; so they do where
    they all come at once, to be told how long each takes: none of those is cut short.
    """

    def __init__(self, requests, new_tokens, concurrency, together):
        self.is_whole = requests <= concurrency or requests < 3 * together
        self.first, self.last = (0, requests) if self.is_whole else (together, requests - together)
        self.new_tokens, self.together = new_tokens, together
        self.tokens, self.began, self.ended = 0, None, None

    def output_of(self, request):
        if self.is_whole or request >= self.together:
            return self.new_tokens
        return -(-self.new_tokens * (request + 1) // self.together)

    def begin(self, now):
        if self.is_whole:
            self.began = now

    def step(self, now, tokens, ended):
        """A step gave so many tokens; after it so many requests have ended in all."""
        if self.began is not None and self.ended is None:
            self.tokens += tokens
        if self.began is None and ended >= self.first:
            self.began = now
        elif self.ended is None and ended >= self.last:
            self.ended = now

    def tokens_per_second(self):
        return self.tokens / (self.ended - self.began)


def serve(engine, workload, requests, stage):
    """Keeps `concurrency` requests running until `requests` have ended."""
    length, new_tokens, concurrency = (workload[key] for key in ("prompt_tokens", "output_tokens", "concurrency"))
    # Blocks for all are not asked for: to run short of them, and how often, is an answer. Those beyond max_sequences wait.
    check_fits(engine.limits, 1, length + new_tokens, "workload")
    courses, ended, taken, peak = {}, 0, 0, 0
    steady = Steady(requests, new_tokens, concurrency, min(concurrency, engine.limits["max_sequences"]))
    preempted = engine.preempted()
    clock, load = engine.clock, engine.clock.load()
    start = clock.now()
    steady.begin(start.wall)
    try:
        while ended < requests:
            while len(courses) - ended < concurrency and len(courses) < requests:
                came, output = clock.now().wall, steady.output_of(len(courses))
                courses[engine.add(length, output)] = Course(came, output)
            tokens, gone = engine.step()
            now = clock.now().wall
            taken += 1
            for name in tokens:
                if courses[name].first is None:
                    courses[name].first = now
            for name in gone:
                courses[name].ended = now
            ended += len(gone)
            steady.step(now, sum(tokens.values()), ended)
            peak = max(peak, engine.running() + len(gone))
            stage("serve", taken)
        took = clock.now().since(start)
        return {
            **request_times(courses.values()),
            "output_tokens_per_second": round(steady.tokens_per_second(), 6),
            "seconds": round(took.wall, 6),
            "cpu_seconds": round(took.cpu, 6),
            "busy": clock.busy_share(load),
            "steps": taken,
            "preemptions": engine.preempted() - preempted,
            "peak_running": peak,
        }
    finally:
        engine.abort()


def request_times(courses):
    return {
        "first_token_ms": [milliseconds(each.first - each.came) for each in courses],
        "per_token_ms": [
            milliseconds((each.ended - each.first) / (each.new_tokens - 1)) for each in courses if each.new_tokens > 1
        ],
        "end_to_end_ms": [milliseconds(each.ended - each.came) for each in courses],
    }


def generate(engine, given, new_tokens, log_probabilities, stage):
    """Greedy tokens after each prompt, and log-probabilities of prompts where they are asked for."""
    for index, prompt in enumerate(given):
        if len(prompt) + new_tokens > engine.limits["max_context"]:
            expected = f"at most max_context, {engine.limits['max_context']}"
            raise invalid(f"prompts[{index}] with new_tokens", len(prompt) + new_tokens, expected)
        if max(prompt) >= engine.vocabulary:
            raise invalid(f"prompts[{index}] token", max(prompt), f"less than the vocabulary, {engine.vocabulary}")
    try:
        tokens, found = engine.generate(given, new_tokens, log_probabilities, stage)
    finally:
        engine.abort()
    return {"tokens": tokens, "log_probabilities": found}
