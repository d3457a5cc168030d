"""The memory that a job needs besides the weights: KV cache, activations, gradients, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import InputError
from ..files.checkpoint import ADAPTER_CONFIG, Location, file_in, located
from ..model import parts, sizes
from ..model.sizes import TensorSize

#: The tokens of a chunk: a plan assumes that a long prompt is read in chunks.
PREFILL = 2048
#: how to generate as a plan assumes
GENERATE = f'generate(..., cache_implementation="static", prefill_chunk_size={PREFILL})'
#: The default contexts in tokens, for generating and for training.
CONTEXT = 32768
TRAINED_CONTEXT = 2048
#: what ``generate`` makes of the last token's logits: two copies in float32
_LOGITS_COPIES = 2 * 4
#: The longest contexts are given in steps of this number of tokens.
_STEP = 256
#: the decoder's linear layers, which QLoRA usually adapts
TARGETS = r".*\blayers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
#: and the layers of the towers, which have the same names
EXCLUDED = r".*(vision|audio).*"


@dataclass(frozen=True)
class Demand:
    """What a job needs at one context; all in bytes.

    ``cache`` has the KV cache of each layer, by its index.  ``activations`` are the peak of one
    GPU that has decoder layers, and ``largest`` is the attention's largest one, when generating.
    """

    context: int
    cache: Mapping[int, int]
    activations: int
    largest: int


@dataclass(frozen=True)
class Job:
    """Generating or training with a model; ``adapter`` are the tensors of the adapter.

    ``states`` is the number of tensors of the same size for each tensor of the adapter: its
    gradient, and two of the optimizer.  ``dequantized`` are the bytes of the largest weight that is
    dequantized for a prompt.
    """

    adapter: tuple[TensorSize, ...]
    states: int
    cache: Callable[[int], Mapping[int, int]]
    activations: Callable[[int], tuple[int, int]]
    dequantized: int = 0

    def demand(self, context: int) -> Demand:
        return Demand(context, self.cache(context), *self.activations(context))


def generating(model: Any, adapter: tuple[TensorSize, ...], fused: bool = True) -> Job:
    """One sequence with a static cache, whose prompt is read in chunks."""
    from .peak import forward_peak

    logits = _LOGITS_COPIES * int(model.config.get_text_config().vocab_size)

    def activations(context: int) -> tuple[int, int]:
        past = max(context - PREFILL, 0)
        peak, largest = forward_peak(model, context - past, past, fused=fused)
        return peak + logits, largest

    cache = partial(sizes.static_cache_bytes, model)
    packed = (each for each in model.modules() if type(each).__name__ == "Linear4bit")
    dequantized = max((2 * each.in_features * each.out_features for each in packed), default=0)
    return Job(adapter, 0, cache, activations, dequantized)


def training(model: Any, fused: bool = True) -> Job:
    """A training step on one sequence, with AdamW and gradient checkpointing.

    ``model`` has an adapter, on meta.
    """
    from .peak import training_peak

    adapter = tuple(
        TensorSize(name, parameter.numel() * parameter.element_size())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    return Job(adapter, 3, lambda context: {}, lambda n: (training_peak(model, n, fused), 0))


def with_adapter(model: Any, adapter: Location | None, rank: int) -> Any:
    """The model on meta with this adapter, else with LoRA on the decoder's linear layers."""
    from peft import LoraConfig, PeftConfig, get_peft_model

    if adapter is not None:
        file = file_in(located(adapter), ADAPTER_CONFIG)
        if file is None:
            raise InputError(f"{adapter}: no {ADAPTER_CONFIG}")
        config = PeftConfig.from_pretrained(str(file.parent))
        config.inference_mode = False
    else:
        config = LoraConfig(r=rank, target_modules=TARGETS, exclude_modules=EXCLUDED)
    kinds = {type(module).__name__ for module in model.modules()}
    model.is_loaded_in_4bit = "Linear4bit" in kinds
    model.is_loaded_in_8bit = "Linear8bitLt" in kinds
    return get_peft_model(model, config)


def longest_context(job: Job, known: Demand, limit: int, fits: Callable[[Demand], bool]) -> int:
    """The longest context up to ``limit`` that fits, in steps of 256 tokens; 0 if none does."""
    ends = {_STEP, PREFILL, known.context, limit}
    above = None
    for end in sorted((end for end in ends if end <= limit), reverse=True):
        demand = known if end == known.context else job.demand(end)
        if fits(demand):
            return end if above is None else _longest_between(job, demand, above, fits)
        above = demand
    return 0


def _longest_between(job: Job, low: Demand, high: Demand, fits: Callable[[Demand], bool]) -> int:
    """The longest context that fits, where ``low`` fits and ``high`` does not.

    Activations are interpolated.  That is never too little: between two of the contexts of
    `longest_context`, they grow faster the longer the context is.
    """

    def between(context: int) -> Demand:
        share = (context - low.context) / (high.context - low.context)
        activations = low.activations + share * (high.activations - low.activations)
        largest = low.largest + share * (high.largest - low.largest)
        return Demand(context, job.cache(context), int(activations), int(largest))

    fewest, most = low.context // _STEP, high.context // _STEP
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if fits(between(middle * _STEP)):
            fewest = middle
        else:
            most = middle - 1
    return max(fewest * _STEP, low.context)


def onloaded_bytes(model: Any, whole: tuple[TensorSize, ...], quant: str) -> dict[str, int]:
    """The GPU memory in bytes of each weight during a forward, if it is offloaded.

    Decoder layers stay in 4 bits, other offloaded modules are in two bytes.
    """
    onloaded = {name: 2 * parameter.numel() for name, parameter in model.named_parameters()}
    if quant != "nf4":
        return onloaded
    onloaded = {n: taken for n, taken in onloaded.items() if parts.part_of(n) != parts.LAYERS}
    return onloaded | {s.name: s.on_cuda for s in whole if s.part == parts.LAYERS and not s.buffer}
