"""Write the Markdown tables from the JSON lines; no library is needed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.stamps import stamp

from .cases import CASES

#: what the figures depend on
FILES = (
    "gemma4_compat/runtime/host gemma4_compat/runtime/host/onloading.py "
    "gemma4_compat/patches/offloading/host_embedding.py "
    "gemma4_compat/patches/offloading/offload_streaming.py "
    "gemma4_compat/patches/offloading/split_model_overhead.py "
    "gemma4_compat/patches/offloading/quant_state_offload.py "
    "gemma4_compat/patches/adapters/peft_redispatch.py "
    "benchmarks/__main__.py benchmarks/cases.py benchmarks/checkpoint.py benchmarks/measure.py"
)


class Results:
    """The finished cases of one output folder."""

    def __init__(self, file: Path) -> None:
        lines = file.read_text().splitlines() if file.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        self.machine = next((e for e in entries if e["case"] == "machine"), {})
        self.cases = [entry for entry in entries if entry["case"] != "machine"]

    def of(self, name: str, patched: bool) -> list[dict[str, Any]]:
        """All rounds of one case."""
        return [e for e in self.cases if e["case"] == name and e["patched"] == patched]

    def values(self, name: str, patched: bool, key: str) -> list[float]:
        """Every sample of a figure over all rounds; ``key`` may be a key of ``copies``."""
        samples: list[float] = []
        for entry in self.of(name, patched):
            figures = entry["figures"]
            value = figures.get(key, (figures.get("copies") or {}).get(key))
            samples += value if isinstance(value, list) else [] if value is None else [value]
        return samples

    def value(self, name: str, patched: bool, key: str) -> float | None:
        """The median of a figure."""
        values = self.values(name, patched, key)
        return statistics.median(values) if values else None

    def error(self, name: str, patched: bool) -> str | None:
        """The error that ended a case; ``None`` if it did not fail."""
        return next((e["error"] for e in self.of(name, patched) if e["error"]), None)


@dataclass
class Row:
    """A row of the first table; ``most`` and ``least`` are the limits of the patched figure."""

    title: str
    unpatched: float | str | None
    patched: float | None
    most: float | None = None
    least: float | None = None

    def cells(self, bars: bool) -> list[str]:
        """The texts of the row's cells."""
        bar = met = ""
        if bars and (self.most is not None or self.least is not None):
            sign, limit = ("≤", self.most) if self.most is not None else ("≥", self.least)
            bar = f"{sign} {limit:g}"
            if self.patched is not None and limit is not None:
                good = self.patched <= limit if sign == "≤" else self.patched >= limit
                met = "yes" if good else "**no**"
        return [self.title, _text(self.unpatched), _text(self.patched), bar, met]


def _text(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _minus(a: float | None, b: float | None) -> float | None:
    return a - b if a is not None and b is not None else None


def rows(results: Results) -> Iterator[Row]:
    """The rows of the first table, which compare unpatched and patched runs."""
    v = results.value

    def pair(name: str, key: str) -> tuple[float | None, float | None]:
        return v(name, False, key), v(name, True, key)

    def crash(name: str, value: float | None) -> float | str | None:
        return "crash" if value is None and results.error(name, False) else value

    for name in ("ple", "ple_towers"):
        without, with_ = pair(name, "adapter GiB")
        title = f"VRAM after load and adapter, {CASES[name].title} (GiB)"
        bar = 2.1 if name == "ple" else 1.85
        yield Row(title, crash(name, without), with_, most=bar)
    for key, what in (("turns with adapter", "with adapter"), ("turns", "base model")):
        title = f"decode speed, PLE on cpu ÷ all on the GPU unpatched, {what}, turn by turn"
        yield Row(title, None, v("ple", True, key), least=0.95)
    without, with_ = (
        _over(x, v("gpu", False, "decode tok/s")) for x in pair("ple", "decode tok/s")
    )
    yield Row("the same, base model, in processes of their own", without, with_)
    peak = [_over(v("ple", p, "load peak GiB"), v("ple", p, "resident GiB")) for p in (0, 1)]
    yield Row("load-time peak ÷ resident, PLE on cpu", *peak, most=1.05)
    yield Row("largest tensor on the GPU, PLE on cpu (GiB)", *pair("ple", "largest tensor GiB"))
    split = [_over(v("ple", p, "adapter seconds"), v("gpu", p, "adapter seconds")) for p in (0, 1)]
    yield Row("adapter load time, PLE on cpu ÷ all on the GPU, in processes of their own", *split)
    yield Row("the same, turn by turn", None, v("ple", True, "adapter turns"), most=1.1)

    four = pair("layers_4bit", "decode tok/s")
    bf16 = pair("layers_bf16", "decode tok/s")
    for p, word in ((0, "unpatched"), (1, "patched")):
        title = f"decode speed, 20 of 35 layers on cpu: 4-bit ÷ bf16 {word}"
        yield Row(
            title,
            crash("layers_4bit", _over(four[0], bf16[p])),
            _over(four[1], bf16[p]),
            least=2,
        )
    ceiling = _over(four[1], v("gpu", False, "decode tok/s"))
    title = "decode speed, 20 of 35 layers on cpu, 4-bit ÷ all on the GPU unpatched"
    yield Row(title, crash("layers_4bit", None), ceiling)
    yield Row(
        "decode speed, the same layers in bf16: patched ÷ unpatched", None, _over(*bf16[::-1])
    )
    # A lookup on the host copies the token ids there, so count bytes for the PLE, not copies.
    for name, key, bar in (("layers_4bit", "DtoH", 0), ("ple", "DtoH bytes", None)):
        extra = [_minus(v(name, p, key), v("gpu", p, key)) for p in (0, 1)]
        what = "copies" if key == "DtoH" else "bytes"
        title = f"device to host per step beyond all on the GPU, {CASES[name].title} ({what})"
        yield Row(title, crash(name, extra[0]), extra[1], most=bar)
    for name in ("layers_4bit", "layers_bf16", "ple"):
        sizes = [_over(x, 1e6) for x in pair(name, "HtoD bytes")]
        title = f"host to device per step, {CASES[name].title}"
        yield Row(f"{title} (copies)", *pair(name, "HtoD"))
        yield Row(f"{title} (MB)", *sizes)
        if name != "ple":
            rates = [
                _over(size * speed, 1e3) if size is not None and speed is not None else None
                for size, speed in zip(sizes, pair(name, "decode tok/s"), strict=True)
            ]
            yield Row(f"{title} (GB/s)", *rates)
    title = "decode speed, all on the GPU: patched ÷ unpatched, turn by turn"
    yield Row(title, None, v("gpu", True, "turns with adapter"), least=0.98)
    speed = _over(*pair("gpu", "adapter decode tok/s")[::-1])
    yield Row("the same, in processes of their own", None, speed)
    for batch, shape in ((1, "1 x 8192"), (4, "4 x 2048")):
        base = v("gpu", False, f"prefill {batch} tok/s")
        ratios = [_over(x, base) for x in pair("ple", f"prefill {batch} tok/s")]
        yield Row(f"prefill speed {shape}, PLE on cpu ÷ all on the GPU unpatched", *ratios)
    base = v("gpu", False, "decode tok/s")
    disk = [_over(x, base) for x in pair("ple_disk", "decode tok/s")]
    yield Row("decode speed, PLE on disk ÷ all on the GPU unpatched, base model", *disk)


_COLUMNS = {
    "load s": "load seconds",
    "load peak GiB": "load peak GiB",
    "resident GiB": "resident GiB",
    "decode tok/s": "decode tok/s",
    "decode peak GiB": "decode peak GiB",
    "adapter s": "adapter seconds",
    "with adapter GiB": "adapter GiB",
    "with adapter tok/s": "adapter decode tok/s",
    "peak GiB": "adapter decode peak GiB",
    "prefill 1 x 8k tok/s": "prefill 1 tok/s",
    "prefill 4 x 2k tok/s": "prefill 4 tok/s",
    "DtoH/step": "DtoH",
    "HtoD/step": "HtoD",
}


def _table(header: list[str], lines: list[list[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)] + [""]


def _sample(values: list[float]) -> str:
    middle = _text(statistics.median(values)) if values else "-"
    return f"{middle} ({_text(min(values))} to {_text(max(values))})" if len(values) > 1 else middle


def markdown(results: Results) -> str:
    """The text of ``RESULTS.md``."""
    machine = results.machine
    shape, device = machine.get("shape", "?"), machine.get("device")
    versions = ", ".join(f"{name} {number}" for name, number in machine.get("versions", {}).items())
    bandwidth = machine.get("pinned GB/s")
    lines = [
        f"# Benchmarks: Gemma 4 {shape.upper()}, random weights",
        "",
        f"{device or 'No GPU'}; {versions}; {machine.get('date', '?')}. NF4 with double "
        "quantization, bfloat16 compute. Medians; tok/s at batch 1, "
        "greedy. Made by `python -m benchmarks`.",
        "",
    ]
    if not device:
        lines += ["Run without a GPU: these figures mean nothing.", ""]
    if bandwidth:
        lines += [f"A copy from pinned host memory reaches {bandwidth:.1f} GB/s.", ""]
    bars = shape == "e2b" and bool(device)
    lines += [stamp(FILES), ""]
    header = ["figure", "unpatched", "patched", "bar", "met"]
    measured = [row for row in rows(results) if row.patched is not None or row.unpatched]
    lines += _table(header, [row.cells(bars) for row in measured])
    lines += ["Captured decode steps: [DECODING.md](DECODING.md).", ""]
    lines += ["Decoder layers on the CPU: [STREAMING.md](STREAMING.md).", ""]
    lines += ["## Every case", "", "Median (least to most).", ""]
    body, ends = [], []
    for name, case in CASES.items():
        for patched in (False, True):
            rounds = results.of(name, patched)
            if not rounds:
                continue
            title = f"{case.title}, {'patched' if patched else 'unpatched'}"
            samples = [_sample(results.values(name, patched, key)) for key in _COLUMNS.values()]
            body.append([title, *samples])
            notes = [n for e in rounds for n in [e["error"], *e["notes"].values()] if n]
            ends += [f"- {title}: `{note}`" for note in dict.fromkeys(notes)]
    lines += _table(["case", *_COLUMNS], body)
    if ends:
        lines += ["What ended early or could not be measured:", "", *ends, ""]
    return "\n".join(lines)


def write(folder: Path) -> Path:
    """Write ``RESULTS.md`` from ``cases.jsonl``; return its path."""
    (folder / "RESULTS.md").write_text(markdown(Results(folder / "cases.jsonl")))
    return folder / "RESULTS.md"
