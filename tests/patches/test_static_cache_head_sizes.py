"""A static cache with ``prefill_chunk_size`` has the head sizes of each layer."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import text_inputs
from tests.support import load_model

ERROR = r"'head_dim' is a per-layer attribute|must have same slice shapes"
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "prefill_chunk_size": 5}


def generated(model, inputs, **options):
    options |= GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    return torch.stack(model.generate(**inputs, **options).logits)


@pytest.mark.regression("static_cache_head_sizes", ERROR)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_static_cache_is_filled_in_chunks(model_dir, batch):
    model = load_model(model_dir).float()
    inputs = text_inputs(model.config, batch=batch)
    expected = generated(model, inputs)
    found = generated(model, inputs, cache_implementation="static")
    torch.testing.assert_close(found, expected)


def test_other_models_allocate_first(llama_dir):
    """In releases that do, and with the memory that they ask for."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama_dir)
    inputs = {"input_ids": torch.arange(12)[None]}
    if hasattr(model, "_get_static_cache_init_shape"):
        assert model._get_static_cache_init_shape() == (2, 16)
    expected = generated(model, inputs)
    found = generated(model, inputs, cache_implementation="static")
    torch.testing.assert_close(found, expected)
