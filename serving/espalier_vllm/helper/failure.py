"""What goes wrong, as it is told to the worker."""

LONGEST = 4000


class Failure(Exception):
    """An answer of the kind `error`; `fatal` where the process can measure no more."""

    def __init__(self, kind, says, fatal=False):
        super().__init__(says)
        self.kind = kind
        self.says = says if len(says) <= LONGEST else says[: LONGEST - 3] + "..."
        self.fatal = fatal


def invalid(field, value, expected):
    """A value that this engine, as it was opened, cannot serve."""
    return Failure("invalid", f"{field} is {value}, expected {expected}")
