"""Answers requests, one at a time, over the engines that are open.

What runs engines is a `platform`: `engine.Platform`, or the tests' own without vLLM. It offers `hello(trusted, stage)`,
`open(fields, stage)`, `memory()` of its device, turns what an engine raises into a `Failure` by `failure(error)`, and
gives memory back that nothing refers to any more by `give_back()`.
"""

import sys
import traceback

from . import measure, memory, requests
from .failure import Failure, invalid


class Session:
    def __init__(self, channel, platform):
        self.channel = channel
        self.platform = platform
        self.engines = {}
        self.greeted = False
        self.peak = memory.Peak()

    def run(self):
        """Answers until the input ends or an error is fatal; the status to end with."""
        self.peak.start()
        for line in self.channel.lines():
            request, failure = requests.parse(line)
            if failure is not None:
                self.channel.error(request, failure)
                continue
            with self.channel.answering(request.id):
                failure = self.answer(request)
            if failure is not None and failure.fatal:
                return 3
        return 3 if self.channel.refused else 0

    def answer(self, request):
        """Says `done` or `error`, and gives the failure, if there was one."""
        try:
            self.channel.done(request.id, self.handle(request))
            return None
        except Failure as error:
            failure = error
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            failure = self.platform.failure(error)
            # Its frames hold whatever of an engine there was.
            traceback.clear_frames(error.__traceback__)
            failure = self.drop(request) or failure
        self.platform.give_back()
        self.channel.error(request.id, failure)
        return failure

    def drop(self, request):
        """Closes an engine that raised: there is no telling what state it is in. Gives what went wrong in that."""
        engine = self.engines.pop(request.fields.get("engine"), None)
        if engine is None:
            return None
        try:
            engine.close()
        except Failure as failure:
            return failure
        return None

    def handle(self, request):
        if not self.greeted and request.verb != "hello":
            raise Failure("protocol", f"{request.verb} came before hello")
        return getattr(self, request.verb)(request.fields, self.channel.stage)

    def hello(self, fields, stage):
        if self.greeted:
            raise Failure("protocol", "hello came twice")
        answer = self.platform.hello(fields["trusted_versions"], stage)
        self.greeted = True
        return answer

    def open(self, fields, stage):
        name = fields["engine"]
        if name in self.engines:
            raise invalid("engine", repr(name), "a name that is not open")
        stage("open")
        engine, answer = self.platform.open(fields, stage)
        self.engines[name] = engine
        return answer

    def engine(self, fields):
        name = fields["engine"]
        if name not in self.engines:
            raise Failure("unknown_engine", f"engine {name!r} is not open")
        return self.engines[name]

    def steps(self, fields, stage):
        return measure.steps(self.engine(fields), fields["point"], fields["repeats"], fields["warm_ups"], stage)

    def serve(self, fields, stage):
        return measure.serve(self.engine(fields), fields["workload"], fields["requests"], stage)

    def generate(self, fields, stage):
        return measure.generate(
            self.engine(fields), fields["prompts"], fields["new_tokens"], fields["log_probabilities"], stage
        )

    def memory(self, _fields, _stage):
        # What was freed and is kept would hide what the next to run takes.
        self.platform.give_back()
        held, peak = self.peak.take()
        return {"held_bytes": held, "peak_held_bytes": peak, "device": self.platform.memory()}

    def close(self, fields, stage):
        engine = self.engine(fields)
        stage("close")
        # Even one that cannot be closed is not open any more.
        del self.engines[fields["engine"]]
        return engine.close()
