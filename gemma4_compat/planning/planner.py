"""Plans where a model goes, and what it needs there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..errors import InputError
from ..files.checkpoint import Location, located, read_config
from ..machine.host_memory import available_memory
from ..model import parts, sizes
from ..model.device_maps import covering
from ..model.meta import COMPRESSED, QAT, QUANTS, bnb_config, checkpoint_model, meta_model
from ..model.sizes import TensorSize
from ..results.text import command_line
from .code import Load
from .demand import (
    CONTEXT,
    TRAINED_CONTEXT,
    Demand,
    generating,
    longest_context,
    onloaded_bytes,
    training,
    with_adapter,
)
from .gpus import Gpu, gpus_of, parse_size
from .placement import Placement, Unit, place, units_of
from .result import COSTS, Memory, Offload, Plan

_QAT = "QAT checkpoint"


def plan(
    model_dir: Location,
    gpu: int | str | Gpu | Iterable[int | str | Gpu] | None = None,
    *,
    quant: str | None = None,
    context: int | None = None,
    adapter: Location | None = None,
    train: bool = False,
    rank: int = 16,
    reserve: int | str = 0,
    ram: int | str | None = None,
    keep_ple: bool = False,
) -> Plan:
    """Plan a model for one or more GPUs: the least offloading that leaves room for a context.

    The parts that cost least are offloaded first: the per-layer embeddings in any case, whose rows
    are then looked up on the host, then the vision tower, the audio tower, and decoder layers from
    the last one on.  If there are more GPUs, these parts go to them before they go to the CPU.

    Args:
        model_dir: the folder with the model's ``config.json``, or its Hub id
            ("google/gemma-4-E4B-it", or "google/gemma-4-E4B-it@REVISION"); no weights are read.
        gpu: a GPU's memory as "12GiB" or in bytes, the name of a card as "RTX 4070", or several of
            these.  The default is the GPUs of this machine, with the memory that is free now.
        quant: "nf4" (the default, with double quantization), "int8" or "bf16".  Offloaded modules
            stay in bfloat16.  With "nf4", offloaded decoder layers are in 4 bits too: the code
            loads the model on the CPU first, and then dispatches it.  A checkpoint that is
            quantized already is planned as it is, one of compressed-tensors in bfloat16.
        context: the tokens of prompt and answer together; 32768 by default.  When training, the
            tokens of a sequence; 2048 by default.
        adapter: the folder or Hub id of a PEFT adapter; it counts in float32, the dtype that PEFT
            loads it in.
        train: plan a training step of the adapter, with AdamW, on one sequence.
        rank: when training without ``adapter``, the rank of a LoRA adapter on all linear layers of
            the decoder.
        reserve: memory of GPU 0 that other programs need, such as the desktop.
        ram: the CPU memory that the model may use.  The default is what this machine has free if
            the plan is for its GPUs, else the CPU is not checked.
        keep_ple: leave the per-layer embeddings on the GPU if they fit.

    Raises:
        InputError: an argument is invalid, a file is missing or damaged, the adapter does not fit
            the model, or this machine has no GPU and none is named.

    Example:
        >>> plan("gemma-4-E2B-it", "RTX 4070").device_map
        {'model.language_model.embed_tokens_per_layer': 'cpu', '': 0}
    """
    gpus, reserved = gpus_of(gpu), parse_size(reserve)
    if not 0 <= reserved < gpus[0].free:
        raise InputError(f"cannot reserve {reserved} bytes of a GPU with {gpus[0].free}")
    gpus = (replace(gpus[0], free=gpus[0].free - reserved), *gpus[1:])
    if context is None:
        context = TRAINED_CONTEXT if train else CONTEXT
    model_dir = located(model_dir)
    adapter = None if adapter is None else located(adapter)
    bfloat16 = all(each.bfloat16 for each in gpus)
    compute = "bfloat16" if bfloat16 else "float32"  # float16 overflows, and bfloat16 is emulated
    model, loaded_as, label = _model(model_dir, quant, compute)
    if train and label == _QAT:
        raise InputError(f"{model_dir}: a {label} cannot be trained: use the unquantized one")
    limit = _limit(model, context)
    if adapter is not None:
        _check_adapter(adapter, model_dir)

    whole = sizes.tensor_sizes(model)
    onloaded = onloaded_bytes(model, whole, "nf4" if loaded_as is None else loaded_as)
    if train:  # PEFT changes a model, so this is another one.
        job = training(with_adapter(_model(model_dir, quant, compute)[0], adapter, rank), bfloat16)
    else:
        tensors = () if adapter is None else sizes.adapter_sizes(adapter)
        job = generating(model, tensors, bfloat16)
    demand = job.demand(context)
    available = None if ram is None else parse_size(ram)
    if ram is None and all(each.here for each in gpus):
        available = available_memory()

    def placed(keep_ple: bool) -> Placement:
        units = units_of(model, whole, onloaded, job.adapter)
        return place(Placement(units, gpus, job), demand, keep_ple=keep_ple)

    placement = placed(keep_ple)
    if available is not None and placement.cpu() > available:
        kept = placed(True)
        if kept.fits(demand) and kept.cpu() <= available:
            placement = kept

    load = Load(
        model=str(model_dir),
        architecture=type(model).__name__,
        quant=loaded_as,
        compute=compute,
        device_map=placement.device_map(),
        adapter_dir=None if adapter is None else str(adapter),
        train=train,
        rank=rank,
    )
    memory = tuple(_memory(placement, demand, _placed_sizes(whole, load, model_dir)))
    return Plan(
        model=load.model,
        architecture=load.architecture,
        quant=label,
        dtype="bfloat16",
        gpus=gpus,
        context=context,
        train=train,
        memory=memory,
        adapter_dir=load.adapter_dir,
        device_map=load.device_map,
        further=tuple(_further(placement)),
        longest_context=longest_context(job, demand, limit, placement.fits),
        ram=available,
        code="\n".join(load.lines()),
        compute=compute,
    )


# -- arguments ------------------------------------------------------------------------------------


def _limit(model: Any, context: int) -> int:
    """The longest context that the model supports."""
    if context < 1:
        raise InputError(f"context must be at least 1 token, not {context}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or CONTEXT
    if context > max(limit, CONTEXT):
        raise InputError(f"context of {context} tokens: the model supports {limit} at most")
    return int(max(limit, context))


def _check_adapter(adapter: Location, model_dir: Location) -> None:
    from ..inspection.adapter import inspect_adapter

    found = inspect_adapter(adapter, model_dir)
    if not found.loads or any(group.kind == "refused" for group in found.groups):
        command = command_line("gemma4-compat", "adapter", str(adapter), "--model", str(model_dir))
        raise InputError(f"{adapter}: {found.verdict}. To see why, run {command}")


# -- the model ------------------------------------------------------------------------------------


def _model(folder: Location, quant: str | None, compute: str) -> tuple[Any, str | None, str]:
    """The model on meta, its ``quant`` or ``None`` if it is quantized already, and its name."""
    if quant is not None and quant not in QUANTS:
        raise InputError(f"quant must be one of {', '.join(QUANTS)}, not {quant!r}")
    quantization = read_config(folder).get("quantization_config")
    if quantization is None:
        quant = quant or QUANTS[0]
        return meta_model(folder, bnb_config(quant, bnb_4bit_compute_dtype=compute)), quant, quant
    if quant is not None:
        raise InputError(f"{folder}: the checkpoint is quantized already: leave out --quant")
    model, method = checkpoint_model(folder)
    if method == QAT:
        return model, None, _QAT
    if method == COMPRESSED:
        import transformers
        from transformers.quantizers import quantizer_compressed_tensors as quantizers

        # transformers < 5.21 dequantizes after loading
        if not hasattr(quantizers.CompressedTensorsHfQuantizer, "get_load_operations"):
            version = transformers.__version__
            raise InputError(f"{folder}: transformers {version} cannot offload {method}: update it")
        return model, COMPRESSED, f"bf16, dequantized from {COMPRESSED}"
    if method != "bitsandbytes":
        known = f"bitsandbytes, {COMPRESSED} and {QAT} (QAT)"
        raise InputError(f"{folder}: quantized by {method}: only {known} are supported")
    if quantization.get("load_in_8bit"):
        return model, None, "8-bit checkpoint"
    return model, None, f"4-bit checkpoint ({quantization.get('bnb_4bit_quant_type', 'fp4')})"


def _placed_sizes(
    whole: tuple[TensorSize, ...], load: Load, model_dir: Location
) -> tuple[TensorSize, ...]:
    """The tensors of the loaded model: offloaded modules are not all quantized."""
    kept = [name for name in load.offloaded if parts.part_of(name) != parts.PLE]
    if load.quant in (None, "bf16", COMPRESSED) or not kept:
        return whole
    from transformers import BitsAndBytesConfig

    # transformers leaves the modules that it puts on the CPU unquantized
    device_map = None if load.dispatches else load.device_map
    config = BitsAndBytesConfig(**load.options())
    return sizes.tensor_sizes(meta_model(model_dir, config, device_map))


# -- the rows -------------------------------------------------------------------------------------


def _memory(
    placement: Placement, demand: Demand, placed: tuple[TensorSize, ...]
) -> Iterator[Memory]:
    numbers = range(len(placement.gpus))
    devices = placement.device_map()
    for part in parts.PARTS:
        gpus, cpu = [0 for _ in numbers], 0
        for tensor in (tensor for tensor in placed if tensor.part == part):
            device = devices[covering(tensor.name, devices) or ""]
            if not isinstance(device, int) and not tensor.buffer:
                cpu += tensor.bytes
            else:  # accelerate leaves the buffers of an offloaded module on the GPU
                gpus[device if isinstance(device, int) else 0] += tensor.on_cuda
        if any(gpus) or cpu:
            yield Memory("weights", part, tuple(gpus), cpu)

    def each(of: Callable[[int], int]) -> tuple[int, ...]:
        return tuple(of(number) for number in numbers)

    adapter = each(placement.adapter)
    if placement.job.adapter:
        yield Memory("adapter", "adapter, float32", adapter)
    of = "estimate"
    if placement.job.states:
        yield Memory("gradients", "gradients, float32", adapter)
        yield Memory("optimizer", "AdamW, float32", tuple(2 * taken for taken in adapter))
        of = f"{demand.context} tokens"
    else:
        cache = each(lambda number: placement.cache(demand, number))
        yield Memory("kv_cache", f"KV cache, {demand.context} tokens", cache)
    activations = each(lambda number: placement.activations(demand, number))
    yield Memory("activations", f"activations ({of})", activations)
    used = [bool(placement.on(number)) for number in numbers]
    unused = each(lambda number: placement.unused(demand, number) * used[number])
    yield Memory("unused", "reserved, unused (estimate)", unused)
    outside = each(lambda number: placement.gpus[number].outside * used[number])
    yield Memory("outside", "outside PyTorch (estimate)", outside)


def _further(placement: Placement) -> Iterator[Offload]:
    left: dict[str, list[Unit]] = {}
    for unit in placement.on(0):
        if unit.modules and unit.device == 0:
            left.setdefault(unit.part, []).append(unit)
    for part, units in left.items():
        modules = tuple(name for unit in units for name in unit.modules)
        yield Offload(part, modules, max(unit.weights for unit in units), COSTS[part])
