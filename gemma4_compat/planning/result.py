"""The plan that ``plan`` returns, and its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..files import hub
from ..model import parts
from ..results.result import Result
from ..results.text import size, table, wrap
from .demand import GENERATE, PREFILL
from .gpus import Gpu

#: what it costs to have a part on the CPU
COSTS = {
    parts.PLE: "about 5 % of the decoding speed",
    parts.VISION: "copied for each image",
    parts.AUDIO: "copied for each sound",
    parts.LAYERS: "copied for each token: slow",
}


@dataclass(frozen=True)
class Memory:
    """One row of a plan: bytes on each GPU and on the CPU.

    ``kind`` is "weights", "adapter", "gradients", "optimizer", "kv_cache", "activations", "unused"
    or "outside"; a plan has one row of "weights" for each part of the model.
    """

    kind: str
    name: str
    gpus: tuple[int, ...]
    cpu: int = 0


@dataclass(frozen=True)
class Offload:
    """Modules of one part that the device map could also put on the CPU.

    ``saves`` is GPU memory in bytes; for decoder layers, that of the largest one.
    """

    part: str
    modules: tuple[str, ...]
    saves: int
    costs: str


@dataclass(frozen=True)
class Plan(Result):
    """A placement and the memory that it needs; all sizes in bytes.

    The weights are what ``torch.cuda.memory_allocated`` returns after loading.  The KV cache is for
    one sequence of ``context`` tokens, and static.  Activations are an estimate for text.  "unused"
    is GPU memory that PyTorch's allocator reserves besides tensors; "outside" is what CUDA takes,
    and PyTorch does not count.

    Attributes:
        gpus: the GPUs, with the memory that may be used.
        quant: "nf4", "int8", "bf16", or how the checkpoint is quantized already.
        train: whether the plan is for training an adapter.
        memory: the bytes on each device, by kind.
        longest_context: the longest context in tokens that fits with this device map; 0 if none.
        ram: the CPU memory that may be used, or ``None`` if it is unknown.
        code: Python code that loads the model as planned.
        compute: the dtype of the products in 4 bits; all else is in ``dtype``.
    """

    model: str
    architecture: str
    quant: str
    dtype: str
    gpus: tuple[Gpu, ...]
    context: int
    train: bool
    memory: tuple[Memory, ...]
    adapter_dir: str | None
    device_map: Mapping[str, int | str]
    further: tuple[Offload, ...]
    longest_context: int
    ram: int | None
    code: str
    compute: str = "bfloat16"

    def bytes_of(self, kind: str, gpu: int | None = None) -> int:
        """The bytes of one kind on one GPU, or on all GPUs together."""
        rows = [row for row in self.memory if row.kind == kind]
        return sum(sum(row.gpus) if gpu is None else row.gpus[gpu] for row in rows)

    @property
    def needed(self) -> tuple[int, ...]:
        """The bytes that each GPU needs."""
        return _sum(self.memory)

    @property
    def cpu(self) -> int:
        """The bytes of offloaded weights on the CPU."""
        return sum(row.cpu for row in self.memory)

    @property
    def ok(self) -> bool:
        """Whether everything fits on the GPUs and, if ``ram`` is known, on the CPU."""
        return self._excess() <= 0 and self._ram_excess() <= 0

    def _excess(self) -> int:
        """The bytes that the fullest GPU lacks."""
        both = zip(self.needed, self.gpus, strict=True)
        return max(needed - gpu.free for needed, gpu in both)

    def _ram_excess(self) -> int:
        return 0 if self.ram is None else self.cpu - self.ram

    @property
    def verdict(self) -> str:
        sizes = " and ".join(size(gpu.free) for gpu in self.gpus)
        where = f"{len(self.gpus)} GPUs of {sizes}" if len(self.gpus) > 1 else f"a GPU of {sizes}"
        if self._excess() > 0:
            return f"does NOT fit on {where}: {size(self._excess())} too much"
        if self._ram_excess() > 0:
            return f"does NOT fit in the CPU's memory: {size(self._ram_excess())} too much"
        if len(self.gpus) > 1 and set(self.device_map.values()) <= {0, "cpu"}:
            return f"fits on GPU 0 alone, of {where}"
        return f"fits on {where}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "needed": self.needed, "cpu": self.cpu, "ok": self.ok}

    def __str__(self) -> str:
        job = ", training" if self.train else ""
        title = f"{hub.short_name(self.model)} ({self.architecture}), {self.quant}{job}"
        facts = [_rows_of_modules(self), *map(wrap, (self.verdict, *_advice(self)))]
        paragraphs = [wrap(title), "\n".join(facts)]
        if self.ok:
            paragraphs.append(self.code)
            if rest := [_cells(offload, self.train) for offload in self.further]:
                head = ("can also be offloaded", "saves", "costs")
                paragraphs.append(table(rest, head, right=(1,)))
        return "\n\n".join(paragraphs)


def _sum(rows: Sequence[Memory]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(row.gpus for row in rows), strict=True)))


def _rows_of_modules(plan: Plan) -> str:
    loaded = [row for row in plan.memory if row.kind in ("weights", "adapter")]
    rows = [
        *loaded,
        Memory("loaded", "loaded", _sum(loaded), plan.cpu),
        *(row for row in plan.memory if row not in loaded),
        Memory("needed", "needed", plan.needed, plan.cpu),
        Memory("available", "available", tuple(gpu.free for gpu in plan.gpus), plan.ram or 0),
    ]
    cells = [
        (row.name, *(size(number) if number else "-" for number in (*row.gpus, row.cpu)))
        for row in rows
    ]
    names = [f"GPU {number}" for number in range(len(plan.gpus))]
    heads = ("", *(names if len(names) > 1 else ["GPU"]), "CPU")
    return table(cells, heads, right=range(1, len(heads)))


def _advice(plan: Plan) -> Iterator[str]:
    """What else there is to know, one paragraph each."""
    if plan.longest_context:
        # Another map, with more on the CPU, may have room for more.
        yield f"longest context that fits with this device map: {plan.longest_context} tokens"
    if plan._excess() > 0:
        none = "No --context fits: take a larger --gpu or a smaller model."
        advice = f"--context {plan.longest_context} fits." if plan.longest_context else none
        may_help = " --quant nf4 may help." if plan.quant in ("int8", "bf16") else ""
        yield f"Everything that can be offloaded is offloaded. {advice}{may_help}"
    if not plan.train and plan.context > PREFILL and plan.longest_context:
        yield f"with {GENERATE}; without these arguments, long prompts need more"
    if not plan.architecture.startswith(("Gemma4", "Gemma3n")):
        yield f"{plan.architecture} is no Gemma 4: most patches of this package are not for it"
    if plan.compute != "bfloat16":
        yield (
            "This GPU does not compute in bfloat16: PyTorch emulates it, which is slow. Float16 "
            "overflows. So the code has products in 4 bits in float32, and all else in bfloat16."
        )


def _cells(offload: Offload, train: bool) -> tuple[str, str, str]:
    name, number = offload.part, len(offload.modules)
    if number > 1 and name == parts.LAYERS:
        name = f"each of {number} {name}, up to"
    costs = offload.costs.replace("each token", "each step") if train else offload.costs
    return name, size(offload.saves), costs
