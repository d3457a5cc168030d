"""Measure ``import gemma4_compat``, as a share of importing the libraries that it patches.

    python benchmarks/import_time.py [ROUNDS]

Each round starts fresh interpreters one after the other, so that noise affects all of them alike.
The figures are medians.  The last one is the time to import everything ÷ the libraries alone: what
the hooks and patches add to the import of the libraries.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

LIBRARIES = "import torch, transformers, accelerate, peft, bitsandbytes"
TIMED = "import time; t = time.perf_counter(); {}; print('seconds', time.perf_counter() - t)"
RUNS = {
    "gemma4_compat": TIMED.format("import gemma4_compat"),
    "libraries": TIMED.format(LIBRARIES),
    "both": TIMED.format(f"import gemma4_compat; {LIBRARIES}"),
}


def seconds(code: str) -> float:
    """Seconds that a fresh interpreter takes for ``code``."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith("seconds ")]
    if not lines:
        sys.exit(f"failed: {code}\n{result.stderr}")
    return float(lines[-1].split()[1])


def main(rounds: int = 7) -> None:
    samples: dict[str, list[float]] = {name: [] for name in RUNS}
    for number in range(rounds + 1):
        print(f"\rround {number} of {rounds}", end="", file=sys.stderr, flush=True)
        for name, code in RUNS.items():
            taken = seconds(code)
            if number:  # the first round only fills the file cache
                samples[name].append(taken)
    print(file=sys.stderr)
    median = {name: statistics.median(values) for name, values in samples.items()}
    for name, value in median.items():
        print(f"{name:14} {1000 * value:8.1f} ms")
    print(f"import gemma4_compat / libraries: {median['gemma4_compat'] / median['libraries']:.2%}")
    print(f"both / libraries:                 {median['both'] / median['libraries']:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
