"""An offloaded 8-bit layer fails, because its weight comes back to the device incomplete.

accelerate moves an offloaded weight to the meta device and, for a forward, rebuilds it with the
attributes that it had there: ``CB`` and ``SCB`` are None or on the meta device.  It then calls
``Int8Params.to``, and sets ``SCB`` afterwards.

- bitsandbytes 0.47.0 copies the attribute ``CB``, so a weight that stays on the CPU has none.  The
  layer then runs with the weight of its first forward and without its scales.
- bitsandbytes 0.48.0 and 0.48.1 copy ``SCB`` from the meta device, which raises an error.  0.48.2
  does not copy it.

The fix removes a ``SCB`` on the meta device before the move, and sets ``CB`` where it is missing.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, broken, drifted, fixed

PATCH = Patch(
    name="int8_params_move",
    symptom=(
        "NotImplementedError: Cannot copy out of meta tensor; no data! (or: 'NoneType' object has "
        "no attribute 'dtype') in the forward of 8-bit layers that are offloaded"
    ),
    affects=("transformers", "accelerate", "bitsandbytes>=0.47,<0.48.2"),
    changes=(
        "bitsandbytes' Int8Params.to removes scales on the meta device, and sets CB on the weight "
        "that it returns."
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1786",),
)


@PATCH.probe
def weight_comes_back_incomplete() -> Finding:
    """Move a quantized weight as accelerate does."""
    import torch
    from bitsandbytes.nn.modules import Int8Params

    weight = Int8Params(
        torch.zeros(1, 1, dtype=torch.int8),
        requires_grad=False,
        has_fp16_weights=False,
        SCB=torch.zeros(1, device="meta"),
    )
    try:
        moved = weight.to("cpu")
    except NotImplementedError:
        return broken()
    except Exception as error:
        return drifted(f"Int8Params.to raised {error}")
    return broken() if moved.CB is None else fixed("Int8Params.to returns a complete weight")


@PATCH.around("bitsandbytes.nn.modules", "Int8Params.to")
def int8_params_to(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    if self.data.dtype != torch.int8:
        return original(self, *args, **kwargs)
    if self.SCB is not None and self.SCB.is_meta:
        self.SCB = None  # it has no values
    moved = original(self, *args, **kwargs)
    if moved.CB is None and not moved.is_meta:
        moved.CB = moved.data
    return moved
