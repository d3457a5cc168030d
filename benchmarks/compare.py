"""Compare decode steps of two checkouts of the package, in turn, on one GPU.

``python -m benchmarks.compare OTHER CACHE [--seconds N] [--out FILE]``.  OTHER is the folder that
contains the ``gemma4_compat`` of the other checkout: ``git archive COMMIT gemma4_compat | tar -x -C
OTHER``.  CACHE has the checkpoint ``e2b`` of ``python -m benchmarks.checkpoint CACHE e2b``.

Each package has a process of its own, which keeps its models.  The processes measure a row one
after the other, in changing order.  A line a row: kernels a token, their time on the GPU, the wall
time of a token, and the median of the ratios, this checkout ÷ the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
LENGTH = 64
LAYERS = [f"model.language_model.layers.{i}" for i in range(20, 32)]
EXPERTS = 4  # layers of 26B-A4B


def _dispatched(model: Any, names: list[str]) -> Any:
    from accelerate import dispatch_model

    places = {"": 0, **dict.fromkeys(names, "cpu")}
    skipped = model._skip_keys_device_placement
    return dispatch_model(model, places, main_device=0, skip_keys=skipped)


def _e2b(cache: Path, case: str, *, adapter: bool = False) -> Any:
    from peft import PeftModel

    from .cases import CASES, load

    model = load(CASES[case], "e2b", cache / "e2b")
    return PeftModel.from_pretrained(model, cache / "e2b" / "adapter").eval() if adapter else model


def _experts(cache: Path, *, on_cpu: bool = False) -> Any:
    from .experts import TEXT, build, load

    folder = cache / f"experts-{EXPERTS}"
    build(folder, TEXT, EXPERTS)
    model = load(folder, four_bit=True)
    names = [f"model.layers.{i}.experts" for i in range(EXPERTS)]
    return _dispatched(model, names) if on_cpu else model


#: row -> the model, and how it decodes
ROWS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "all on the GPU": (lambda cache: _e2b(cache, "gpu"), "captured"),
    "PLE on the CPU, adapter": (lambda cache: _e2b(cache, "ple", adapter=True), "captured"),
    "12 layers streamed": (lambda cache: _dispatched(_e2b(cache, "gpu"), LAYERS), "captured"),
    "12 layers streamed, eager": (lambda cache: _dispatched(_e2b(cache, "gpu"), LAYERS), "dynamic"),
    "experts in 4 bits": (_experts, "captured"),
    "experts in 4 bits on the CPU": (lambda cache: _experts(cache, on_cpu=True), "captured"),
}


def serve(cache: Path) -> None:
    """Answer the requests on stdin, ``[row, what]``, with a line of JSON each."""
    import gemma4_compat  # noqa: F401

    from .decoding import call, gpu_busy, timed

    models: dict[str, Any] = {}
    for line in sys.stdin:
        row, what = json.loads(line)
        make, way = ROWS[row]
        if row not in models:
            models[row] = make(cache)
            for _ in range(2):
                call(models[row], LENGTH, 24, way)
        measure = gpu_busy if what == "busy" else timed
        print("\n=" + json.dumps(measure(models[row], LENGTH, way)), flush=True)


class Server:
    def __init__(self, package: Path, cache: Path) -> None:
        code = (
            f"import sys, pathlib; sys.path[:0] = [{str(package)!r}, {str(HERE)!r}]; "
            f"from benchmarks import compare; compare.serve(pathlib.Path({str(cache)!r}))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, row: str, what: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([row, what]), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("="):
                return json.loads(line[1:])
        raise SystemExit(f"a process ended with {self.process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="for the rounds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    servers = [Server(args.other, args.cache), Server(HERE, args.cache)]
    busy = {row: [server.ask(row, "busy") for server in servers] for row in ROWS}
    walls: dict[str, list[list[float]]] = {row: [[], []] for row in ROWS}
    end, turn = time.monotonic() + args.seconds, 0
    while time.monotonic() < end or turn < 2:
        for row in ROWS:
            for number in (0, 1) if turn % 2 else (1, 0):
                walls[row][number].append(statistics.median(servers[number].ask(row, "wall")))
        turn += 1
    for row, both in walls.items():
        figures = {
            "row": row,
            "kernels": [round(kernels) for _, kernels in busy[row]],
            "GPU ms": [round(1e3 * spent, 3) for spent, _ in busy[row]],
            "wall ms": [round(1e3 * statistics.median(each), 3) for each in both],
            "ratio": round(statistics.median(b / a for a, b in zip(*both, strict=True)), 3),
            "rounds": turn,
        }
        print(json.dumps(figures), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
