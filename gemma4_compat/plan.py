"""Plan a model for one GPU from ``config.json`` alone: sizes, a device map and code to paste.

``plan`` is also the command ``gemma4-compat plan MODEL_DIR --gpu 12GiB``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .errors import InputError
from .model import hub, parts, sizes
from .model.files import Location, located
from .model.meta import QUANTS, bnb_config, bnb_options, meta_model
from .model.sizes import TensorSize
from .result import Result
from .text import command_line, size, table

#: GPU memory of the CUDA context, its libraries and the driver, which PyTorch does not count.
OUTSIDE = 2**29
#: The tokens of a chunk: a plan assumes that a long prompt is read in chunks.
PREFILL = 2048
#: The default context, in tokens.
CONTEXT = 32768
_COSTS = {
    parts.PLE: "nothing: rows are looked up on the host",
    parts.VISION: "copied for each image",
    parts.AUDIO: "copied for each sound",
    parts.LAYERS: "copied for each token: slow",
}


@dataclass(frozen=True)
class Part:
    """A part of the model: its bytes on the GPU and on the CPU under the plan's device map."""

    name: str
    gpu: int
    cpu: int


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

    ``weights`` is what ``torch.cuda.memory_allocated`` returns after loading, ``adapter`` included.
    ``kv_cache`` is for one sequence of ``context`` tokens: the larger of a dynamic and a static
    cache.  ``activations`` is an estimate for text, with a prompt that is read in chunks of 2048
    tokens.  ``outside`` is GPU memory that CUDA takes and PyTorch does not count.
    """

    model: str
    architecture: str
    quant: str
    gpu: int
    context: int
    parts: tuple[Part, ...]
    adapter: int
    adapter_dir: str | None
    weights: int
    kv_cache: int
    activations: int
    outside: int
    device_map: Mapping[str, int | str]
    further: tuple[Offload, ...]
    #: if the plan does not fit: a shorter context that does, or None
    shorter: int | None = None

    @property
    def needed(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.outside

    @property
    def ok(self) -> bool:
        """Whether everything fits on the GPU."""
        return self.needed <= self.gpu

    @property
    def code(self) -> str:
        """Python code that loads the model as planned."""
        return _code(self)

    @property
    def verdict(self) -> str:
        if self.ok:
            return f"fits on a GPU of {size(self.gpu)}"
        much = size(self.needed - self.gpu)
        return f"does NOT fit on a GPU of {size(self.gpu)}: {much} too much"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "needed": self.needed, "ok": self.ok, "code": self.code}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def plan(
    model_dir: Location,
    gpu_bytes: int,
    *,
    quant: str = "nf4",
    context: int = CONTEXT,
    adapter: Location | None = None,
) -> Plan:
    """Plan a model for one GPU: the least offloading that leaves room for ``context`` tokens.

    The parts that cost least are offloaded first: the per-layer embeddings, whose rows are then
    looked up on the host, the vision tower, the audio tower, and decoder layers from the last one
    on.

    Args:
        model_dir: the folder with the model's ``config.json``, or its Hub id
            ("google/gemma-4-E4B-it", or "google/gemma-4-E4B-it@REVISION"); no weights are read.
        gpu_bytes: the memory of the GPU, in bytes.
        quant: "nf4" (with double quantisation), "int8" or "bf16".  Offloaded modules stay in
            bfloat16.  With "nf4", offloaded decoder layers are in 4 bits too: the code loads the
            model on the CPU first, and then dispatches it.
        context: the tokens of prompt and answer together.
        adapter: the folder or Hub id of a PEFT adapter; it counts in float32, the dtype that PEFT
            loads it in.

    Raises:
        InputError: an argument is invalid, a file is missing or damaged, or the adapter does not
            fit the model.
    """
    if quant not in QUANTS:
        raise InputError(f"quant must be one of {', '.join(QUANTS)}, not {quant!r}")
    if context < 1:
        raise InputError(f"context must be at least 1 token, not {context}")
    model_dir = located(model_dir)
    adapter = None if adapter is None else located(adapter)
    lora = sizes.adapter_sizes(adapter) if adapter is not None else ()
    model = meta_model(model_dir, bnb_config(quant))
    _check_context(model, context)
    if adapter is not None:
        _check_adapter(adapter, model_dir)
    whole = sizes.tensor_sizes(model)
    fixed = (
        sum(size.on_cuda for size in lora)
        + kv_cache(model, context)
        + activations(model, context)
        + OUTSIDE
    )

    steps = list(_steps(model))
    offloaded: list[str] = []
    taken = 0
    onloaded = _onloaded_bytes(model, whole, quant)
    while _resident(whole, offloaded) + _streamed(onloaded, offloaded) + fixed > gpu_bytes:
        if taken == len(steps):
            break
        offloaded += steps[taken][1]
        taken += 1

    device_map: dict[str, int | str] = {**dict.fromkeys(offloaded, "cpu"), "": 0}
    if offloaded and quant != "bf16":
        if _is_dispatched(quant, offloaded):
            config = bnb_config(quant, llm_int8_skip_modules=_unquantised(offloaded))
            model = meta_model(model_dir, config)
        else:  # transformers leaves offloaded modules unquantised
            model = meta_model(model_dir, bnb_config(quant, offload=True), device_map)
    placed = sizes.tensor_sizes(model)
    result = Plan(
        model=str(model_dir),
        architecture=type(model).__name__,
        quant=quant,
        gpu=gpu_bytes,
        context=context,
        parts=tuple(_parts(placed, offloaded)),
        adapter=sum(size.on_cuda for size in lora),
        adapter_dir=None if adapter is None else str(adapter),
        weights=_resident(placed, offloaded) + sum(size.on_cuda for size in lora),
        kv_cache=kv_cache(model, context),
        activations=activations(model, context) + _streamed(onloaded, offloaded),
        outside=OUTSIDE,
        device_map=device_map,
        further=tuple(_further(whole, steps[taken:])),
    )
    if result.ok:
        return result
    room = gpu_bytes - result.needed + result.kv_cache + activations(model, context)
    return replace(result, shorter=_fitting_context(model, context, room))


def _fitting_context(model: Any, context: int, room: int) -> int | None:
    """The longest of a half, a quarter, ... of this context that fits in ``room`` bytes."""
    while context > 1:
        context //= 2
        if kv_cache(model, context) + activations(model, context) <= room:
            return context
    return None


def _check_adapter(adapter: Location, model_dir: Location) -> None:
    from .inspection.adapter import inspect_adapter

    fit = inspect_adapter(adapter, model_dir).fit
    if fit is None or (fit.loads and not any(group.kind == "refused" for group in fit.groups)):
        return
    command = command_line("gemma4-compat", "adapter", str(adapter), "--model", str(model_dir))
    raise InputError(f"{adapter}: {fit.verdict}. To see why, run {command}")


def _check_context(model: Any, context: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and context > max(limit, CONTEXT):
        raise InputError(f"context of {context} tokens: the model supports {limit} at most")


def parse_size(text: str) -> int:
    """Bytes of "12GiB", "12 GB" (decimal) or "12288MiB".

    Raises:
        InputError: the unit is missing or unknown.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(i?)B\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise InputError(f"{text!r} is not a size: write 12GiB, 12GB or 12288MiB")
    power = 1 + "KMGT".index(match[2].upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


# -- memory besides the weights --------------------------------------------------------------------


def kv_cache(model: Any, context: int) -> int:
    """The bytes of the largest cache: dynamic after a prompt or while answering, or static."""
    prompt = [PREFILL] * (context // PREFILL)
    if context % PREFILL:
        prompt.append(context % PREFILL)
    return max(
        sizes.kv_cache_bytes(model, prompt),
        sizes.kv_cache_bytes(model, [*prompt, 1]),
        sizes.static_cache_bytes(model, context),
    )


def activations(model: Any, context: int) -> int:
    """An estimate of the peak of activations in bytes, for the last chunk of a prompt.

    These tensors exist at once, in bfloat16: the residual stream and its norm, the per-layer inputs
    twice, and the larger of MLP (gate, up and their product) and attention (queries and output; one
    layer's keys and values, copied when the cache grows, and once more for all heads; the mask as
    bool and as bfloat16).  Logits are those of the last token, in float32 and twice.  The estimate
    assumes an attention kernel that does not materialise all scores.
    """
    text = model.config.get_text_config()
    tokens = min(PREFILL, context)
    mlp = max(
        (m.out_features for n, m in model.named_modules() if _is_decoder(n, "gate_proj")),
        default=4 * text.hidden_size,
    )
    queries = max(
        (m.out_features for n, m in model.named_modules() if _is_decoder(n, "q_proj")),
        default=text.hidden_size,
    )
    ple = text.num_hidden_layers * (getattr(text, "hidden_size_per_layer_input", 0) or 0)
    cached = max(sizes.kv_widths(model).values(), default=0)
    stream = tokens * (2 * text.hidden_size + 2 * ple) * 2
    attention = (tokens * 2 * queries + 2 * context * (cached + queries)) * 2
    attention += tokens * context * 3
    return int(stream + max(tokens * 3 * mlp * 2, attention) + 2 * 4 * text.vocab_size)


def _is_decoder(name: str, end: str) -> bool:
    return name.endswith(f".{end}") and parts.part_of(name) == parts.LAYERS


def _onloaded_bytes(model: Any, whole: Iterable[TensorSize], quant: str) -> dict[str, int]:
    """The GPU memory in bytes of each weight during a forward, if it is offloaded."""
    onloaded = {name: 2 * parameter.numel() for name, parameter in model.named_parameters()}
    if quant == "nf4":
        onloaded = {n: taken for n, taken in onloaded.items() if parts.part_of(n) != parts.LAYERS}
        onloaded |= {s.name: s.on_cuda for s in whole if s.part == parts.LAYERS and not s.buffer}
    return onloaded


def _streamed(onloaded: Mapping[str, int], offloaded: Iterable[str]) -> int:
    """The most GPU memory that offloaded weights take at once: three layers, or one tensor."""
    streamed = [name for name in offloaded if parts.part_of(name) != parts.PLE]
    layers: Counter[str] = Counter()
    largest = 0
    for name, taken in onloaded.items():
        if parts.is_under(name, streamed):
            layer = re.match(r"(.*\blayers\.\d+)\.", name)
            if layer is None:
                largest = max(largest, taken)
            else:
                layers[layer[1]] += taken
    return max(largest, sum(taken for _, taken in layers.most_common(3)))


# -- the map --------------------------------------------------------------------------------------


def _steps(model: Any) -> Iterator[tuple[str, list[str]]]:
    """What can be offloaded, in this order: a part's name and its modules."""
    tops: dict[str, list[str]] = {parts.PLE: [], parts.VISION: [], parts.AUDIO: []}
    layers = []
    for name, module in model.named_modules():
        part = parts.part_of(name)
        if part in tops and not parts.is_under(name, tops[part]):
            if next(module.parameters(), None) is not None:
                tops[part].append(name)
        elif part == parts.LAYERS and re.search(r"(^|\.)layers\.\d+$", name):
            layers.append(name)
    yield from ((part, names) for part, names in tops.items() if names)
    # From the last one on.  In models that share keys and values the last layers are the largest.
    # And transformers < 5.23 treats layers.3 as a pattern that also matches layers.30: in this
    # order layers.30 to layers.39 are always offloaded before layers.3.
    yield from ((parts.LAYERS, [name]) for name in reversed(layers))


def _is_dispatched(quant: str, offloaded: Iterable[str]) -> bool:
    """Whether the code dispatches after loading: only then are offloaded layers in 4 bits."""
    return quant == "nf4" and any(parts.part_of(name) == parts.LAYERS for name in offloaded)


def _unquantised(offloaded: Iterable[str]) -> list[str]:
    """The modules that are not in 4 bits in a model that is dispatched after loading."""
    others = (parts.LAYERS, parts.PLE)
    return ["lm_head", *(name for name in offloaded if parts.part_of(name) not in others)]


def _resident(placed: Iterable[TensorSize], offloaded: Iterable[str]) -> int:
    offloaded = tuple(offloaded)
    return sum(s.on_cuda for s in placed if s.buffer or not parts.is_under(s.name, offloaded))


def _parts(placed: Iterable[TensorSize], offloaded: list[str]) -> Iterator[Part]:
    placed = tuple(placed)
    for name in parts.PARTS:
        of_part = [size for size in placed if size.part == name]
        gpu = _resident(of_part, offloaded)
        cpu = sum(s.bytes for s in of_part if not s.buffer and parts.is_under(s.name, offloaded))
        if gpu or cpu:
            yield Part(name, gpu, cpu)


def _further(
    whole: tuple[TensorSize, ...], steps: Iterable[tuple[str, list[str]]]
) -> Iterator[Offload]:
    by_part: dict[str, list[tuple[str, int]]] = {}
    for part, modules in steps:
        saves = _resident(whole, ()) - _resident(whole, modules)
        by_part.setdefault(part, []).extend((name, saves) for name in modules)
    for part, modules_saves in by_part.items():
        names = tuple(name for name, _ in modules_saves)
        yield Offload(part, names, max(saves for _, saves in modules_saves), _COSTS[part])


# -- what is printed ------------------------------------------------------------------------------


def _code(plan: Plan) -> str:
    offloaded = [name for name, device in plan.device_map.items() if device == "cpu"]
    dispatched = _is_dispatched(plan.quant, offloaded)
    options: dict[str, Any] = {}
    if plan.quant != "bf16":
        options = bnb_options(plan.quant, offload=bool(offloaded) and not dispatched)
        if dispatched:
            options["llm_int8_skip_modules"] = _unquantised(offloaded)
    lines = ["import gemma4_compat", "import torch"]
    if dispatched:
        lines.append("from accelerate import dispatch_model")
    if plan.adapter_dir is not None:
        lines.append("from peft import PeftModel")
    names = f"BitsAndBytesConfig, {plan.architecture}" if options else plan.architecture
    lines += [f"from transformers import {names}", "", "device_map = {"]
    lines += [f'    "{name}": {_quoted(device)},' for name, device in plan.device_map.items()]
    lines.append("}")
    if options:
        lines.append("quantization = BitsAndBytesConfig(")
        lines += [f"    {key}={_quoted(value)}," for key, value in options.items()]
        lines.append(")")
    lines += [
        f"model = {plan.architecture}.from_pretrained(",
        f"    {_pretrained(plan.model)},",
        "    dtype=torch.bfloat16,",
        '    device_map={"": "cpu"},' if dispatched else "    device_map=device_map,",
        *(["    quantization_config=quantization,"] if options else []),
        ")",
    ]
    if dispatched:
        lines += [
            "# A device_map for from_pretrained would leave layers on the CPU in bfloat16.",
            "skip_keys = model._skip_keys_device_placement",
            "model = dispatch_model(model, device_map, skip_keys=skip_keys)",
        ]
    if plan.adapter_dir is not None:
        lines.append(f"model = PeftModel.from_pretrained(model, {_pretrained(plan.adapter_dir)})")
    if plan.quant != "int8":
        lines.append(
            '# model.generate(..., cache_implementation="static") is several times as fast'
        )
    return "\n".join(lines)


def _pretrained(location: str) -> str:
    name, revision = hub.id_and_revision(location)
    return _quoted(name) if revision is None else f"{_quoted(name)}, revision={_quoted(revision)}"


def _quoted(value: Any) -> str:
    # A JSON string is a Python string too, with double quotes as in the code around it.
    if isinstance(value, (str, list)):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _lines(plan: Plan) -> Iterator[str]:
    name = hub.short_name(plan.model)
    yield f"{name} ({plan.architecture}), {plan.quant}"
    yield ""
    numbers = [(part.name, part.gpu, part.cpu) for part in plan.parts]
    if plan.adapter_dir is not None:
        numbers.append(("adapter, float32", plan.adapter, 0))
    numbers += [
        ("loaded", plan.weights, sum(part.cpu for part in plan.parts)),
        (f"KV cache, {plan.context} tokens", plan.kv_cache, 0),
        ("activations (estimate)", plan.activations, 0),
        ("outside PyTorch (estimate)", plan.outside, 0),
        ("needed", plan.needed, 0),
    ]
    rows = [(label, size(gpu), size(cpu) if cpu else "") for label, gpu, cpu in numbers]
    yield table(rows, ("", "GPU", "CPU"), right=(1, 2))
    yield plan.verdict
    if plan.context > PREFILL:
        yield f"with generate(..., prefill_chunk_size={PREFILL}); without it long prompts need more"
    yield ""
    if plan.ok:
        yield plan.code
    else:
        yield f"Everything that can be offloaded is offloaded. {_advice(plan)}"
    if plan.ok and plan.further:
        yield ""
        rest = [(_offload_label(more), size(more.saves), more.costs) for more in plan.further]
        yield table(rest, ("can also be offloaded", "saves", "costs"), right=(1,))


def _offload_label(offload: Offload) -> str:
    if len(offload.modules) > 1 and offload.part == parts.LAYERS:
        return f"each of {len(offload.modules)} {offload.part}, up to"
    return offload.part


def _advice(plan: Plan) -> str:
    advice = "No --context fits." if plan.shorter is None else f"--context {plan.shorter} fits."
    return advice if plan.quant == "nf4" else f"{advice} --quant nf4 may help."
