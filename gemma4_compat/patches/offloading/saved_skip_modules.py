"""A saved checkpoint does not record which modules a device map kept from being quantized.

With ``llm_int8_enable_fp32_cpu_offload``, the bitsandbytes quantizers do not quantize the modules
that the map puts on the CPU or the disk.  They add these to their own list of modules not to
convert, not to ``llm_int8_skip_modules`` of the quantization config.  ``save_pretrained`` writes
the config.  If the checkpoint is loaded with another map, those modules become ``Linear4bit`` or
``Linear8bitLt`` with weights that have no quantization state.

The fix writes the quantizer's list when ``save_pretrained`` writes the config.
"""

from __future__ import annotations

import dis
from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from ...engine.probing import code_of
from ...objects import shadowed

PATCH = Patch(
    name="saved_skip_modules",
    symptom=(
        "a 4/8-bit model whose device map kept modules on the CPU, saved and loaded with another "
        "map: AssertionError (4-bit) or 'Parameter' object has no attribute 'CB' (8-bit) in its "
        "forward"
    ),
    affects=("transformers", "bitsandbytes"),
    unreported="Found by the tests of this package; no report is known upstream.",
)


@PATCH.probe
def quantizer_keeps_its_list_to_itself() -> Finding:
    """Check whether the quantizer adds the map's modules to its own list only."""
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    prepare = code_of(Bnb4BitHfQuantizer._process_model_before_weight_loading)
    if not {"modules_to_not_convert", "extend"} <= set(prepare.co_names):
        return drifted("the quantizer no longer extends modules_to_not_convert")
    written = {step.argval for step in dis.get_instructions(prepare) if step.opname == "STORE_ATTR"}
    in_config = "llm_int8_skip_modules" in written
    return fixed_if(in_config, "the quantizer writes its list to the config")


@PATCH.around("transformers.modeling_utils", "PreTrainedModel.save_pretrained")
def save_pretrained(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    config = getattr(self.config, "quantization_config", None)
    quantizer = getattr(self, "hf_quantizer", None)
    in_float = getattr(quantizer, "modules_to_not_convert", None)
    if not in_float or not getattr(config, "llm_int8_enable_fp32_cpu_offload", False):
        return original(self, *args, **kwargs)
    with shadowed(config, llm_int8_skip_modules=sorted(in_float)):
        return original(self, *args, **kwargs)
