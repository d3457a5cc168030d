"""Attention to images is bidirectional only in sliding layers, and only within the window.

The reference is Gemma 4's rule, evaluated token by token.  A layer with full attention is causal.
In a sliding layer, a token attends to earlier tokens and to its own image, but not to tokens before
its window.  The masks are compared exactly.  The logits are compared with those of a model that
gets the masks of the rule.
"""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import image_inputs
from tests.large_model import SLIDING_WINDOW, large_model

IMAGE_TOKENS = 12
DIFFERENT = r"the masks differ|logits differ by up to \d"


def rule(types, padding, query, key, window=None):
    """Whether one token attends to another; a sliding layer has a ``window``."""
    if not padding[key] or (window is not None and key <= query - window):
        return False
    if key <= query:
        return True
    return window is not None and all(t in (1, 2) for t in types[query : key + 1])


def rule_masks(types, padding):
    """The masks of the rule for each kind of layer: bool, [batch, 1, length, length]."""
    length = types.shape[1]
    found = {}
    for name, window in (("full_attention", None), ("sliding_attention", SLIDING_WINDOW)):
        found[name] = torch.tensor([
            [[[rule(t, p, q, k, window) for k in range(length)] for q in range(length)]]
            for t, p in zip(types.tolist(), padding.tolist(), strict=True)
        ])  # fmt: skip
    return found


def token_types(config, lengths=(IMAGE_TOKENS, 3)):
    """One row has text, an image longer than the window, text, a short image and text.

    The other row is its reverse."""
    long, short = lengths
    row = [0] * 3 + [1] * long + [0] * 2 + [2] * short + [0] * 4
    return torch.tensor([row, row[::-1]])


def embedded(model, types):
    """Random embeddings: only the positions of the images matter in these tests."""
    generator = torch.Generator().manual_seed(3)
    size = model.config.text_config.hidden_size
    return torch.randn((*types.shape, size), generator=generator)


def made(model, padding=None, types=None, implementation="sdpa"):
    """The masks that the language model gets, and its logits."""
    types = token_types(model.config) if types is None else types
    padding = torch.ones_like(types) if padding is None else padding
    model.set_attn_implementation({"": implementation, "audio_config": "eager"})
    kept = {}
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: kept.update(kwargs["attention_mask"]), with_kwargs=True
    )
    try:
        output = model(
            inputs_embeds=embedded(model, types),
            attention_mask=padding,
            mm_token_type_ids=types,
            use_cache=False,
        )
    finally:
        hook.remove()
    return kept, output.logits


def as_bool(mask, length):
    """Convert a mask: ``None`` is causal for sdpa; in eager attention's mask, 0 means allowed."""
    if mask is None:
        return torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    return mask == 0 if mask.is_floating_point() else mask


def assert_masks(found, expected, padding):
    for name in ("full_attention", "sliding_attention"):
        mask = as_bool(found[name], padding.shape[1]).expand_as(expected[name])
        real = padding.bool()[:, None, :, None]  # rows of padding are not compared
        wrong = ((mask != expected[name]) & real).sum().item()
        assert wrong == 0, f"the masks differ: {wrong} of {mask.numel()} places in {name}"


def paddings(types):
    left, right = torch.ones_like(types), torch.ones_like(types)
    left[0, :2] = 0
    right[1, -2:] = 0
    return {"none": torch.ones_like(types), "left": left, "right": right}


@pytest.fixture(scope="module")
def model(model_dir):
    return large_model(model_dir)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.regression("image_block_mask", DIFFERENT)
def test_masks(model, padding, implementation):
    types = token_types(model.config)
    mask = paddings(types)[padding]
    with torch.no_grad():
        found, _ = made(model, mask, implementation=implementation)
    assert_masks(found, rule_masks(types, mask), mask)


@pytest.mark.regression("image_block_mask", DIFFERENT)
def test_unified():
    """Gemma 4 unified has the same rule and its own copy of the function."""
    pytest.importorskip("transformers.models.gemma4_unified")
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    text = {
        "use_bidirectional_attention": "vision",
        "sliding_window": SLIDING_WINDOW,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = Gemma4UnifiedConfig(text_config=text)
    config.text_config._attn_implementation = "sdpa"
    types = token_types(config)
    found = Gemma4UnifiedForConditionalGeneration.create_masks_for_generate(
        config=config,
        inputs_embeds=torch.empty((*types.shape, 0)),
        attention_mask=torch.ones_like(types),
        past_key_values=None,
        position_ids=None,
        mm_token_type_ids=types,
    )
    assert_masks(found, rule_masks(types, torch.ones_like(types)), torch.ones_like(types))


def logits_and_gradients(model, masks=None):
    """Logits and gradients in training mode, with the model's own masks or with ``masks``."""
    types = token_types(model.config)
    embeds = embedded(model, types).requires_grad_()
    masks = torch.ones_like(types) if masks is None else masks
    model.train()
    try:
        output = model(
            inputs_embeds=embeds, mm_token_type_ids=types, use_cache=False, attention_mask=masks
        )
    finally:
        model.eval()
    output.logits.float().square().sum().backward()
    grad = model.model.language_model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    return output.logits.detach(), embeds.grad, grad


@pytest.mark.regression("image_block_mask", DIFFERENT)
def test_logits_and_gradients(model):
    """If a causal mask is ``None``, sdpa may choose another kernel: hence the tolerance."""
    model.set_attn_implementation({"": "sdpa", "audio_config": "eager"})
    types = token_types(model.config)
    expected = logits_and_gradients(model, rule_masks(types, torch.ones_like(types)))
    found = logits_and_gradients(model)
    for mine, reference in zip(found, expected, strict=True):
        worst = ((mine - reference).abs().max() / reference.abs().max()).item()
        assert worst < 1e-4, f"logits differ by up to {worst:.3g}"


def test_generate(model_dir):
    """Generating with a cache gives the logits of a forward without a cache, by the rule."""
    model = large_model(model_dir)
    inputs = image_inputs(model.config)
    output = model.generate(
        **inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    ids = output.sequences[:, :-1]
    types = torch.zeros_like(ids)
    types[:, : inputs["mm_token_type_ids"].shape[1]] = inputs["mm_token_type_ids"]
    masks = rule_masks(types, torch.ones_like(types))
    pictures = {name: inputs[name] for name in ("pixel_values", "image_position_ids")}
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=masks, mm_token_type_ids=types, **pictures)
    expected = whole.logits[:, -6:]
    worst = (torch.stack(output.logits, 1) - expected).abs().max().item()
    assert worst < 1e-3, f"logits differ by up to {worst:.3g}"


def test_text_is_as_ever(model):
    """Without an image the mask is causal, and may be ``None`` for sdpa: hence the tolerance."""
    import gemma4_compat

    types = torch.zeros_like(token_types(model.config))
    with torch.no_grad():
        _, found = made(model, types=types)
        with gemma4_compat.disabled("image_block_mask"):
            _, expected = made(model, types=types)
    assert (found - expected).abs().max() < 1e-4


def test_small_models_are_as_ever(model_dir):
    import gemma4_compat

    model = large_model(model_dir, use_bidirectional_attention=None)
    with torch.no_grad():
        _, found = made(model)
        with gemma4_compat.disabled("image_block_mask"):
            _, expected = made(model)
    assert torch.equal(found, expected)


def test_gemma_3_is_as_ever():
    """In Gemma 3, attention to images is bidirectional in all layers."""
    from transformers import Gemma3TextConfig
    from transformers.masking_utils import create_masks_for_generate

    import gemma4_compat

    config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=8, vocab_size=32)
    config._attn_implementation = "sdpa"
    types = token_types(config)

    def masks():
        from inspect import signature

        blocks = {}
        if "block_sequence_ids" in signature(create_masks_for_generate).parameters:
            blocks["block_sequence_ids"] = torch.where(types > 0, types, -1)
        return create_masks_for_generate(
            config=config,
            inputs_embeds=torch.empty((*types.shape, 0)),
            attention_mask=None,
            past_key_values=None,
            position_ids=None,
            **blocks,
        )

    found = masks()
    with gemma4_compat.disabled("image_block_mask"):
        expected = masks()
    assert found.keys() == expected.keys()
    for name, mask in expected.items():
        assert found[name] is mask is None or torch.equal(found[name], mask)
