"""Measure what `plan` says of cards: true shapes, random weights, memory limited to the card's.

``python -m benchmarks.cards CACHE OUT [--models 26b] [--cards 12GB] [--jobs QLoRA]`` appends a JSON
line to OUT for each cell that it lacks: what was planned, and what was measured with the code that
``plan`` prints.  PyTorch may reserve the card's memory less half a GiB, for the CUDA context.
Cards with the same plan share a measurement.  What the cells log is beside OUT, in a ``.log`` file.
``python -m benchmarks.cards --page OUT`` prints the tables of ``CARDS.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import checkpoint, decoding, measure, training

CARDS = ("6GB", "8GB", "12GB", "16GB", "24GB")
MODELS = ("e2b", "e4b", "12b", "26b", "31b")
#: the arguments of ``plan`` for each job
JOBS: dict[str, dict[str, Any]] = {
    "generate": {"context": 32768},
    "QLoRA": {"context": 2048, "train": True},
    "experts": {"context": 2048, "train": True},  # of 26B: LoRA on the experts, too
}
#: decoded tokens that are timed, and tokens that remain for them
STEPS, ANSWER = 32, 64
#: timed training steps
ROUNDS = 5


def planned(folder: Path, card: str, job: str) -> Any:
    from gemma4_compat.planning import plan

    adapter = {"adapter": str(folder / "experts")} if job == "experts" else {}
    return plan(str(folder / "model"), card, **JOBS[job], **adapter)


def cell(folder: Path, shape: str, card: str, job: str) -> dict[str, Any]:
    """Load the model as planned, and run the job on a GPU with the card's memory."""
    import torch

    import gemma4_compat

    start = time.perf_counter()
    own = planned(folder, card, job)
    figures: dict[str, Any] = {"plan s": time.perf_counter() - start}
    limit = own.gpus[0].free - own.gpus[0].outside
    torch.cuda.set_per_process_memory_fraction(
        limit / torch.cuda.get_device_properties(0).total_memory
    )
    if job == "generate":
        gemma4_compat.install("fast")  # before loading: hooks keep the functions that they find
    start = time.perf_counter()
    names: dict[str, Any] = {}
    exec(own.code, names)
    torch.cuda.synchronize()
    figures["load s"] = time.perf_counter() - start
    figures["load peak GiB"] = measure.peak()
    model = names["model"]
    run = _generate if job == "generate" else _train
    figures |= run(model, JOBS[job]["context"])
    figures["host GiB"] = measure.host_memory() / measure.GIB
    return figures


def _peaks() -> dict[str, float | None]:
    import torch

    return {
        "allocated GiB": measure.peak(),
        "reserved GiB": torch.cuda.max_memory_reserved() / measure.GIB,
    }


def _generate(model: Any, context: int) -> dict[str, Any]:
    """Tokens a second at the end of a context, with the default kernels and with fast ones."""
    from contextlib import nullcontext

    import torch

    import gemma4_compat

    text = measure.Text(model.config.get_text_config().vocab_size)
    prompt = text.tokens(1, context - ANSWER)

    def generate(count: int, **options: Any) -> Any:
        return decoding.call(model, prompt, count, "captured", prefill_chunk_size=2048, **options)

    found: dict[str, Any] = {}
    for name, context_of in (("exact", gemma4_compat.disabled("fast")), ("fast", nullcontext())):
        torch.cuda.empty_cache()
        measure.reset_peak()
        with context_of:
            start = time.perf_counter()
            steps = measure.token_seconds(generate, STEPS)[4:]
            found[name] = {
                "tokens/s": 1 / statistics.median(steps),
                "prompt s": time.perf_counter() - start - sum(steps),
                **_peaks(),
            }
    return found


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


def cells(models: list[str], cards: list[str], jobs: list[str]) -> Iterator[tuple[str, str, str]]:
    for shape in models:
        for job in jobs:
            if job != "experts" or shape == "26b":
                yield from ((shape, card, job) for card in cards)


def run(cache: Path, out: Path, options: argparse.Namespace) -> None:
    """Measure the cells that ``out`` lacks, each in a process of its own, until time is up."""
    end = time.monotonic() + options.seconds
    found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {tuple(each["cell"]): each for each in found}
    for shape, card, job in cells(options.models, options.cards, options.jobs):
        if (shape, card, job) in done:
            continue
        checkpoint.build(shape, cache / shape)
        own = planned(cache / shape, card, job)
        line: dict[str, Any] = {
            "cell": [shape, card, job],
            "needed GiB": own.needed[0] / measure.GIB,
            "context": own.longest_context,
            "cpu": [name for name, device in own.device_map.items() if device == "cpu"],
            "CPU GiB": own.cpu / measure.GIB,
            "GPU": _gib(own, lambda row: sum(row.gpus)),
            "CPU": _gib(own, lambda row: row.cpu),
        }
        alike = (
            each["cell"][1]
            for each in done.values()
            if "load s" in each
            and each["cell"][0::2] == [shape, job]
            and each["cpu"] == line["cpu"]
        )
        if not own.ok:
            line["fits"] = False
        elif (other := next(alike, None)) is not None:
            line["as"] = other
        elif (left := end - time.monotonic()) < options.least:
            break
        else:
            arguments = [str(cache), str(out), "--cell", shape, card, job]
            command = [sys.executable, "-m", "benchmarks.cards", *arguments]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
            with out.with_suffix(".log").open("a") as log:
                log.write(f"--- {shape} {card} {job}\n{ran.stderr}")
            last = ran.stdout.splitlines()[-1:] or ["{}"]
            line |= json.loads(last[0]) if ran.returncode == 0 else {"error": ran.stderr[-1500:]}
            line |= checkpoint.machine(shape)
        done[shape, card, job] = line
        print(json.dumps(line)[:600], flush=True)
        with out.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def _gib(own: Any, of: Callable[[Any], int]) -> dict[str, float]:
    """GiB of the rows of a plan, by their kind; weights by their part."""
    rows = ((row.name if row.kind == "weights" else row.kind, of(row)) for row in own.memory)
    return {name: taken / measure.GIB for name, taken in rows if taken}


def page(cells: list[dict[str, Any]]) -> str:
    """The tables of CARDS.md."""
    found = {tuple(each["cell"]): each for each in cells}
    lines = []
    for job, head in _HEADS.items():
        lines += [f"## {_TITLES[job]}", "", head, "|---" * (head.count("|") - 1) + "|"]
        for (shape, card, of), each in found.items():
            if of == job:
                known = found[shape, each["as"], of] if "as" in each else each
                row = _ROWS[job](each, known)
                lines.append(f"| {_NAMES[shape]} | {card.replace('GB', ' GB')} | {row} |")
        lines.append("")
    return "\n".join(lines)


_NAMES = {"e2b": "E2B", "e4b": "E4B", "12b": "12B", "26b": "26B-A4B", "31b": "31B"}
_TITLES = {
    "generate": "Generate at 32,768 tokens, with a static cache",
    "QLoRA": "QLoRA of 2,048 tokens",
    "experts": "LoRA on the experts, too",
}
_TRAINED = (
    "| model | card | layers on the CPU | planned GiB | peak GiB, reserved | s a step "
    "| loading, s | CPU memory GiB |"
)
_HEADS = {
    "generate": "| model | card | layers on the CPU | planned GiB | peak GiB, reserved | tokens/s "
    "| prompt s | tokens/s, fast | prompt s, fast | loading, s | CPU memory GiB |",
    "QLoRA": _TRAINED,
    "experts": _TRAINED,
}


def _generated(line: dict[str, Any], known: dict[str, Any]) -> str:
    if "exact" not in known:
        return _unmeasured(line, 9)
    exact, fast = known["exact"], known["fast"]
    peak = max(exact["reserved GiB"], fast["reserved GiB"])
    speeds = (f"{way['tokens/s']:.0f} | {way['prompt s']:.0f}" for way in (exact, fast))
    return f"{_planned(line)} | {peak:.2f} | {' | '.join(speeds)} | {_loaded(line, known)}"


def _stepped(line: dict[str, Any], known: dict[str, Any]) -> str:
    if "s a step" not in known:
        return _unmeasured(line, 6)
    step = f"{known['reserved GiB']:.2f} | {known['s a step']:.2f}"
    return f"{_planned(line)} | {step} | {_loaded(line, known)}"


_ROWS = {"generate": _generated, "QLoRA": _stepped, "experts": _stepped}


def _planned(line: dict[str, Any]) -> str:
    layers = sum(".layers." in name for name in line["cpu"])
    return f"{layers} | {line['needed GiB'] - line['GPU']['outside']:.2f}"


def _loaded(line: dict[str, Any], known: dict[str, Any]) -> str:
    return f"{known['load s']:.0f} | {line['CPU GiB']:.1f}"


def _unmeasured(line: dict[str, Any], columns: int) -> str:
    """A cell that the plan or the measurement refuses."""
    most = f"up to {line['context']:,} tokens" if line["context"] else "does not fit"
    text = most if line.get("fits") is False else line.get("error", "not measured")[-60:]
    return " | ".join([text, *[""] * (columns - 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cache", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--page", type=Path, metavar="OUT")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--cards", nargs="+", default=list(CARDS))
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--seconds", type=float, default=3600, help="begin no cell after them")
    parser.add_argument("--least", type=float, default=60, help="seconds that a cell may need")
    parser.add_argument("--cell", nargs=3)
    options = parser.parse_args()
    if options.page:
        print(page([json.loads(line) for line in options.page.read_text().splitlines()]))
    elif options.cell:
        shape, card, job = options.cell
        logging.basicConfig()
        logging.getLogger("gemma4_compat").setLevel(logging.DEBUG)
        print(json.dumps(cell(options.cache / shape, shape, card, job)))
    else:
        run(options.cache, options.out, options)


if __name__ == "__main__":
    main()
