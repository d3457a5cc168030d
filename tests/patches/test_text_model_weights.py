"""The text model alone can be loaded from a multimodal checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import gemma4_compat
from tests.support import INPUTS, assert_same, load_model, logits, quantization, split

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*")

RANDOM = "weights were not in the checkpoint"


def load_text(folder, kind=None, device_map=None, **options):
    """Load the text model of a checkpoint, which must contain all its weights."""
    from transformers import Gemma4ForCausalLM

    model, told = Gemma4ForCausalLM.from_pretrained(
        folder,
        quantization_config=quantization(kind, llm_int8_skip_modules=["lm_head"]),
        device_map=device_map or {"": "cpu"},
        dtype=torch.bfloat16,
        output_loading_info=True,
        **options,
    )
    assert not told["missing_keys"], f"{len(told['missing_keys'])} {RANDOM}"
    return model.eval()


def text_logits(model, whole):
    """The logits of the text model for the prompt of the multimodal model."""
    inputs = {"input_ids": INPUTS["text"](whole.config)["input_ids"]}
    with torch.no_grad():
        return {"text": model(**inputs).logits.float()}


def text_weights(model):
    """The text weights of a multimodal model, under the names of the text model."""
    return {
        name.replace("model.language_model.", "model."): value
        for name, value in model.state_dict().items()
        if name.startswith(("model.language_model.", "lm_head."))
    }


def assert_same_weights(found, expected):
    """transformers 5.8 does not initialize weights that a checkpoint lacks; they may be nan."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.regression("text_model_weights", RANDOM)
def test_weights_and_logits_of_the_text_part(model_dir):
    whole = load_model(model_dir)
    text = load_text(model_dir)
    assert_same_weights(text.state_dict(), text_weights(whole))
    assert_same(text_logits(text, whole), logits(whole, ["text"]))


@pytest.mark.regression("text_model_weights", RANDOM)
@pytest.mark.parametrize("kind", ["nf4", "nf4-nested", "int8"])
def test_quantized(model_dir, kind):
    whole = load_model(model_dir, kind)
    text = load_text(model_dir, kind)
    assert_same(text_logits(text, whole), logits(whole, ["text"]))


@pytest.mark.regression("text_model_weights", r"not implemented for 'Byte'")
@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_from_a_quantized_checkpoint(model_dir, tmp_path, kind):
    from transformers import AutoConfig

    whole = load_model(model_dir, kind)
    expected = logits(whole, ["text"])
    load_model(model_dir, kind).save_pretrained(tmp_path)
    both = AutoConfig.from_pretrained(tmp_path)
    config = both.text_config
    config.quantization_config = both.quantization_config
    text = load_text(tmp_path, config=config)
    assert "Linear4bit" in {type(module).__name__ for module in text.modules()}
    assert_same(text_logits(text, whole), expected)


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested", "int8"])
def test_quantized_checkpoint_without_its_config_is_refused(
    model_dir, tmp_path, kind, eight_bit_files
):
    load_model(model_dir, kind).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"(?s)quantized by bitsandbytes.*config\.quantization_config"
    ):
        load_text(tmp_path)


@pytest.mark.regression("text_model_weights", RANDOM)
@pytest.mark.parametrize("kind", [None, "nf4-nested"])
def test_split_after_loading(model_dir, tmp_path, kind):
    whole = load_model(model_dir, kind)
    text = load_text(model_dir, kind)
    device_map = {"model.layers.1": "disk", "model.layers.4": "disk", "": "cpu"}
    text = split(text, tmp_path, device_map)
    assert text.model.layers[1].self_attn.q_proj.weight.is_meta
    assert_same(text_logits(text, whole), logits(whole, ["text"]))


@pytest.mark.regression("text_model_weights", RANDOM)
def test_split_while_loading(model_dir, tmp_path):
    """The weights on disk are read from the checkpoint, under the checkpoint's names."""
    whole = load_model(model_dir)
    device_map = {"model.layers.1": "disk", "model.layers.4": "disk", "": "cpu"}
    text = load_text(model_dir, device_map=device_map, offload_folder=str(tmp_path))
    weights = load_file(model_dir / "model.safetensors")
    q_proj = text.model.layers[1].self_attn.q_proj
    assert q_proj.weight.is_meta
    name = "model.language_model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(q_proj._hf_hook.weights_map["weight"], weights[name])
    assert whole is not text


@pytest.mark.regression("text_model_weights", RANDOM)
@pytest.mark.parametrize("kind", [None, "nf4-nested"])
def test_saved_under_its_own_names(model_dir, tmp_path, kind):
    """The saved model can be loaded without the patch."""
    whole = load_model(model_dir, kind)
    expected = logits(whole, ["text"])
    load_text(model_dir, kind).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert not [name for name in saved if "language_model" in name]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma4_text"
    assert_same(text_logits(load_text(tmp_path), whole), expected)
    with gemma4_compat.disabled("text_model_weights"):
        again = load_text(tmp_path)
    assert_same(text_logits(again, whole), expected)


@pytest.mark.regression("text_model_weights", RANDOM)
def test_saved_twice(model_dir, tmp_path):
    load_text(model_dir).save_pretrained(tmp_path / "1")
    load_text(tmp_path / "1").save_pretrained(tmp_path / "2")
    first, second = (load_file(tmp_path / each / "model.safetensors") for each in "12")
    assert_same_weights(second, first)


@pytest.mark.regression("text_model_weights", RANDOM)
def test_text_model_without_head(model_dir):
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

    text, told = Gemma4TextModel.from_pretrained(
        model_dir, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not told["missing_keys"], f"{len(told['missing_keys'])} {RANDOM}"
    expected = load_model(model_dir).model.language_model.state_dict()
    assert_same_weights(text.state_dict(), expected)


@pytest.mark.regression("text_model_weights", RANDOM)
def test_from_the_multimodal_model_without_head(model_dir, tmp_path):
    """Names in its checkpoint do not begin with "model."; the head is tied to the embeddings."""
    whole = load_model(model_dir)
    whole.model.save_pretrained(tmp_path)
    text = load_text(tmp_path)
    assert_same_weights(text.state_dict(), text_weights(whole))


@pytest.mark.regression("text_model_weights", RANDOM)
def test_shards(model_dir, tmp_path):
    whole = load_model(model_dir)
    whole.save_pretrained(tmp_path, max_shard_size="300KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_same_weights(load_text(tmp_path).state_dict(), text_weights(whole))


def test_both_names_are_refused(model_dir, tmp_path):
    weights = load_file(model_dir / "model.safetensors")
    twice = "model.language_model.norm.weight"
    weights["model.norm.weight"] = weights[twice] + 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(ValueError, match=r"tensors under two names, such as .*model\.norm"):
        load_text(tmp_path)
    assert_same_weights(load_model(tmp_path).state_dict(), load_model(model_dir).state_dict())


def test_the_multimodal_model_is_as_before(model_dir, tmp_path):
    found = load_model(model_dir)
    with gemma4_compat.disabled("text_model_weights"):
        expected = load_model(model_dir)
    assert_same_weights(found.state_dict(), expected.state_dict())
    found.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names <= load_file(model_dir / "model.safetensors").keys()


def test_own_key_mapping_comes_first(model_dir):
    from transformers import Gemma4ForCausalLM

    model, told = Gemma4ForCausalLM.from_pretrained(
        model_dir,
        key_mapping={r"^model\.language_model": "model"},
        output_loading_info=True,
        dtype=torch.bfloat16,
    )
    assert not told["missing_keys"]
    assert_same_weights(model.state_dict(), text_weights(load_model(model_dir)))


def text_model(model_dir):
    """A text model with random weights."""
    from transformers import Gemma4Config, Gemma4ForCausalLM

    config = Gemma4Config.from_pretrained(model_dir).text_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Gemma4ForCausalLM(config).to(torch.bfloat16)


def load_whole(folder, config, **options):
    """The multimodal model of a text model's checkpoint, and the report."""
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, output_loading_info=True, **options
    )


@pytest.mark.regression("text_model_weights", RANDOM)
@pytest.mark.parametrize("shards", ["10GB", "100KB"])
def test_the_multimodal_model_of_a_text_checkpoint(model_dir, tmp_path, shards):
    """The towers are new, and reported as missing."""
    from transformers import Gemma4Config

    expected = text_model(model_dir)
    expected.save_pretrained(tmp_path, max_shard_size=shards)
    model, told = load_whole(tmp_path, Gemma4Config.from_pretrained(model_dir))
    text = [n for n in told["missing_keys"] if "language_model" in n]
    assert not text, f"{len(text)} {RANDOM}"
    assert any("vision_tower" in name for name in told["missing_keys"])
    assert not told["unexpected_keys"]
    assert_same_weights(text_weights(model), expected.state_dict())
    model.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert_same_weights(again.state_dict(), model.state_dict())


@pytest.mark.regression("text_model_weights", "DID NOT RAISE")
def test_a_text_checkpoint_without_a_config_is_refused(model_dir, tmp_path):
    """The multimodal class then has its default sizes."""
    from transformers import Gemma4Config, Gemma4TextConfig

    text_model(model_dir).save_pretrained(tmp_path)
    text = Gemma4TextConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    for config in (Gemma4Config(text_config=text), None):
        with pytest.raises(ValueError, match="Load it with Gemma4ForCausalLM or AutoModelFor"):
            load_whole(tmp_path, config)


def test_a_multimodal_checkpoint_is_as_ever(model_dir):
    _, told = load_whole(model_dir, None)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def test_a_multimodal_model_without_its_head(model_dir, tmp_path):
    """``AutoModel``, its own checkpoint, and a class of a user's without the module ``model``."""

    class Own(transformers.models.gemma4.modeling_gemma4.Gemma4PreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.lm_head = torch.nn.Linear(4, 4)
            self.post_init()

    expected = load_model(model_dir).model.state_dict()
    model = transformers.AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    for found in (model.state_dict(), again.state_dict()):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    Own.from_pretrained(model_dir)
