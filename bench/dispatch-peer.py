"""HyperQueue's server, worker and client in this process, on tasks that run `true`; prints one line."""

import sys
import time

from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig


def main() -> None:
    directory, tasks = sys.argv[1], int(sys.argv[2])
    with LocalCluster(directory, WorkerConfig(cores=2)) as cluster:
        client = cluster.client()
        job = Job()
        for _ in range(tasks):
            job.program(["true"])
        start, processor = time.monotonic(), time.process_time()
        client.wait_for_jobs([client.submit(job)])
        took, used = time.monotonic() - start, time.process_time() - processor
    print(
        f"for orientation, HyperQueue 0.27.0: {tasks / took:.0f} tasks/s, {used * 1e6 / tasks:.0f} us of processor "
        "each for server, worker and client together; its tasks start a process (`true`) and nothing is made "
        "durable, ours start none and every one is synced to disk twice"
    )


main()
