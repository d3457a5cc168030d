"""Between its products, a decoder layer of Gemma 4 has a kernel for each sum and product.

After attention and after the MLP, it normalizes, adds the residual, multiplies by a factor, and
normalizes again; the MLP and the per-layer inputs multiply by an activation.  These are 13 kernels
in a layer of E2B, of a few KiB each.  A captured step spends a sixth of its time on them.

With a few tokens, the fix computes them in five kernels, with the same bits, see
``runtime/kernels/decoder_layer.py``.  A norm or an activation with a hook, or with a function of
the user, is called as before.  Of layers with experts, only the MLP is computed so.
"""

from __future__ import annotations

from ...engine import Finding, Kind, Part, Patch, drifted, fixed_if
from ...engine.probing import code_at
from ...runtime.capture.decoding import forget
from ...runtime.kernels.decoder_layer import layer_forward, mlp_forward
from .._families import GEMMA4, UNIFIED, Family

PATCH = Patch(
    name="layer_kernels",
    kind=Kind.EXACT,
    symptom="generate is slow on a GPU: a sixth of a captured step of E2B is sums and products",
    affects=(),
    unreported="The code is right as it is.",
    requires=("norm_kernels",),
)

#: The names that their code may use.
_LAYER = {
    "input_layernorm", "self_attn", "post_attention_layernorm", "pre_feedforward_layernorm", "mlp",
    "post_feedforward_layernorm", "layer_scalar", "enable_moe_block", "router", "experts",
    "post_feedforward_layernorm_1", "reshape", "shape", "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2", "hidden_size_per_layer_input", "per_layer_input_gate", "act_fn",
    "per_layer_projection", "post_per_layer_input_norm",
}  # fmt: skip
_MLP = {"down_proj", "act_fn", "gate_proj", "up_proj"}


def mend(part: Part, family: Family) -> None:
    """Register the probe and the replacements for a family's layers and MLPs."""
    layer, mlp = f"{family.prefix}TextDecoderLayer.forward", f"{family.prefix}TextMLP.forward"

    @part.probe
    def they_have_many_kernels() -> Finding:
        """The values are compared at the first call."""
        used, of_mlp = ({*code_at(family.module, name).co_names} for name in (layer, mlp))
        if not used <= _LAYER:
            return drifted(f"{layer} computes in another way")
        return fixed_if(of_mlp != _MLP, f"{mlp} has other kernels")

    part.around(family.module, mlp)(mlp_forward)
    # In newer releases, it is a closure that checkpoints only if it is the class's forward itself.
    part.around(family.module, layer, variable="forward")(layer_forward)


for each in (GEMMA4, UNIFIED):
    mend(PATCH.part(each.name, each.requirement), each)
PATCH.on_revert(forget)
