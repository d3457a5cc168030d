"""A step stores its token in a full window without an index tensor from the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_compat.tiny import text_inputs
from tests.support import load_model

WINDOW = 4


class TensorsFromPython(TorchDispatchMode):
    """Counts the tensors that are made from Python numbers."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.lift_fresh.default:
            self.count += 1
        return function(*args, **(kwargs or {}))


def tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 1, count, 8, generator=generator, dtype=torch.bfloat16)


def filled(count):
    from transformers.cache_utils import StaticSlidingWindowLayer

    layer = StaticSlidingWindowLayer(max_cache_len=16, sliding_window=WINDOW)
    layer.update(tokens(count, 0), tokens(count, 1))
    return layer


@pytest.mark.regression("static_cache_full_window", r"2 steps made 2 index tensors")
def test_no_index_from_python():
    layer = filled(WINDOW)
    with TensorsFromPython() as seen:
        for step in range(2):
            layer.update(tokens(1, step), tokens(1, step))
    assert seen.count == 0, f"2 steps made {seen.count} index tensors"


@pytest.mark.parametrize("prompt", [1, WINDOW - 1, WINDOW, WINDOW + 3])
def test_same_keys_and_values(prompt):
    import gemma4_compat

    ours = filled(prompt)
    theirs = copy.deepcopy(ours)
    for step in range(2 * WINDOW):
        # Two of the updates have several tokens; upstream's code stores these.
        count = 2 if step in (1, 6) else 1
        new = tokens(count, 2 * step), tokens(count, 2 * step + 1)
        found = ours.update(*new)
        with gemma4_compat.disabled("static_cache_full_window"):
            expected = theirs.update(*new)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.cumulative_length, theirs.cumulative_length)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


def test_addresses_stay():
    layer = filled(WINDOW)
    keys, values = layer.keys.data_ptr(), layer.values.data_ptr()
    found = layer.update(tokens(1, 5), tokens(1, 6))
    assert (layer.keys.data_ptr(), layer.values.data_ptr()) == (keys, values)
    assert found[0] is layer.keys
    assert found[1] is layer.values


def test_generation(model_dir):
    import gemma4_compat

    model = load_model(model_dir)
    options = {
        "cache_implementation": "static", "max_new_tokens": 24, "min_new_tokens": 24,
        "do_sample": False, "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    found = model.generate(**text_inputs(model.config), **options).logits
    with gemma4_compat.disabled("static_cache_full_window"):
        expected = model.generate(**text_inputs(model.config), **options).logits
    assert torch.equal(torch.stack(found), torch.stack(expected))
