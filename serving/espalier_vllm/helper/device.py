"""A GPU, through torch: its memory, and the time that it alone takes for a step."""

REPLAYS, TIMES = 200, 5
# Steps that `times` may take: one to see what runs, and one for each time.
STEPS = 1 + TIMES

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


def memory():
    import torch

    free, total = torch.cuda.mem_get_info()
    return {"free_bytes": free, "total_bytes": total}


def take_memory():
    """Held by this process's allocator now and at most since this was last asked, and used by everybody."""
    import torch

    held = memory()
    answer = {
        "reserved_bytes": torch.cuda.memory_reserved(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "used_bytes": held["total_bytes"] - held["free_bytes"],
        "total_bytes": held["total_bytes"],
    }
    torch.cuda.reset_peak_memory_stats()
    return answer


def empty_cache():
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def times(step, sizes):
    """The GPU's own time of a step, milliseconds.

    A step that replays a single graph, which then is the whole model's, is timed by replaying that graph, since the
    host would be slower. Of any other the times of its kernels are added up.
    """
    import torch

    replayed.clear()
    looking[0] = True
    try:
        tokens = step()
    finally:
        looking[0] = False
    torch.cuda.synchronize()
    graphs = list(replayed)
    replayed.clear()
    fitting = [size for size in sizes if size >= tokens]
    captured = min(fitting) if graphs and fitting else None
    if len(graphs) == 1:
        return {
            "device_ms": [replay_time(graphs[0]) for _ in range(TIMES)],
            "device_source": "graph",
            "captured": captured,
        }
    return {"device_ms": [kernel_time(step) for _ in range(TIMES)], "device_source": "kernels", "captured": captured}


def replay_time(graph):
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS


def kernel_time(step):
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3
