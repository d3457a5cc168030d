"""Measure what this package adds to the import of the libraries, and what a `disabled` block costs.

    python benchmarks/import_time.py [ROUNDS]

All figures are CPU time, which other programs disturb less than the time on a clock.  Each round
starts fresh interpreters one after the other, so that what disturbs them affects all alike; the
figures are medians.  "added" is the import of everything without that of the libraries.  The blocks
are ``with disabled(NAME): pass``, for each applied patch, in two processes: in one this package was
imported first, in the other after the libraries.  Each figure is the median of three blocks.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

LIBRARIES = "import torch, transformers, accelerate, peft, bitsandbytes"
TIMED = "import time; t = time.process_time(); {}; print('found', time.process_time() - t)"
RUNS = {
    "gemma4_compat": TIMED.format("import gemma4_compat"),
    "libraries": TIMED.format(LIBRARIES),
    "both": TIMED.format(f"import gemma4_compat; {LIBRARIES}"),
}
BLOCKS = """
import statistics, time
{}
import gemma4_compat
def block(name):
    t = time.process_time()
    with gemma4_compat.disabled(name):
        pass
    return time.process_time() - t
for each in gemma4_compat.status(import_targets=True):
    if each.state == "applied":
        print("found", statistics.median(block(each.name) for _ in range(3)), each.name)
"""


def found(code: str) -> list[tuple[float, str]]:
    """What a fresh interpreter finds with ``code``: seconds, and what they are for."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("found ")]
    if not lines:
        sys.exit(f"failed: {code}\n{result.stderr}")
    return [(float(line[1]), " ".join(line[2:])) for line in lines]


def main(rounds: int = 7) -> None:
    samples: dict[str, list[float]] = {name: [] for name in RUNS}
    for number in range(rounds + 1):
        print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
        for name, code in RUNS.items():
            taken = found(code)[0][0]
            if number:  # the first round only fills the file cache
                samples[name].append(taken)
    print(file=sys.stderr)
    median = {name: statistics.median(values) for name, values in samples.items()}
    pairs = zip(samples["both"], samples["libraries"], strict=True)
    median["added"] = statistics.median(both - alone for both, alone in pairs)
    print("CPU time")
    for name, value in median.items():
        print(f"  {name:32} {1000 * value:8.1f} ms")
    for title, first in (("first", ""), ("after the libraries", LIBRARIES)):
        print(f"a disabled block, this package imported {title}")
        for value, name in sorted(found(BLOCKS.format(first)), reverse=True):
            print(f"  {name:32} {1000 * value:8.1f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
