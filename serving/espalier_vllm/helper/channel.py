"""Lines between the worker and this process: requests in, answers and signs of life out.

Two threads of its own: one reads standard input, so that its end is seen whatever the main thread does; one says every
few seconds that the process lives, and looks for its parent.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

from .clock import group_seconds

LONGEST_LINE = 16 << 20
PARENT_EVERY = 1.0
ALIVE_EVERY = 5.0
PROGRESS_EVERY = 0.5
# Requests that wait while one is answered.
MOST_WAITING = 8


class Channel:
    """Requests by `lines`, answers by `done`, `error` and `stage`."""

    def __init__(self, incoming, outgoing):
        self.outgoing = outgoing
        self.incoming = incoming
        self.waiting = queue.Queue(MOST_WAITING)
        self.lock = threading.Lock()
        # Of the request that is being answered: its id, the stage, what is done of it, when that was last said.
        self.id = None
        self.current = ("", 0)
        self.said_at = 0.0
        # Processor time of what this process started and that still runs, as it was last looked at.
        self.started_seconds = 0.0
        self.parent = os.getppid()
        self.ended = self.refused = False

    def start(self):
        threading.Thread(target=self.read, name="requests", daemon=True).start()
        threading.Thread(target=self.live, name="alive", daemon=True).start()

    def read(self):
        """Passes lines on; at the end of input ends the process, unless it is idle and ends by itself."""
        with os.fdopen(self.incoming, "rb") as lines:
            while line := lines.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    # What follows is the rest of it: there is no telling where the next begins.
                    self.refuse(f"a line of more than {LONGEST_LINE} bytes")
                    break
                try:
                    self.waiting.put_nowait(line)
                except queue.Full:
                    self.refuse(f"more than {MOST_WAITING} requests before one was answered")
                    break
        self.ended = True
        with suppress(queue.Full):
            # Where it is full nobody waits for more.
            self.waiting.put_nowait(None)
        while True:
            time.sleep(0.1)
            if self.id is not None:
                end_now()

    def refuse(self, says):
        """Says that nothing more is read, whatever request is being answered meanwhile."""
        self.refused = True
        with self.lock:
            self.write({"id": None, "error": {"kind": "protocol", "says": says, "fatal": True}})

    def live(self):
        since = time.monotonic()
        while True:
            time.sleep(PARENT_EVERY)
            if os.getppid() != self.parent:
                end_now()
            if time.monotonic() - since >= ALIVE_EVERY:
                since = time.monotonic()
                self.started_seconds = group_seconds()
                with self.lock:
                    if self.id is not None and time.monotonic() - self.said_at >= PARENT_EVERY:
                        self.progress()

    def lines(self):
        """Each request's line, until the input ends."""
        while (line := self.waiting.get()) is not None and not self.ended:
            yield line

    @contextmanager
    def answering(self, number):
        """While a request is worked on."""
        with self.lock:
            self.id, self.current, self.said_at = number, ("", 0), 0.0
        try:
            yield
        finally:
            with self.lock:
                self.id = None

    def stage(self, name, done=0):
        """What the request is at. A new stage is said at once, more of the same now and then."""
        with self.lock:
            new = name != self.current[0]
            self.current = (name, done)
            if new or time.monotonic() - self.said_at >= PROGRESS_EVERY:
                self.progress()

    def progress(self):
        stage, done = self.current
        if not stage:
            return
        self.said_at = time.monotonic()
        times = os.times()
        seconds = times.user + times.system + times.children_user + times.children_system + self.started_seconds
        self.write({"id": self.id, "progress": {"stage": stage, "done": done, "cpu_seconds": round(seconds, 2)}})

    def done(self, number, answer):
        self.say({"id": number, "done": answer})

    def error(self, number, failure):
        says = {"kind": failure.kind, "says": failure.says, "fatal": failure.fatal}
        self.say({"id": number, "error": says})

    def say(self, message):
        with self.lock:
            self.write(message)
            # Nothing of a request may follow its answer.
            self.id = None

    def write(self, message):
        data = json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.outgoing, view) :]
        except BrokenPipeError:
            end_now()


def end_now():
    """Ends the process and, where it leads its group, all that it started."""
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
