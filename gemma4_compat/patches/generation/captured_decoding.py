"""A static cache does not make a quantized or split model faster: its decode steps stay eager.

The documentation recommends ``generate(cache_implementation="static")`` for speed, because it
compiles the decode step.  transformers does not compile a model that bitsandbytes quantized, or
that has a module on the CPU or on disk, and does not warn.  Such a model decodes eagerly: the GPU
works for a tenth of each step and waits for Python during the rest.

In these cases the fix captures the decode step of one token as a CUDA graph: the first such step
runs eagerly, the second is captured, and it and all others are replayed.  The kernels are those of
the eager step, and the logits are equal bit for bit. torch.compile is not used.  The GPU waits
while ``prepare_inputs_for_generation`` makes the masks of the next step, so the fix makes the same
masks with fewer operations, see ``runtime/capture/inputs.py``.  Modules that a decode step does not
run, such as the towers, may be on the CPU or on disk; the GPU reads offloaded embeddings in place.
The cache's memory and the graphs are kept, and the next call with a cache of the same size uses
them again, unless other code still holds the old cache.

A graph repeats kernels, and runs no Python code.  So the eager step is watched: if it runs code
that is not of the libraries, the steps stay eager.  Before each call, the functions of the step are
compared with those that ran (``runtime/kernels/watch.py``).

A step stays eager, with a warning that gives the reason, if a graph would not repeat it: a user's
code, decoder layers that accelerate copies itself (``offload_streaming`` copies most), several
GPUs, forward hooks, modes of PyTorch, training mode, 8-bit layers with an outlier threshold (the
CPU has to know how many outliers there are), Gemma 3n before transformers 5.23 (it copies a number
from the CPU in each step).  Nothing changes if transformers compiles the step, or if the user
passes a ``compile_config`` or ``disable_compile``.

Where other code than that of transformers runs between two tokens of a call, such as a logits
processor, a stopping criterion, a streamer or a method of a subclass, the model is compared before
each token: what that code changes counts from the next token on.  Of changes by another thread
during a call, a hook and a switched adapter are noticed, and others count from the next call on.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from ...engine import Finding, Kind, Patch, broken, drifted, fixed
from ...engine.probing import code_at, mentions
from ...model.caches import cache_name
from ...runtime.capture import decoding
from ...runtime.capture.between_steps import only_transformers_runs
from ...runtime.capture.cache_memory import use_lent
from ...runtime.capture.conditions import may_capture
from ...runtime.capture.decoding import Decoder, decoder_of, decoding_of, harmless

PATCH = Patch(
    name="captured_decoding",
    kind=Kind.EXACT,
    symptom=(
        'generate(cache_implementation="static") is not faster with a 4-bit or split model: '
        "nothing is compiled, and there is no warning"
    ),
    affects=("transformers",),
    requires=("static_cache_full_window",),
    unreported="transformers #36519 turned compilation off for such models on purpose.",
)

_GENERATION = "transformers.generation.utils"
_CONSEQUENCE = "steps are not captured"
_warn = partial(decoding.warn_once, "decode steps")

#: .decoder: the Decoder of the current call of generate; .sampling: the model and the arguments of
#: the current call of _sample
_call = threading.local()


@PATCH.probe
def a_step_is_called_through_get_compiled_call() -> Finding:
    """Check that ``_sample`` uses the two methods that choose how a step is called."""
    names = code_at("transformers.generation.utils", "GenerationMixin._sample").co_names
    missing = {"get_compiled_call", "_valid_auto_compile_criteria"} - set(names)
    if missing:
        return drifted(f"GenerationMixin._sample does not use {', '.join(sorted(missing))}")
    code = code_at("transformers.generation.utils", "GenerationMixin._valid_auto_compile_criteria")
    if not (mentions(code, "hf_quantizer") or mentions(code, "hf_device_map")):
        return fixed("transformers compiles the steps of quantized and split models")
    return broken()


PATCH.on_revert(decoding.forget)


@PATCH.around(_GENERATION, "GenerationMixin._sample")
def sample(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Note the arguments, which say whether a user's code runs between two steps."""
    outer, _call.sampling = getattr(_call, "sampling", None), (self, kwargs)
    try:
        return original(self, *args, **kwargs)
    finally:
        _call.sampling = outer


@PATCH.around(_GENERATION, "GenerationMixin._valid_auto_compile_criteria")
def valid_auto_compile_criteria(
    original: Any, self: Any, model_kwargs: Any, generation_config: Any, *args: Any, **kwargs: Any
) -> Any:
    _call.decoder = None
    compiled = original(self, model_kwargs, generation_config, *args, **kwargs)
    if not compiled:
        warn = partial(_warn, self)
        with harmless(_CONSEQUENCE, warn):
            cache: Any = model_kwargs.get(cache_name())
            if may_capture(self, generation_config) and _is_static(cache) and not cache.offloading:
                # In transformers 5.6, calls share a cache.
                decoding_of(self).decoders.pop(id(cache), None)
                model, arguments = getattr(_call, "sampling", None) or (None, {})
                alone = model is self and only_transformers_runs(self, arguments)
                _call.decoder = Decoder(self, warn, only_transformers=alone)
    return compiled or _call.decoder is not None


@PATCH.around("transformers.modeling_utils", "PreTrainedModel.get_compiled_call")
def get_compiled_call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    decoder = getattr(_call, "decoder", None)
    if decoder is None or decoder.model is not self:
        return original(self, *args, **kwargs)
    _call.decoder = None
    return decoder


@PATCH.around(_GENERATION, "GenerationMixin.prepare_inputs_for_generation")
def prepare_inputs_for_generation(
    original: Any, self: Any, input_ids: Any, *args: Any, **kwargs: Any
) -> Any:
    """Prepare captured steps in less time; the GPU waits meanwhile."""
    decoder = decoder_of(self, kwargs.get(cache_name()))
    if decoder is None or args:
        return original(self, input_ids, *args, **kwargs)
    given = {"input_ids": input_ids, **kwargs}
    return decoder.prepared(lambda: original(self, **given), given)


@PATCH.around(_GENERATION, "GenerationMixin._prepare_static_cache")
def prepare_static_cache(
    original: Any, self: Any, cache_implementation: Any, batch_size: Any, *args: Any, **kwargs: Any
) -> Any:
    """Lend the memory of an earlier call's cache, which has graphs, to the new cache."""
    cache = original(self, cache_implementation, batch_size, *args, **kwargs)
    with harmless(_CONSEQUENCE, partial(_warn, self)):
        if _is_static(cache) and vars(self).get("_decoding") is not None:
            decoding_of(self).lend(cache, batch_size)
    return cache


@PATCH.around("transformers.cache_utils", "StaticLayer.lazy_initialization")
def static_layer_lazy_initialization(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Use the lent memory if it fits the first keys and values of the layer."""
    if not use_lent(self, *args, **kwargs):
        return original(self, *args, **kwargs)
    return None


def _is_static(cache: Any) -> bool:
    from transformers.cache_utils import StaticCache

    return type(cache) is StaticCache
