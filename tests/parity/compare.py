"""Holds our numerics against transformers and the gguf package, and prints each figure, the worst last.

    compare.py PROGRAM SMOLLM2.gguf GOLDEN.txt DIRECTORY

PROGRAM is model/examples/parity.rs, built; GOLDEN.txt what the golden test printed; DIRECTORY is for what is made.
"""

import sys
from pathlib import Path

from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "serving" / "tests"))

import families  # noqa: E402
import gguf_files  # noqa: E402
import smollm2  # noqa: E402
from report import Report  # noqa: E402


def main():
    program, file, golden, directory = sys.argv[1], *map(Path, sys.argv[2:5])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = Report()
    report.golden(golden)
    families.compare(report, program, directory / "families")
    gguf_files.compare(report, program, directory / "gguf")
    smollm2.compare(report, program, file, ROOT / "examples" / "data" / "validation.jsonl.xz", directory / "smollm2")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
