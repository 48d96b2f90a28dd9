"""The worker's side of the protocol, as tests and trials need it: starts a helper and asks it."""

import json
import os
import select
import subprocess
import time


class Refused(Exception):
    """The helper answered with an error."""

    def __init__(self, error):
        super().__init__(f"{error['kind']}: {error['says']}")
        self.kind, self.fatal = error["kind"], error["fatal"]


class Client:
    """A helper process in a group of its own, with descriptor 3 for what it answers."""

    def __init__(self, command, environment=(), log=None):
        requests_out, self.requests = os.pipe()
        self.answers, answers_in = os.pipe()
        os.set_inheritable(self.requests, False)

        def settle():
            os.dup2(answers_in, 3)

        self.process = subprocess.Popen(
            command,
            stdin=requests_out,
            stdout=log or subprocess.DEVNULL,
            stderr=log or subprocess.DEVNULL,
            env={**os.environ, **dict(environment)},
            pass_fds=(3,) if answers_in == 3 else (answers_in, 3),
            preexec_fn=settle if answers_in != 3 else None,
            start_new_session=True,
        )
        os.close(requests_out)
        os.close(answers_in)
        self.number, self.buffer, self.progress = 0, b"", []

    def send(self, line):
        os.write(self.requests, line)

    def line(self, timeout=300):
        """The next line of the helper's; None at its end."""
        until = time.monotonic() + timeout
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no line within {timeout} s")
            data = os.read(self.answers, 1 << 16)
            if not data:
                return None
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def ask(self, verb, timeout=300, **fields):
        """The fields of `done`; `Refused` for an error. What came as progress is kept in `progress`."""
        self.number += 1
        self.send(json.dumps({"id": self.number, verb: fields}).encode() + b"\n")
        self.progress = []
        while (message := self.line(timeout)) is not None:
            if message["id"] != self.number:
                raise ValueError(f"an answer to {message['id']} while {self.number} was asked")
            if "progress" in message:
                self.progress.append(message["progress"])
                continue
            if "error" in message:
                raise Refused(message["error"])
            return message["done"]
        raise EOFError(f"the helper ended with {self.process.wait()} before it answered {verb}")

    def end(self, timeout=300):
        """Closes its input; the status it ends with."""
        if self.requests is not None:
            os.close(self.requests)
            self.requests = None
        return self.process.wait(timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.requests is not None:
            os.close(self.requests)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.answers)
