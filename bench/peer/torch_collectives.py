"""PyTorch's side of check-gpu-gang: how fast torch.distributed's all-reduce is, one process a GPU.

usage: torch_collectives.py RANKS MIB ROUNDS

All-reduce of so many MiB of bf16, 20 calls one after the other after 5 to warm up, by CUDA events; prints the median of
the rounds in GB/s, bytes of the operand over the time.
"""

import os
import socket
import statistics
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

CALLS, WARM_UP = 20, 5


def work(rank, ranks, port, mib, rounds):
    torch.cuda.set_device(rank)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    tensor = torch.zeros(mib << 19, dtype=torch.bfloat16, device="cuda")
    for _ in range(WARM_UP):
        dist.all_reduce(tensor)
    rates = []
    for _ in range(rounds):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(CALLS):
            dist.all_reduce(tensor)
        end.record()
        end.synchronize()
        rates.append((mib << 20) * CALLS / (begin.elapsed_time(end) / 1e3) / 1e9)
    if rank == 0:
        print(f"{statistics.median(rates):.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, mib, rounds = (int(argument) for argument in sys.argv[1:])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(work, (ranks, port, mib, rounds), nprocs=ranks)
