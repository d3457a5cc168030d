"""An adapter for another model says so."""

from __future__ import annotations

import pytest

from tests.support import load_model

peft = pytest.importorskip("peft")


@pytest.fixture
def wide_adapter(model_dir, tmp_path):
    """An adapter whose tensors are twice as wide as those of the model."""
    from safetensors.torch import load_file, save_file

    config = peft.LoraConfig(r=4, target_modules=r".*language_model\.layers\.0\.self_attn\.q_proj")
    model = peft.get_peft_model(load_model(model_dir), config)
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: t.repeat(1, 2) if "lora_A" in n else t for n, t in tensors.items()}, file)
    return tmp_path


@pytest.mark.regression("adapter_error_advice", r"size mismatch for")
def test_an_adapter_for_another_model(model_dir, wide_adapter, caplog):
    model = load_model(model_dir)
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        peft.PeftModel.from_pretrained(model, wide_adapter)
    lines = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    advice = lines[-1] + caplog.text
    assert f"gemma4-compat adapter {wide_adapter} --model MODEL" in advice, str(caught.value)
