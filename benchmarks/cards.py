"""Measure what `plan` says of cards: true shapes, random weights, memory limited to the card's.

``python -m benchmarks.cards CACHE OUT [--models 26b] [--cards 12GB] [--jobs QLoRA]`` writes a JSON
line to OUT for each cell: what is planned, and what was measured with the code that ``plan``
prints.  It measures the cells that lack a measurement; with ``--plan`` none, which needs no GPU.
PyTorch may reserve the card's memory less half a GiB, for the CUDA context.  Cards with the same
plan share a measurement.  What the cells log is beside OUT, in a ``.log`` file.  ``tools/cards.py``
makes the tables of ``CARDS.md`` and the README from ``benchmarks/cards.jsonl``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import checkpoint, decoding, measure, training

Cell = tuple[str, str, str]  # model, card, job
CARDS = ("6GB", "8GB", "12GB", "16GB", "24GB")
MODELS = ("e2b", "e4b", "12b", "26b", "31b")
#: the arguments of ``plan`` for each job
JOBS: dict[str, dict[str, Any]] = {
    "generate": {"context": 32768},
    "fast": {"context": 32768},  # after install("fast")
    "QLoRA": {"context": 2048, "train": True},
    "experts": {"context": 2048, "train": True},  # of 26B: LoRA on the experts, too
}
#: decoded tokens that are timed, and tokens that remain for them
STEPS, ANSWER = 32, 64
#: timed training steps
ROUNDS = 5


def planned(folder: Path, cell: Cell) -> dict[str, Any]:
    """What ``plan`` says of a cell; ``FOLDER`` stands for the folder in the code that it prints."""
    from gemma4_compat.planning import plan

    shape, card, job = cell
    checkpoint.describe(shape, folder)
    adapter: Any = {"adapter": str(folder / "experts")} if job == "experts" else {}
    own = plan(str(folder / "model"), card, **JOBS[job], **adapter)
    return {
        "cell": cell,
        "fits": own.ok,
        "context": own.longest_context,
        "cpu": [name for name, device in own.device_map.items() if device == "cpu"],
        "GPU": _gib(own, lambda row: sum(row.gpus)),
        "CPU": _gib(own, lambda row: row.cpu),
        "limit GiB": (own.gpus[0].free - own.gpus[0].outside) / measure.GIB,
        "code": own.code.replace(str(folder), "FOLDER") if own.ok else "",
        "parameters": checkpoint.parameters(shape),
    }


def _gib(own: Any, of: Callable[[Any], int]) -> dict[str, float]:
    """GiB of the rows of a plan, by their kind; weights by their part."""
    rows = ((row.name if row.kind == "weights" else row.kind, of(row)) for row in own.memory)
    return {name: taken / measure.GIB for name, taken in rows if taken}


def measured(folder: Path, line: dict[str, Any]) -> dict[str, Any]:
    """Load the model as planned, and run the job on a GPU with the card's memory."""
    import torch

    job = line["cell"][2]
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(line["limit GiB"] * measure.GIB / whole)
    start = time.perf_counter()
    names: dict[str, Any] = {}
    exec(line["code"].replace("FOLDER", str(folder)), names)
    torch.cuda.synchronize()
    figures = {"load s": time.perf_counter() - start, "load peak GiB": measure.peak()}
    run = _train if "train" in JOBS[job] else _generate
    figures |= run(names["model"], JOBS[job]["context"])
    figures["host GiB"] = measure.host_memory() / measure.GIB
    return figures


def _peaks() -> dict[str, float | None]:
    import torch

    return {
        "allocated GiB": measure.peak(),
        "reserved GiB": torch.cuda.max_memory_reserved() / measure.GIB,
    }


def _generate(model: Any, context: int) -> dict[str, Any]:
    """Tokens a second at the end of a context."""
    text = measure.Text(model.config.get_text_config().vocab_size)
    prompt = text.tokens(1, context - ANSWER)

    def generate(count: int, **options: Any) -> Any:
        return decoding.call(model, prompt, count, "captured", prefill_chunk_size=2048, **options)

    measure.reset_peak()
    start = time.perf_counter()
    steps = measure.token_seconds(generate, STEPS)[4:]
    prompt_s = time.perf_counter() - start - sum(steps)
    return {"tokens/s": 1 / statistics.median(steps), "prompt s": prompt_s, **_peaks()}


def _train(model: Any, length: int) -> dict[str, Any]:
    step = training.MAKE["loop"](model.train(), 1, length)
    measure.reset_peak()
    first = [measure.seconds(step) for _ in range(2)]
    times = [measure.seconds(step) for _ in range(ROUNDS)]
    return {
        "s a step": statistics.median(times),
        "first steps s": first,
        "trained": sum(each.numel() for each in model.parameters() if each.requires_grad),
        **_peaks(),
        "link": measure.traced(step),
    }


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for shape, job in itertools.product(options.models, options.jobs):
        if job != "experts" or shape == "26b":
            yield from ((shape, card, job) for card in options.cards)


def read(file: Path) -> dict[Cell, dict[str, Any]]:
    """The lines of a file, by cell."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else []
    return {tuple(line["cell"]): line for line in lines}


def same_plan(line: dict[str, Any], lines: dict[Cell, dict[str, Any]]) -> dict[str, Any]:
    """The first cell with the same model, job and map: the one that is measured."""
    shape, _, job = line["cell"]
    alike = (lines.get((shape, card, job), line) for card in CARDS)
    return next(each for each in alike if each["fits"] and each["cpu"] == line["cpu"])


def run(cache: Path, out: Path, options: argparse.Namespace) -> None:
    """Plan and measure the cells that ``out`` lacks, each in its own process, until time is up."""
    end = time.monotonic() + options.seconds
    lines = read(out)

    def write() -> None:
        out.write_text("".join(f"{json.dumps(line)}\n" for line in lines.values()))

    wanted = list(cells(options))
    for cell in wanted:
        if cell not in lines:
            lines[cell] = line = planned(cache / cell[0], cell)
            if line["fits"] and same_plan(line, lines) is not line:
                del line["code"]
            print(cell, lines[cell]["fits"], len(lines[cell]["cpu"]), flush=True)
            write()
    todo = [same_plan(lines[cell], lines) for cell in wanted if lines[cell]["fits"]]
    for line in [] if options.plan else todo:
        left = end - time.monotonic()
        if "device" not in line and left > options.least:
            shape, card, job = line["cell"]
            checkpoint.build(shape, cache / shape)
            line |= _in_a_process([cache, out, "--cell", shape, card, job], out, job, left)
            line |= checkpoint.machine(shape)
            del line["code"]
            print(json.dumps({key: line[key] for key in line if key not in ("code", "cpu")}))
            write()


def _in_a_process(arguments: list[Any], out: Path, job: str, left: float) -> dict[str, Any]:
    """A measurement, or its error."""
    command = [sys.executable, "-m", "benchmarks.cards", *map(str, arguments)]
    # Hooks keep the functions that they find, so a process has one kind of kernels.
    env = {**os.environ, "GEMMA4_COMPAT_FAST": "1" if job == "fast" else "0"}
    ran = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=left, check=False
    )
    with out.with_suffix(".log").open("a") as log:
        log.write(f"--- {arguments}\n{ran.stderr}")
    if ran.returncode:
        return {"error": ran.stderr[-1500:]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--cards", nargs="+", default=list(CARDS))
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--plan", action="store_true", help="measure nothing")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no cell after them")
    parser.add_argument("--least", type=float, default=60, help="seconds that a cell may need")
    parser.add_argument("--cell", nargs=3)
    options = parser.parse_args()
    if options.cell:
        logging.basicConfig()
        logging.getLogger("gemma4_compat").setLevel(logging.DEBUG)
        line = read(options.out)[tuple(options.cell)]
        print(json.dumps(measured(options.cache / options.cell[0], line)))
    else:
        run(options.cache, options.out, options)


if __name__ == "__main__":
    main()
