"""A model with offloaded weights is saved to the same files as the whole model."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from gemma4_compat.model.hooks import offload_hook
from gemma4_compat.tiny import TOWERS
from tests.support import assert_same, load_model, logits, new_model, offloaded, split

KINDS = pytest.mark.parametrize("kind", [None, "nf4", "nf4-nested"], ids=["bf16", "nf4", "nested"])
NO_MAP = r"'SequentialHook' object has no attribute 'weights_map'"
NO_DATA = r"Cannot copy out of meta tensor; no data!"


def spelled_out(model, device="disk"):
    """A device map without an entry for "", which adds one hook to each offloaded module."""
    names = [f"model.{name}" for name, _ in model.model.named_children()]
    return {**{name: device if name in TOWERS else "cpu" for name in names}, "lm_head": "cpu"}


def with_entry_for_all(model):
    return {**dict.fromkeys(TOWERS, "disk"), "": "cpu"}


def decoder_layers(model):
    return {**{f"model.language_model.layers.{i}": "disk" for i in (1, 4)}, "": "cpu"}


MAPS = pytest.mark.parametrize("device_map", [with_entry_for_all, spelled_out, decoder_layers])


def contents(folder):
    from safetensors.torch import load

    files = [load(path.read_bytes()) for path in folder.glob("*.safetensors")]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    assert len(tensors) == sum(map(len, files)), "a tensor was written twice"
    return tensors


def assert_same_files(found, expected):
    found, expected = contents(found), contents(expected)
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    assert not missing, f"{len(missing)} tensors missing in the file: {sorted(missing)[:2]}"
    assert not extra, f"{len(extra)} tensors too many in the file: {sorted(extra)[:2]}"
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), f"{name} differs"


def saved(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


def state(model):
    """The state that saving must not change: devices, hooks, device map and attributes."""
    hooks = {n: m._hf_hook for n, m in model.named_modules() if hasattr(m, "_hf_hook")}
    return offloaded(model), hooks, getattr(model, "hf_device_map", None), vars(model).keys()


@pytest.mark.regression("offloaded_save", NO_MAP)
def test_split_model_saved_and_loaded_again(model_dir, tmp_path):
    model = split(new_model(model_dir), tmp_path / "offload")
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    assert_same(logits(load_model(tmp_path / "saved")), expected)


@KINDS
@MAPS
def test_saved_before_and_after_a_forward(model_dir, kind, device_map, tmp_path):
    whole = new_model(model_dir, kind)
    reference = saved(whole, tmp_path / "reference")
    expected = logits(whole)
    model = new_model(model_dir, kind)
    model = split(model, tmp_path / "offload", device_map(model))
    before = state(model)
    assert_same_files(saved(model, tmp_path / "fresh"), reference)
    assert_same(logits(model), expected)
    assert_same_files(saved(model, tmp_path / "run"), reference)
    assert_same_files(saved(model, tmp_path / "run"), reference)
    assert state(model) == before
    assert_same(logits(model), expected)
    assert_same(logits(load_model(tmp_path / "run")), expected)


def whole_cpu(model, folder):
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def whole_disk(model, folder):
    from accelerate import disk_offload

    return disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def blocks_at_once(model, folder):
    """One hook on a decoder layer loads the weights of all its submodules."""
    from accelerate import cpu_offload

    return cpu_offload(
        model,
        execution_device=torch.device("cpu"),
        preload_module_classes=["Gemma4TextDecoderLayer", "Gemma4ClippableLinear"],
    )


@pytest.mark.regression("offloaded_save", NO_DATA)
@pytest.mark.parametrize("offload", [whole_cpu, whole_disk, blocks_at_once])
def test_offloaded_without_a_device_map(model_dir, offload, tmp_path):
    """The head and the embedding are tied and both on meta; only one of them is saved."""
    reference = saved(new_model(model_dir), tmp_path / "reference")
    model = offload(new_model(model_dir), tmp_path / "offload")
    assert model.lm_head.weight.is_meta
    assert_same_files(saved(model, tmp_path / "saved"), reference)


@pytest.mark.parametrize("offload", [whole_cpu, whole_disk])
def test_quantized_without_a_device_map(model_dir, offload, tmp_path):
    reference = saved(new_model(model_dir, "nf4-nested"), tmp_path / "reference")
    model = offload(new_model(model_dir, "nf4-nested"), tmp_path / "offload")
    assert_same_files(saved(model, tmp_path / "saved"), reference)


def test_an_untied_head_is_kept(model_dir, tmp_path):
    def untied():
        model = new_model(model_dir)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
        return model

    reference = saved(untied(), tmp_path / "reference")
    assert "lm_head.weight" in contents(reference)
    model = whole_cpu(untied(), tmp_path)
    assert_same_files(saved(model, tmp_path / "saved"), reference)


@pytest.mark.regression("offloaded_save", rf"`input_min` is not an nn.Parameter|{NO_MAP}")
def test_offloaded_buffers(model_dir, tmp_path):
    from accelerate import dispatch_model

    reference = saved(new_model(model_dir), tmp_path / "reference")
    model = new_model(model_dir)
    model = dispatch_model(
        model,
        with_entry_for_all(model),
        main_device="cpu",
        offload_dir=str(tmp_path / "offload"),
        offload_buffers=True,
        skip_keys=model._skip_keys_device_placement,
    )
    assert any(buffer.is_meta for buffer in model.buffers())
    assert_same_files(saved(model, tmp_path / "saved"), reference)


@pytest.fixture
def _stable_eight_bit():
    """Skip old releases: moving an 8-bit weight to the CPU quantizes it again."""
    import bitsandbytes
    from packaging.version import Version

    if Version(bitsandbytes.__version__) < Version("0.48"):
        pytest.skip("8-bit weights cannot be dispatched on the CPU")


def eight_bit_layers(model):
    found = [module for module in model.modules() if type(module).__name__ == "Linear8bitLt"]
    return [module for module in found if module.weight.is_meta]


@pytest.mark.usefixtures("_stable_eight_bit", "eight_bit_files")
@pytest.mark.regression(
    "offloaded_save",
    r"no attribute `SCB`|SCB` is neither a parameter",
    behind="hf_initialized_flag",
)
def test_eight_bit(model_dir, tmp_path):
    whole = new_model(model_dir, "int8")
    reference = saved(whole, tmp_path / "reference")
    model = new_model(model_dir, "int8")
    model = split(model, tmp_path / "offload", spelled_out(model))
    assert eight_bit_layers(model)
    assert_same_files(saved(model, tmp_path / "saved"), reference)
    assert_same(logits(load_model(tmp_path / "saved")), logits(whole))


@pytest.mark.usefixtures("_stable_eight_bit")
@pytest.mark.regression(
    "offloaded_save", r"\d+ tensors missing in the file", behind="hf_initialized_flag"
)
def test_eight_bit_after_a_forward(model_dir, tmp_path):
    """accelerate cannot run offloaded 8-bit layers on the CPU, so the test sets their state."""
    reference = saved(new_model(model_dir, "int8"), tmp_path / "reference")
    model = new_model(model_dir, "int8")
    model = split(model, tmp_path / "offload", spelled_out(model))
    for layer in eight_bit_layers(model):
        layer.init_8bit_state()
        hook = offload_hook(layer)
        hook.tied_pointers_to_remove = set()
        hook.post_forward(layer, None)
        assert layer.weight.SCB is None
        assert layer.state.SCB is None
    assert_same_files(saved(model, tmp_path / "saved"), reference)
    assert all(layer.weight.SCB is None for layer in eight_bit_layers(model))


class Watched(Mapping):
    """Wraps the weights of a hook; records how many shards were written at each read."""

    def __init__(self, weights, folder, reads):
        self.weights, self.folder, self.reads = weights, folder, reads

    def __getitem__(self, name):
        self.reads.append(len(list(self.folder.glob("*.safetensors"))))
        return self.weights[name]

    def __iter__(self):
        return iter(self.weights)

    def __len__(self):
        return len(self.weights)


@pytest.mark.parametrize("kind", [None, "nf4-nested"], ids=["bf16", "nested"])
def test_shards_are_read_one_at_a_time(model_dir, kind, tmp_path):
    reference = saved(new_model(model_dir, kind), tmp_path / "reference")
    model = split(new_model(model_dir, kind), tmp_path / "offload")
    folder, reads = tmp_path / "saved", []
    for hook in filter(None, map(offload_hook, model.modules())):
        hook.weights_map = Watched(hook.weights_map, folder, reads)
    model.save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(set(reads)) > len(shards) / 4
    assert len(reads) == len(offloaded(model)), "read more than once"
    assert_same_files(folder, reference)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == contents(reference).keys()
    assert sorted(set(index.values())) == shards
    assert_same(logits(load_model(folder)), logits(load_model(tmp_path / "reference")))


@KINDS
def test_state_dict_given_by_the_user(model_dir, kind, tmp_path):
    reference = saved(new_model(model_dir, kind), tmp_path / "reference")
    model = split(new_model(model_dir, kind), tmp_path / "offload")
    given = model.state_dict()
    before = dict(given)
    model.save_pretrained(tmp_path / "saved", state_dict=given)
    assert_same_files(tmp_path / "saved", reference)
    assert given.keys() == before.keys()


def test_part_of_a_split_model(model_dir, tmp_path):
    whole = new_model(model_dir)
    model = split(new_model(model_dir), tmp_path / "offload")
    for name in ("model", "model.vision_tower"):
        reference = saved(whole.get_submodule(name), tmp_path / f"reference {name}")
        assert_same_files(saved(model.get_submodule(name), tmp_path / f"saved {name}"), reference)


def test_weights_that_were_never_loaded_are_named(model_dir, tmp_path):
    model = split(new_model(model_dir), tmp_path / "offload")
    layer = model.model.language_model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.to("meta"))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight is on the meta"):
        model.save_pretrained(tmp_path / "saved")


def _seeded(function, *args):
    torch.manual_seed(0)
    return function(*args)


@KINDS
def test_with_an_adapter(model_dir, adapter_dir, outer_adapter_dir, kind, tmp_path):
    """The adapter, its base model and the merged model are saved as from the whole model."""
    from peft import PeftModel

    path = outer_adapter_dir if kind == "nf4" else adapter_dir
    whole, model = new_model(model_dir, kind), new_model(model_dir, kind)
    model = split(model, tmp_path / "offload")
    # Tensors that the file lacks are random: see test_ways_to_load in test_peft_redispatch.
    whole, model = (_seeded(PeftModel.from_pretrained, each, path) for each in (whole, model))
    before = offloaded(model)
    assert_same_files(
        saved(model, tmp_path / "adapter"), saved(whole, tmp_path / "reference adapter")
    )
    assert_same_files(
        saved(model.base_model.model, tmp_path / "base"),
        saved(whole.base_model.model, tmp_path / "reference base"),
    )
    assert offloaded(model) == before
    whole, model = whole.merge_and_unload(), model.merge_and_unload()
    assert offloaded(model)
    assert_same_files(saved(model, tmp_path / "merged"), saved(whole, tmp_path / "reference"))
    expected = logits(load_model(tmp_path / "reference"))
    assert_same(logits(load_model(tmp_path / "merged")), expected)
    assert_same(logits(model), expected)


@pytest.mark.usefixtures("native_adapters")
@pytest.mark.parametrize("kind", [None, "nf4-nested"], ids=["bf16", "nested"])
def test_with_an_adapter_of_transformers_own(model_dir, adapter_dir, kind, tmp_path):
    whole, model = new_model(model_dir, kind), new_model(model_dir, kind)
    model = split(model, tmp_path / "offload")
    for each in (whole, model):
        _seeded(each.load_adapter, str(adapter_dir))
    assert_same_files(saved(model, tmp_path / "saved"), saved(whole, tmp_path / "reference"))


def run_on_gpu(model):
    from tests.support import INPUTS

    with torch.no_grad():
        return {
            kind: model(**{k: v.to(0) for k, v in make(model.config).items()}).logits.float().cpu()
            for kind, make in INPUTS.items()
        }


SPLIT = {**dict.fromkeys(TOWERS, "cpu"), "": 0}


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [None, "nf4", "nf4-nested", "int8"])
def test_split_by_the_users_map_on_a_gpu(model_dir, kind, tmp_path):
    """The towers are not quantized, because the map places them on the CPU."""
    options = {"llm_int8_enable_fp32_cpu_offload": True, "llm_int8_skip_modules": None}
    model = load_model(model_dir, kind, SPLIT, **(options if kind else {}))
    assert any(name.startswith("model.vision_tower") for name in offloaded(model))
    expected = run_on_gpu(model)
    before = state(model)
    model.save_pretrained(tmp_path / "saved")
    assert state(model) == before
    assert_same(run_on_gpu(model), expected)
    del model
    assert_same(run_on_gpu(load_model(tmp_path / "saved", None, {"": 0})), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["nf4", "nf4-nested", "int8"])
@pytest.mark.parametrize("device_map", [SPLIT, {**dict.fromkeys(TOWERS, "disk"), "": 0}])
def test_quantized_towers_offloaded_from_a_gpu(model_dir, kind, device_map, tmp_path):
    from accelerate import dispatch_model

    whole = load_model(model_dir, kind, {"": 0})
    reference = saved(whole, tmp_path / "reference")
    model = load_model(model_dir, kind, {"": 0})
    model = dispatch_model(
        model,
        device_map,
        main_device=0,
        offload_dir=str(tmp_path / "offload"),
        skip_keys=model._skip_keys_device_placement,
    )
    assert_same_files(saved(model, tmp_path / "fresh"), reference)
    assert_same(run_on_gpu(model), run_on_gpu(whole))
    assert_same_files(saved(model, tmp_path / "run"), reference)
    assert_same(run_on_gpu(load_model(tmp_path / "run", None, {"": 0})), run_on_gpu(whole))
