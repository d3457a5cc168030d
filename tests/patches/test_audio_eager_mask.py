"""The audio tower computes the same under eager attention as under sdpa, and obeys its mask.

The tower has one implementation of attention.  The setting changes only how the mask is made, so
the outputs are equal bit for bit.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

from gemma4_compat.tiny import audio_inputs
from tests.support import assert_same, logits

DIFFERENT = r"the outputs of eager and sdpa differ by \d"
SDPA = pytest.mark.skipif(
    Version("5.20") <= Version(transformers.__version__),
    reason="the tower has eager attention alone",
)


def load(model_dir, implementation, dtype=torch.float32):
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(
        model_dir,
        dtype=dtype,
        attn_implementation={"": implementation, "audio_config": implementation},
    ).eval()


def sounds(config, padded):
    """Two sounds of 14 soft tokens; with ``padded``, the last third of the second is padding."""
    inputs = audio_inputs(config, batch=2)
    if padded:
        inputs["input_features_mask"][1, 36:] = False
    return inputs["input_features"], inputs["input_features_mask"]


def outputs(model, padded=False):
    with torch.no_grad():
        tower = model.model.audio_tower
        output = tower(*sounds(model.config, padded))
    return output.last_hidden_state[output.attention_mask]


def assert_equal(found, expected):
    worst = ((found - expected).norm() / expected.norm()).item()
    assert worst == 0, f"the outputs of eager and sdpa differ by {worst:.2g}"


@SDPA
@pytest.mark.regression("audio_eager_mask", DIFFERENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_outputs(model_dir, padded, dtype):
    expected = outputs(load(model_dir, "sdpa", dtype), padded)
    assert_equal(outputs(load(model_dir, "eager", dtype), padded), expected)


@SDPA
@pytest.mark.regression("audio_eager_mask", DIFFERENT)
def test_gradients(model_dir):
    def gradient(implementation):
        model = load(model_dir, implementation)
        features, mask = sounds(model.config, padded=True)
        features.requires_grad_()
        output = model.model.audio_tower(features, mask)
        output.last_hidden_state[output.attention_mask].square().sum().backward()
        weights = model.model.audio_tower.layers[0].self_attn.q_proj.linear.weight.grad
        return torch.cat([features.grad.flatten(), weights.flatten()])

    assert_equal(gradient("eager"), gradient("sdpa"))


@SDPA
def test_whole_model(model_dir):
    """Both language models use eager attention, which adds in another order than sdpa."""
    model, reference = (load(model_dir, name, torch.bfloat16) for name in ("eager", "sdpa"))
    reference.set_attn_implementation({"": "eager", "audio_config": "sdpa"})
    assert model.model.audio_tower.config._attn_implementation == "eager"
    assert reference.model.audio_tower.config._attn_implementation == "sdpa"
    assert_same(logits(model), logits(reference))


@pytest.mark.regression("audio_eager_mask", "a position beyond the window tells in the output")
def test_reach(model_dir):
    """The gradients of one layer show that a position attends to its window and nothing else."""
    model = load(model_dir, "eager")
    tower = model.model.audio_tower
    config = tower.config
    heard = {}

    def keep(module, args, kwargs):
        heard["states"] = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        kwargs = {**kwargs, "hidden_states": heard["states"]}
        heard["output"] = plain(module, **kwargs)[0]

    attention = tower.layers[0].self_attn
    plain = type(attention).forward
    attention.register_forward_pre_hook(keep, with_kwargs=True)
    features, mask = sounds(model.config, padded=False)
    tower(features[:1], mask[:1])
    for query in range(14):
        [grad] = torch.autograd.grad(
            heard["output"][0, query].sum(), heard["states"], retain_graph=True
        )
        reached = {key for key in range(14) if grad[0, key].abs().max() > 0}
        past, future = config.attention_context_left - 1, config.attention_context_right
        window = {k for k in range(14) if query - k < past and k - query < max(future, 1)} | {query}
        beyond = reached - window
        assert not beyond, f"a position beyond the window tells in the output: {beyond} of {query}"
        assert reached == window
