"""FSDP2 gathers a 4-bit weight as a plain parameter, without its quant state.

``fully_shard`` keeps a shard of each parameter, and gathers it for a forward as a plain
``nn.Parameter``.  A ``Params4bit`` becomes one without its quant state.  bitsandbytes gives it back
to the weight of a ``Linear4bit`` in its forward.  Experts in 4 bits, which are parameters of
another module, and code that reads a weight outside a forward do not get it.

A mixed precision policy casts the values of gathered parameters.  That destroys packed bytes that
bitsandbytes stores as bfloat16, and in old releases of torch also those in uint8.  These releases
also make each shard a parameter that requires gradients at first, which bytes in uint8 cannot.

The fix makes the gathered parameter a ``Params4bit`` with the quant state that the whole one had,
casts no packed bytes, and lets no shard of them require gradients.  The quant states, some 3 % of
the weights, stay whole on each process.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from ...engine import Finding, Patch, broken, fixed
from ...objects import shadowed
from ._packed import is_4bit

PATCH = Patch(
    name="fsdp_4bit",
    symptom=(
        "with FSDP2, experts in 4 bits raise Expected mat_a to be Float32, BFloat16 or Float16 "
        "matrix, got Byte; 4-bit weights in bfloat16 storage are wrong in another precision; with "
        "torch 2.11: only Tensors of floating point dtype can require gradients"
    ),
    affects=("transformers", "bitsandbytes"),
    links=("https://github.com/huggingface/accelerate/issues/3983",),
)

_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
#: what Params4bit is made of, apart from its bytes
_OPTIONS = (
    "quant_state", "blocksize", "compress_statistics", "quant_type", "quant_storage",
    "bnb_quantized",
)  # fmt: skip
_KEPT = "_gemma4_compat_4bit"


def _gathers_itself(weight: Any) -> bool:
    return hasattr(weight, "fsdp_post_all_gather")


@PATCH.probe
def gathered_weights_are_plain() -> Finding:
    """Check whether bitsandbytes takes part in FSDP2.

    A program that imports FSDP2 need not import bitsandbytes.
    """
    bitsandbytes = sys.modules.get("bitsandbytes.nn")
    if bitsandbytes is not None and _gathers_itself(bitsandbytes.Params4bit):
        return fixed("Params4bit gathers itself under FSDP2")
    return broken()


@PATCH.around(_PARAM, "FSDPParam._init_sharded_param")
def init_sharded_param(original: Any, self: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_4bit(param) or _gathers_itself(param):
        return original(self, param, *args, **kwargs)
    with shadowed(self, to_sharded_dtensor=partial(_frozen, self.to_sharded_dtensor)):
        result = original(self, param, *args, **kwargs)
    vars(self.sharded_param).pop("requires_grad_", None)
    vars(self)[_KEPT] = {name: getattr(param, name) for name in _OPTIONS}
    # On some CPUs a forward would pack the gathered weight again, and keep all of it.
    module = self._module_info.module
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False
    return result


def _frozen(to_sharded_dtensor: Any, local: Any) -> Any:
    """A shard that a parameter can be made of; if it is of integers, without gradients."""
    shard = to_sharded_dtensor(local)
    if not shard.dtype.is_floating_point:
        detached = shard.detach()  # becomes the parameter
        detached.requires_grad_ = lambda requires_grad=True: detached
        shard.detach = lambda: detached
    return shard


@PATCH.around(_PARAM, "FSDPParam.init_dtype_attrs")
def init_dtype_attrs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if _KEPT in vars(self):
        self.param_dtype = None
    return result


@PATCH.around(_PARAM, "FSDPParam.init_unsharded_param")
def init_unsharded_param(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    options = vars(self).get(_KEPT)
    if options is not None and not is_4bit(self._unsharded_param):
        from bitsandbytes.nn import Params4bit

        # It shares the memory that FSDP frees and fills again.
        self._unsharded_param = Params4bit(self._unsharded_param.data, **options)
    return result
