"""``load_in_8bit`` does not quantize the experts of 26B-A4B, and nothing reports it.

bitsandbytes quantizes ``nn.Linear`` modules.  ``Gemma4TextExperts`` holds all experts of a layer in
two three-dimensional parameters, so transformers skips them.  Nine tenths of the model, some 42
GiB, are loaded in bfloat16 although the config asks for eight bits.

This patch repairs nothing.  It warns, with the size, before the weights are read, and names
``load_in_4bit``, with which this package quantizes them.  It asks the quantizer which parameters it
skips, so the warning ends when a release quantizes them.
"""

from __future__ import annotations

import logging
from typing import Any

from ...engine import Finding, Kind, Patch, fixed_if
from ...engine.probing import code_of, mentions
from ...model.parts import fused_experts

logger = logging.getLogger(__name__)

PATCH = Patch(
    name="fused_experts_notice",
    kind=Kind.WARNING,
    symptom=(
        "load_in_8bit of 26B-A4B needs far more memory than expected: the experts stay unquantized "
        "(some 42 GiB in bfloat16), and nothing reports it"
    ),
    affects=("transformers", "bitsandbytes"),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1965",
    ),
)

_QUANTIZER = "transformers.quantizers.quantizer_bnb_8bit"


@PATCH.probe
def quantizers_can_be_asked() -> Finding:
    """Look for the method that decides what is quantized, and whether it mentions experts."""
    from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

    code = code_of(Bnb8BitHfQuantizer.param_needs_quantization)
    return fixed_if(mentions(code, "xperts"), "the 8-bit quantizer handles experts itself")


@PATCH.around(_QUANTIZER, "Bnb8BitHfQuantizer._process_model_before_weight_loading")
def process_model_before_weight_loading(
    original: Any, self: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(self, model, *args, **kwargs)
    if model.config.model_type.startswith("gemma4"):
        _warn(self, model)
    return result


def _warn(quantizer: Any, model: Any) -> None:
    skipped = {
        name: model.get_parameter(name)
        for name in fused_experts(dict(model.named_modules()))
        if not quantizer.param_needs_quantization(model, name)
    }
    if not skipped:
        return
    size = sum(parameter.numel() * parameter.element_size() for parameter in skipped.values())
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in skipped.values()}
    logger.warning(
        "load_in_8bit does not quantize the experts of %d layers (fused tensors such as %s): they "
        "are loaded in %s and take %.3g GiB.  load_in_4bit quantizes them.  To find a device map "
        "that fits your GPU, run gemma4-compat plan MODEL --gpu SIZE.",
        len({name.rpartition(".")[0] for name in skipped}), next(iter(skipped)),
        " and ".join(sorted(dtypes)), size / 2**30,
    )  # fmt: skip
