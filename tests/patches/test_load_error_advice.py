"""A load that fails says what to do."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma4ForConditionalGeneration, LlamaForCausalLM

ON_THE_GPU = {"device_map": {"": 0}}


def failed(load, expected=RuntimeError):
    """The text of a traceback's last lines."""
    with pytest.raises(expected) as caught:
        load()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is that of a machine without GPU")
@pytest.mark.regression(
    "load_error_advice", r"Cannot access accelerator device when none is available"
)
def test_no_gpu(model_dir, caplog):
    text = failed(lambda: Gemma4ForConditionalGeneration.from_pretrained(model_dir, **ON_THE_GPU))
    assert "pip install torch --index-url" in text + caplog.text, text


def test_another_model_gets_no_advice(llama_dir, caplog):
    if torch.cuda.is_available():
        pytest.skip("the load succeeds")
    text = failed(lambda: LlamaForCausalLM.from_pretrained(llama_dir, **ON_THE_GPU))
    assert "gemma4-compat" not in text + caplog.text


def test_out_of_memory(model_dir, monkeypatch, caplog):
    """A full GPU raises this error from any allocation."""

    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    loading = "transformers.modeling_utils.convert_and_load_state_dict_in_model"
    monkeypatch.setattr(loading, no_room)
    text = failed(lambda: Gemma4ForConditionalGeneration.from_pretrained(model_dir))
    assert "gemma4-compat plan" in text + caplog.text


def test_other_errors_get_no_advice(tmp_path, caplog):
    text = failed(lambda: Gemma4ForConditionalGeneration.from_pretrained(tmp_path), OSError)
    assert "gemma4-compat" not in text + caplog.text
