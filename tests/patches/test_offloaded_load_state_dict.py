"""``load_state_dict`` loads the weights of offloaded modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemma4_compat.tiny import TOWERS
from tests.patches.test_offloaded_save import blocks_at_once, whole_cpu, whole_disk
from tests.support import assert_same, logits, new_model, offloaded, split

pytestmark = pytest.mark.filterwarnings("ignore:.*which is a no-op.*")
OLD = r"logits differ by up to"
LAYERS = {f"model.language_model.layers.{i}": "cpu" for i in (1, 4)}


def as_split(model, folder):
    return split(model, folder, {**dict.fromkeys(TOWERS, "disk"), **LAYERS, "": "cpu"})


WHOLE = [whole_cpu, whole_disk, blocks_at_once]


def changed(model_dir):
    """A model with other weights."""
    model = new_model(model_dir)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.25 if "norm" in name else 1.5)
    return model


@pytest.mark.regression("offloaded_load_state_dict", OLD)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("offload", [split, as_split])
def test_split_model(model_dir, tmp_path, offload, assign):
    as_the_whole_model(model_dir, tmp_path, offload, assign)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("offload", WHOLE)
def test_offloaded_as_a_whole(model_dir, tmp_path, offload, assign):
    as_the_whole_model(model_dir, tmp_path, offload, assign)


def as_the_whole_model(model_dir, tmp_path, offload, assign):
    other = changed(model_dir)
    expected = logits(other)
    model = offload(new_model(model_dir), tmp_path)
    before = offloaded(model)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    told = model.load_state_dict(state, assign=assign)
    assert not told.missing_keys
    assert not told.unexpected_keys
    after = offloaded(model)
    assert_same(logits(model), expected)
    assert_same(logits(model), expected)
    assert after == before


def test_after_a_forward_and_in_part(model_dir, tmp_path):
    other, whole = changed(model_dir), new_model(model_dir)
    model = split(new_model(model_dir), tmp_path)
    logits(model)
    state = {n: v for n, v in other.state_dict().items() if "vision_tower" in n}
    assert state
    found = model.load_state_dict(state, strict=False)
    expected = whole.load_state_dict(state, strict=False)
    assert found == expected
    assert_same(logits(model), logits(whole))


def test_a_part_of_the_model(model_dir, tmp_path):
    other, whole = changed(model_dir), new_model(model_dir)
    model = split(new_model(model_dir), tmp_path)
    for each in (model, whole):
        each.model.vision_tower.load_state_dict(other.model.vision_tower.state_dict())
    assert_same(logits(model), logits(whole))


def test_through_a_peft_model(model_dir, language_adapter_dir, tmp_path):
    from peft import PeftModel

    whole = PeftModel.from_pretrained(changed(model_dir), language_adapter_dir)
    model = PeftModel.from_pretrained(
        as_split(new_model(model_dir), tmp_path), language_adapter_dir
    )
    model.load_state_dict(whole.state_dict())
    assert_same(logits(model), logits(whole))


def test_what_fits_is_loaded_before_an_error(model_dir, tmp_path):
    """As torch does: it loads the other tensors, and then raises."""
    state = changed(model_dir).state_dict()
    name = next(name for name in state if "vision_tower" in name and name.endswith("proj.weight"))
    state[name] = state[name][:1]
    whole, model = new_model(model_dir), split(new_model(model_dir), tmp_path)
    before = logits(whole)
    for each in (whole, model):
        with pytest.raises(RuntimeError, match="size mismatch"):
            each.load_state_dict(state, strict=False)
    with pytest.raises(AssertionError):
        assert_same(logits(whole), before)
    assert_same(logits(model), logits(whole))


@pytest.mark.parametrize("offload", [whole_cpu, whole_disk])
def test_a_tied_weight_is_given_once(model_dir, tmp_path, offload):
    """As a safetensors file holds it; on the disk each module has a copy."""
    name = "model.language_model.embed_tokens.weight"
    whole = new_model(model_dir)
    assert whole.lm_head.weight is whole.model.language_model.embed_tokens.weight
    model = offload(new_model(model_dir), tmp_path)
    for factor in (1.5, 2.0):
        state = {name: whole.state_dict()[name] * factor}
        for each in (whole, model):
            each.load_state_dict(state, strict=False)
        assert_same(logits(model), logits(whole))


def test_its_own_state_dict(model_dir, tmp_path):
    model = split(new_model(model_dir), tmp_path)
    expected = logits(model)
    model.load_state_dict(model.state_dict())
    assert_same(logits(model), expected)


def test_quantized_layers_are_refused(model_dir, tmp_path):
    whole = new_model(model_dir, "nf4")
    model = split(new_model(model_dir, "nf4"), tmp_path)
    expected = logits(model)
    with pytest.raises(ValueError, match="its layer is quantized and offloaded"):
        model.load_state_dict(whole.state_dict(), strict=False)
    assert_same(logits(model), expected)


def test_a_model_without_hooks_is_as_before():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    state = first.state_dict()
    assert second.load_state_dict(state, assign=True) == ([], [])
    assert second.weight.data_ptr() == first.weight.data_ptr()


class Counted(nn.Linear):
    """Counts how often torch loads it, and halves a buffer that is not offloaded after it."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.loaded, self.seen = 0, []
        self.register_buffer("scale", torch.ones(1))
        self.register_load_state_dict_post_hook(Counted.halve)
        self.register_load_state_dict_pre_hook(Counted.double)

    def _load_from_state_dict(self, *args):
        self.loaded += 1
        super()._load_from_state_dict(*args)

    def halve(self, keys):
        self.scale.div_(2)
        self.seen.append(self.weight.detach().clone())

    def double(self, state_dict, prefix, *args):
        state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]


@pytest.mark.parametrize("assign", [False, True])
def test_code_of_users_runs_once(assign):
    """Overrides and hooks of ``load_state_dict`` find the weights that they would load or read."""
    from accelerate import cpu_offload

    def made():
        torch.manual_seed(0)
        return nn.Sequential(Counted(2, 2), nn.Sequential(Counted(2, 2)))

    state = made().state_dict()
    whole, split = made(), cpu_offload(made(), torch.device("cpu"))
    for model in (whole, split):
        before = vars(model[0]).keys(), *map(list, (model[0]._load_state_dict_post_hooks,))
        model.load_state_dict(state, assign=assign)
        assert (vars(model[0]).keys(), list(model[0]._load_state_dict_post_hooks)) == before
    for one, other in ((whole[0], split[0]), (whole[1][0], split[1][0])):
        assert one.loaded == other.loaded == 1
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(one.seen[0], other.seen[0])
        assert other.weight.is_meta
    assert torch.equal(split(torch.ones(1, 2)), whole(torch.ones(1, 2)))


def test_a_hook_of_a_parent_converts_values():
    from accelerate import cpu_offload

    model = cpu_offload(nn.Sequential(nn.Linear(2, 2, bias=False)), torch.device("cpu"))

    def doubled(module, state_dict, prefix, *args):
        state_dict[f"{prefix}0.weight"] = 2 * state_dict[f"{prefix}0.weight"]

    model.register_load_state_dict_pre_hook(doubled)
    model.load_state_dict({"0.weight": torch.ones(2, 2)})
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 4.0))


def test_values_on_meta_are_not_loaded():
    from accelerate import cpu_offload

    model = cpu_offload(nn.Sequential(nn.Linear(2, 2)), torch.device("cpu"))
    bias = model(torch.zeros(1, 2))
    model.load_state_dict({**model.state_dict(), "0.weight": torch.ones(2, 2)})
    assert torch.equal(model(torch.ones(1, 2)), 2 + bias)


def test_an_error_of_an_override():
    from accelerate import cpu_offload

    class Strict(nn.Linear):
        def _load_from_state_dict(self, *args):
            super()._load_from_state_dict(*args)
            raise ValueError("no")

    model = cpu_offload(nn.Sequential(nn.Linear(2, 2), Strict(2, 2)), torch.device("cpu"))
    before = vars(model[1]).keys()
    with pytest.raises(ValueError, match="no"):
        model.load_state_dict({"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2)}, False)
    assert vars(model[1]).keys() == before
    assert model[1].weight.is_meta
