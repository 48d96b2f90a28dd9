"""A GPU, through torch: its memory, and the time that it alone takes for a step."""

import re
import statistics

# Replays between two events, and such times.
REPLAYS, TIMES = 100, 3
# Steps that are looked into for what they run beside a graph.
LOOKS = 3
# Steps that `times` may take: one to see what runs, and one for each time or look.
STEPS = 1 + max(TIMES, LOOKS)

# A process's context takes less than this, and a model that somebody serves more.
LONELY_BYTES = 2 << 30

# Graphs that were replayed since this was last emptied, while somebody looks.
replayed, looking = [], [False]


def watch_graphs():
    """From now on replays can be seen. Before vLLM captures its first."""
    import torch

    replay = torch.cuda.CUDAGraph.replay

    def watched(self):
        if looking[0]:
            replayed.append(self)
        return replay(self)

    torch.cuda.CUDAGraph.replay = watched


def name():
    import torch

    return torch.cuda.get_device_name(0)


def cache_bytes():
    """Of the cache before the memory."""
    import torch

    return torch.cuda.get_device_properties(0).L2_cache_size


def driver():
    """The driver's version; None where its kernel module does not tell."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as file:
            found = re.search(r"\s(\d+(?:\.\d+)+)\s", file.read())
    except OSError:
        return None
    return found[1] if found else None


def multiprocessors():
    import torch

    return torch.cuda.get_device_properties(0).multi_processor_count


def memory():
    import torch

    free, total = torch.cuda.mem_get_info()
    return {"free_bytes": free, "total_bytes": total}


def is_ours_alone():
    """Whether nobody else has memory of the device, as far as can be told before anything was put there."""
    held = memory()
    return held["total_bytes"] - held["free_bytes"] < LONELY_BYTES


def take_memory(alone):
    """Held by this process's allocator now and at most since this was last asked, and by whatever else there is.

    What is free is given back to the device between, so that models opened earlier hide nothing of later ones.
    `outside_bytes` is what is used beside the allocator's: the context, libraries, launched graphs. Where others had
    memory of the device from the start and have it still, that cannot be told from theirs.
    """
    import torch

    peak = torch.cuda.max_memory_reserved()
    empty_cache()
    held, reserved = memory(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    used = held["total_bytes"] - held["free_bytes"]
    outside = used - reserved
    return {
        "reserved_bytes": reserved,
        "peak_reserved_bytes": max(peak, reserved),
        "used_bytes": used,
        "outside_bytes": outside if alone or outside < LONELY_BYTES else None,
        "total_bytes": held["total_bytes"],
    }


def empty_cache():
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def times(step, sizes):
    """The GPU's own time of a step, milliseconds: the graph that it replays and all that it runs outside of that.

    vLLM captures a model up to its last norm: the head, the choice of tokens and copies are launched by themselves. A
    step that replays a single graph, which then is the whole of that, is timed by replaying it back to back, since the
    host would be slower, and what it runs beside is added. Of any other step the times of its kernels are added up.
    """
    graphs, tokens = watched(step)
    fitting = [size for size in sizes if size >= tokens]
    answer = {"captured": min(fitting) if graphs and fitting else None}
    if len(graphs) == 1:
        [graph] = graphs
        outside = statistics.median(beyond(kernels(step), kernels(graph.replay)) for _ in range(LOOKS))
        own = [replay_time(graph) + outside for _ in range(TIMES)]
        return {**answer, "device_ms": own, "device_source": "graph", "outside_ms": outside}
    own = [sum(ms for _, ms in kernels(step).values()) for _ in range(TIMES)]
    return {**answer, "device_ms": own, "device_source": "kernels", "outside_ms": None}


def watched(step):
    """The graphs that a step replays, and what it gives."""
    import torch

    replayed.clear()
    looking[0] = True
    try:
        given = step()
    finally:
        looking[0] = False
    torch.cuda.synchronize()
    graphs = list(replayed)
    replayed.clear()
    return graphs, given


def replay_time(graph):
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS


def kernels(work):
    """What the GPU ran for `work`, copies among it: how often and how many milliseconds in all, by name."""
    import torch

    # An engine that works ahead may still compute the step before.
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return {
        event.key: (event.count, event.self_device_time_total / 1e3)
        for event in profile.key_averages()
        # Ranges that somebody named have the time of the kernels in them, which count by themselves.
        if event.self_device_time_total and not event.is_user_annotation
    }


def beyond(whole, part):
    """Milliseconds of `whole` that are not of `part`, which was a part of it.

    By name, and of a name only where it ran more often: the same kernels take a little longer or shorter each time, and
    those are most of a step.
    """
    more = 0.0
    for name, (count, ms) in whole.items():
        known_count, known_ms = part.get(name, (0, 0.0))
        if count > known_count:
            more += ms - known_ms
    return max(0.0, more)
