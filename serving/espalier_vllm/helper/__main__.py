"""Begins the helper: settles its descriptors and environment before anything of vLLM's is imported."""

import os
import sys

from .channel import Channel
from .engine import Platform, prepare_environment
from .session import Session

ANSWERS = 3


def main():
    try:
        os.set_inheritable(ANSWERS, False)
        os.write(ANSWERS, b"")
    except OSError as error:
        print(f"descriptor {ANSWERS} is not open for writing ({error}), expected a worker's pipe", file=sys.stderr)
        return 2
    # Nothing of vLLM's may read what is meant for the helper.
    requests = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    prepare_environment(os.environ)
    channel = Channel(requests, ANSWERS)
    channel.start()
    return Session(channel, Platform()).run()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the libraries' own farewells, which can hang.
    os._exit(status)
