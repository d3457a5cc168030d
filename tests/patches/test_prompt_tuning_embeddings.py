"""Virtual tokens have the per-layer embeddings of the pad token."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import image_inputs, text_inputs
from tests.patches.test_prefix_tuning_devices import MAPS, results
from tests.support import load_model, split

peft = pytest.importorskip("peft")

#: If embed_tokens or a tower is offloaded, the search or PEFT itself reads meta tensors.
ERROR = r"do not exactly match the embedding weights|is not on the expected device"
TOKENS = 4
CONFIGS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=TOKENS
    ),
    "P-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=TOKENS, encoder_hidden_size=16
    ),
    "CPT": lambda: peft.CPTConfig(
        task_type="CAUSAL_LM",
        cpt_token_ids=[5, 6, 7, 8],
        cpt_mask=[1, 1, 1, 1],
        cpt_tokens_type_mask=[1, 2, 3, 4],
    ),
}


def with_prompt(base, kind):
    torch.manual_seed(0)
    return peft.get_peft_model(base, CONFIGS[kind]())


@pytest.fixture
def inputs(model_dir):
    inputs = text_inputs(load_model(model_dir).config)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


def by_hand(model, inputs, ids):
    """The logits for the virtual tokens' embeddings and the per-layer embeddings of ``ids``."""
    base = model.get_base_model()
    text = base.model.language_model
    prompt = model.get_prompt(1).to(base.dtype)
    given = torch.cat([prompt, text.embed_tokens(inputs["input_ids"])], dim=1)
    ids = torch.cat([ids[None], inputs["input_ids"]], dim=1)
    per_layer = text.get_per_layer_inputs(ids, None)
    output = text(inputs_embeds=given, per_layer_inputs=per_layer).last_hidden_state
    cap = base.config.text_config.final_logit_softcapping
    found = base.lm_head(output)
    return found if cap is None else torch.tanh(found / cap) * cap


@pytest.mark.regression("prompt_tuning_embeddings", ERROR)
@pytest.mark.parametrize("kind", ["prompt tuning", "P-tuning"])
def test_per_layer_embeddings_of_the_pad_token(model_dir, inputs, kind):
    model = with_prompt(load_model(model_dir), kind).eval()
    pad = model.get_base_model().config.text_config.pad_token_id
    with torch.no_grad():
        expected = by_hand(model, inputs, torch.full((TOKENS,), pad))
    assert torch.equal(logits(model, inputs), expected)


@pytest.mark.regression("prompt_tuning_embeddings", ERROR)
def test_a_prompt_of_pad_tokens(model_dir, inputs):
    """A virtual token with the embedding of the pad token acts as a pad token."""
    model = with_prompt(load_model(model_dir), "prompt tuning").eval()
    base = model.get_base_model()
    pads = torch.full((1, TOKENS), base.config.text_config.pad_token_id)
    with torch.no_grad():
        values = base.get_input_embeddings()(pads)[0]
        model.prompt_encoder["default"].embedding.weight.copy_(values)
    ids = torch.cat([pads, inputs["input_ids"]], dim=1)
    expected = logits(base, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert torch.equal(logits(model, inputs), expected)


@pytest.mark.regression("prompt_tuning_embeddings", ERROR)
def test_cpt_begins_as_its_tokens(model_dir, inputs):
    """Before training, CPT computes the same as its tokens in front of the inputs."""
    model = with_prompt(load_model(model_dir), "CPT").eval()
    ids = torch.cat([torch.tensor([[5, 6, 7, 8]]), inputs["input_ids"]], dim=1)
    base = model.get_base_model()
    expected = logits(base, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert torch.equal(logits(model, inputs), expected)


@pytest.mark.regression("prompt_tuning_embeddings", ERROR)
@pytest.mark.parametrize("offloaded", MAPS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_same_as_on_one_device(model_dir, tmp_path, inputs, kind, offloaded):
    expected = results(with_prompt(load_model(model_dir), kind), inputs)
    assert all(each.abs().sum() > 0 for each in expected)
    model = with_prompt(split(load_model(model_dir), tmp_path, MAPS[offloaded]), kind)
    for one, other in zip(results(model, inputs), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.regression("prompt_tuning_embeddings", ERROR)
def test_images(model_dir):
    """The prompt of pad tokens also works with an image in the inputs."""
    model = with_prompt(load_model(model_dir), "prompt tuning").eval()
    base = model.get_base_model()
    inputs = image_inputs(base.config)
    inputs.pop("mm_token_type_ids", None)
    pads = torch.full((1, TOKENS), base.config.text_config.pad_token_id)
    with torch.no_grad():
        values = base.get_input_embeddings()(pads)[0]
        model.prompt_encoder["default"].embedding.weight.copy_(values)
    ids = torch.cat([pads, inputs["input_ids"]], dim=1)
    expected = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(logits(model, inputs), logits(base, expected))


def test_nothing_is_left_behind(model_dir, inputs):
    """Even after an error, the base model rejects ``inputs_embeds`` that are not of tokens."""
    model = with_prompt(load_model(model_dir), "prompt tuning").eval()
    with pytest.raises(Exception, match=r"."):
        model(input_ids=torch.full((1, 4), 10**6))
    base = model.get_base_model()
    given = model.get_prompt(1).detach().to(base.dtype)
    with pytest.raises(RuntimeError, match="do not exactly match the embedding weights"):
        base(inputs_embeds=given)


def test_other_models(llama_dir):
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(llama_dir)
    ids = torch.arange(3, 15)[None]
    model = with_prompt(base, "prompt tuning").eval()
    given = torch.cat([model.get_prompt(1), base.get_input_embeddings()(ids)], dim=1)
    assert torch.equal(logits(model, {"input_ids": ids}), logits(base, {"inputs_embeds": given}))
