"""Requests: what is well-formed, by verb and field. Says no word of engines.

A field's rule takes its value and gives it back, or raises `Wrong` with what was expected.
"""

import json
from typing import NamedTuple

from . import PROTOCOL
from .failure import Failure

LARGEST = 2**53 - 1


class Wrong(Exception):
    """A value is not what a rule expects; the text says what is."""


class Request(NamedTuple):
    id: int
    verb: str
    fields: dict


class Optional(NamedTuple):
    """A field that may be left out, and what it is then."""

    rule: object
    default: object


def whole(least, most=LARGEST):
    def rule(value):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Wrong(f"an integer from {least} to {most}")
        return value

    return rule


def text(most):
    def rule(value):
        if not isinstance(value, str) or not 1 <= len(value) <= most:
            raise Wrong(f"a text of 1 to {most} characters")
        return value

    return rule


def truth(value):
    if not isinstance(value, bool):
        raise Wrong("true or false")
    return value


def one_of(*values):
    def rule(value):
        if value not in values:
            raise Wrong(" or ".join(repr(each) for each in values))
        return value

    return rule


def share(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise Wrong("a number over 0 up to 1")
    return float(value)


def list_of(rule, least=0):
    def every(value):
        if not isinstance(value, list) or len(value) < least:
            raise Wrong(f"a list of at least {least}" if least else "a list")
        return [rule(each) for each in value]

    return every


def mapping(value):
    if not isinstance(value, dict):
        raise Wrong("an object")
    return value


def record(**rules):
    """An object of just these fields."""

    def rule(value):
        mapping(value)
        unknown = sorted(value.keys() - rules.keys())
        if unknown:
            raise Wrong(f"no field but {', '.join(rules)}, and it has {unknown[0]!r}")
        found = {}
        for name, field in rules.items():
            optional = isinstance(field, Optional)
            if name not in value:
                if not optional:
                    raise Wrong(f"a field {name!r}")
                found[name] = field.default
                continue
            try:
                found[name] = (field.rule if optional else field)(value[name])
            except Wrong as wrong:
                raise Wrong(f"in {name!r} {wrong}") from None
        return found

    return rule


def point(value):
    """Gives the phase and its sizes: `("decode", {"context": 512, "sequences": 8})`."""
    phases = {
        "prefill": record(tokens=whole(1), sequences=whole(1)),
        "decode": record(context=whole(1), sequences=whole(1)),
    }
    mapping(value)
    if len(value) != 1 or not value.keys() <= phases.keys():
        raise Wrong("either 'prefill' or 'decode'")
    [(phase, sizes)] = value.items()
    try:
        return phase, phases[phase](sizes)
    except Wrong as wrong:
        raise Wrong(f"in {phase!r} {wrong}") from None


ENGINE = text(64)
VERBS = {
    "hello": record(protocol=whole(0), trusted_versions=Optional(list_of(text(32)), [])),
    "open": record(
        engine=ENGINE,
        config=Optional(mapping, None),
        directory=Optional(text(4096), None),
        precision=one_of("bf16", "f32"),
        max_tokens=whole(1),
        max_sequences=whole(1),
        max_context=whole(1),
        kv_bytes=whole(1),
        block_tokens=Optional(whole(1), None),
        compiled=Optional(truth, False),
        graph_sizes=Optional(list_of(whole(1), 1), None),
        gpu_memory_utilization=Optional(share, 0.01),
    ),
    "steps": record(engine=ENGINE, point=point, repeats=whole(1, 1000), warm_ups=Optional(whole(0, 100), 1)),
    "serve": record(
        engine=ENGINE,
        workload=record(prompt_tokens=whole(1), output_tokens=whole(1), concurrency=whole(1)),
        requests=whole(1, 100_000),
    ),
    "generate": record(
        engine=ENGINE,
        prompts=list_of(list_of(whole(0), 1), 1),
        new_tokens=whole(1),
        log_probabilities=Optional(truth, False),
    ),
    "memory": record(),
    "close": record(engine=ENGINE),
}


def wrong(says):
    return Failure("protocol", says)


def parse(line):
    """The request of a line; else its id, where it has one, and the failure."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, wrong(f"the line is no JSON: {error}")
    if not isinstance(message, dict):
        return None, wrong("the line is no JSON object")
    number = message.pop("id", None)
    try:
        number = whole(0)(number)
    except Wrong as expected:
        return None, wrong(f"id is {number!r}, expected {expected}")
    if len(message) != 1:
        return number, wrong(f"expected one verb beside the id, found {sorted(message)}")
    [(verb, fields)] = message.items()
    if verb not in VERBS:
        return number, wrong(f"verb {verb!r} is unknown, expected one of {', '.join(VERBS)}")
    try:
        fields = VERBS[verb](fields)
        check_together(verb, fields)
    except Wrong as expected:
        return number, wrong(f"{verb}: expected {expected}")
    return Request(number, verb, fields), None


def check_together(verb, fields):
    """What no field can tell alone."""
    if verb == "hello" and fields["protocol"] != PROTOCOL:
        raise Wrong(f"protocol {PROTOCOL}, found {fields['protocol']}: worker and plugin are of different versions")
    if verb == "open" and (fields["config"] is None) == (fields["directory"] is None):
        raise Wrong("either 'config' or 'directory'")
    if verb == "serve" and fields["requests"] < fields["workload"]["concurrency"]:
        raise Wrong(f"'requests' of at least the concurrency, {fields['workload']['concurrency']}")
