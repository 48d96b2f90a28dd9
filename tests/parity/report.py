"""Figures held against limits, printed as they come, the worst of them last."""

import re

GOLDEN = re.compile(r"^\.*(\w+) (logits|gradients) differ by at most ([0-9.e+-]+)")
# What model/tests/golden.rs holds both to.
GOLDEN_LIMIT = 1e-4


class Report:
    def __init__(self):
        self.figures = []
        self.truths = 0
        self.failures = 0

    def figure(self, name, value, limit):
        """A figure that may be at most `limit`."""
        holds = value <= limit  # not a number is never
        self.failures += not holds
        self.figures.append((value / limit if value == value else float("inf"), name, value, limit))
        print(f"{name}: {value:.3g} (at most {limit:g}){'' if holds else '  FAILED'}", flush=True)

    def holds(self, name, truth, otherwise="", quiet=False):
        """Something that has no figure; `quiet` prints it only where it fails."""
        self.failures += not truth
        self.truths += 1
        if not (truth and quiet):
            print(f"{name}: {'yes' if truth else f'NO  FAILED {otherwise}'}", flush=True)

    def golden(self, file):
        """The figures that the golden test printed; it has failed by itself where one is too large."""
        found = [match for line in file.read_text().splitlines() if (match := GOLDEN.match(line))]
        for match in found:
            self.figure(f"random {match[1]}, {match[2]}", float(match[3]), GOLDEN_LIMIT)
        self.holds("nine random models compared, each in logits and gradients", len(found) >= 18, f"{len(found)}")

    def end(self):
        """Prints the verdict and the worst figure; gives the exit status."""
        _, name, value, limit = max(self.figures)
        print(f"{self.failures} of {len(self.figures)} figures and {self.truths} further checks failed; the figure nearest "
              f"its limit: {name} {value:.3g} (at most {limit:g})")
        return 1 if self.failures else 0
