"""With an entry for "" in a device map, modules of other entries are placed and hooked once.

Without a GPU, the main device is the CPU.  The second device is "meta", which computes no values.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager

import pytest
import torch

import gemma4_compat
from gemma4_compat.tiny import TOWERS, text_inputs
from tests.support import assert_same, load_model, logits, offloaded

LAYER = "model.language_model.layers.3"
TABLE = "model.language_model.embed_tokens_per_layer"
MAPS = {
    "towers": {**dict.fromkeys(TOWERS, "disk"), "": "cpu"},
    "two layers": {LAYER: "disk", "model.language_model.layers.1": "disk", "": "cpu"},
    "half a layer": {f"{LAYER}.mlp": "disk", "": "cpu"},
    "entries in entries": {"model.language_model": "cpu", f"{LAYER}.mlp": "disk", TABLE: "disk"},
    "tied, embeddings": {"model.language_model.embed_tokens": "disk", "": "cpu"},
    "tied, head": {"lm_head": "disk", "": "cpu"},
    "no such module": {"model.multi_modal_projector": "cpu", TOWERS[0]: "disk", "": "cpu"},
}
MAPS["entries in entries"] |= {TOWERS[1]: "disk", "": "cpu"}
EACH_MAP = pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
KINDS = pytest.mark.parametrize("kind", [None, "nf4", "nf4-nested"], ids=["bf16", "nf4", "nested"])


def dispatched(model, folder, device_map, main_device="cpu", **options):
    from accelerate import dispatch_model

    options.setdefault("skip_keys", model._skip_keys_device_placement)
    return dispatch_model(
        model, device_map, main_device=main_device, offload_dir=str(folder), **options
    )


@contextmanager
def placements(model):
    """Collect the names of the parameters that are placed on a device other than meta."""
    import accelerate.hooks

    names = {id(module): name for name, module in model.named_modules()}
    placed, original = set(), accelerate.hooks.set_module_tensor_to_device

    def spy(module, name, device, *args, **kwargs):
        if str(device) != "meta":
            placed.add(f"{names[id(module)]}.{name}".lstrip("."))
        return original(module, name, device, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(accelerate.hooks, "set_module_tensor_to_device", spy)
        yield placed


def hooks(model, prefix=""):
    found = {}
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is not None and f"{name}.".startswith(prefix):
            found[name] = getattr(hook, "hooks", (hook,))
    return found


# -- the bug ---------------------------------------------------------------------------------------


@pytest.mark.regression("root_device_map", r"placed on the main device before they are offloaded")
@pytest.mark.parametrize("device_map", [MAPS["towers"], MAPS["half a layer"]])
def test_offloaded_parameters_are_not_placed_first(model_dir, tmp_path, device_map):
    model = load_model(model_dir)
    with placements(model) as placed:
        model = dispatched(model, tmp_path, device_map)
    on_disk = offloaded(model)
    expected = {
        name
        for name, _ in model.named_parameters()
        if any(name.startswith(f"{key}.") for key in device_map if key)
    }
    assert on_disk == expected
    first = sorted(on_disk & placed)
    assert not first, f"{len(first)} parameters placed on the main device before they are offloaded"
    assert placed, "nothing was placed"


@pytest.mark.regression("root_device_map", r"modules of one device have hooks of the other")
def test_a_layer_on_a_second_device(model_dir, tmp_path):
    model = dispatched(load_model(model_dir), tmp_path, {LAYER: "meta", "": "cpu"})
    assert offloaded(model) == {n for n, _ in model.named_parameters() if n.startswith(f"{LAYER}.")}
    inside = {str(h.execution_device) for each in hooks(model, f"{LAYER}.").values() for h in each}
    everywhere = hooks(model)
    outside = {
        str(h.execution_device) for n in everywhere.keys() - hooks(model, f"{LAYER}.").keys()
        for h in everywhere[n]
    }  # fmt: skip
    assert (inside, outside) == ({"meta"}, {"cpu"}), "modules of one device have hooks of the other"


@EACH_MAP
@pytest.mark.regression("root_device_map", r"offloaded modules have two hooks")
def test_one_hook_a_module(model_dir, tmp_path, device_map):
    model = dispatched(load_model(model_dir), tmp_path, device_map)
    twice = [name for name, each in hooks(model).items() if len(each) > 1]
    assert not twice, f"{len(twice)} offloaded modules have two hooks, {twice[:2]}"
    assert hooks(model)[""][0].io_same_device


# -- what must stay as it is -----------------------------------------------------------------------


@EACH_MAP
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_logits(model_dir, tmp_path, device_map, offload_buffers):
    expected = logits(load_model(model_dir))
    model = load_model(model_dir)
    model = dispatched(model, tmp_path, device_map, offload_buffers=offload_buffers)
    assert model.hf_device_map == device_map
    for _ in range(2):
        assert_same(logits(model), expected)
        assert offloaded(model)


@pytest.mark.parametrize("device_map", [MAPS["towers"], MAPS["entries in entries"]])
@KINDS
def test_quantized_with_adapter_and_generate(
    model_dir, adapter_dir, tmp_path, kind, device_map, pristine
):
    from peft import PeftModel

    needed = "quant_state_offload", "peft_redispatch", "clippable_linear"
    if any(gemma4_compat.status()[name].state.value != "applied" for name in needed):
        pytest.skip("needs the patches for 4-bit offloading and adapters")
    one = load_model(model_dir, kind)
    model = dispatched(load_model(model_dir, kind), tmp_path, device_map)
    assert_same(logits(model), logits(one))
    one = PeftModel.from_pretrained(one, adapter_dir).eval()
    model = PeftModel.from_pretrained(model, adapter_dir).eval()
    for _ in range(2):
        assert_same(logits(model), logits(one))
    prompt = text_inputs(one.config)
    tokens = [m.generate(**prompt, max_new_tokens=4, do_sample=False) for m in (one, model)]
    assert torch.equal(*tokens)


@EACH_MAP
def test_same_placement_as_without_the_patch(model_dir, tmp_path, device_map, pristine):
    """The devices of tensors, the number of shared tensors and the execution devices are equal."""

    def placement(model):
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        pointers = [tensor.data_ptr() for _, tensor in tensors if not tensor.is_meta]
        where = {name: str(tensor.device) for name, tensor in tensors}
        runs = {n: {str(h.execution_device) for h in each} for n, each in hooks(model).items()}
        return where, len(pointers) - len(set(pointers)), runs

    *found, found_hooks = placement(
        dispatched(load_model(model_dir), tmp_path / "with", device_map)
    )
    with gemma4_compat.disabled("root_device_map"):
        model = dispatched(load_model(model_dir), tmp_path / "without", device_map)
    *expected, expected_hooks = placement(model)
    assert found == expected
    assert expected_hooks.items() <= found_hooks.items()


def test_save(model_dir, tmp_path):
    model = dispatched(load_model(model_dir), tmp_path / "offload", MAPS["half a layer"])
    model.save_pretrained(tmp_path / "saved")
    assert_same(logits(load_model(tmp_path / "saved")), logits(load_model(model_dir)))


def test_tensors_of_a_container_are_placed(model_dir, tmp_path):
    """A decoder layer has a buffer of its own; the map has an entry for some of its modules."""
    model = load_model(model_dir)
    with placements(model) as placed:
        dispatched(model, tmp_path, MAPS["half a layer"])
    assert f"{LAYER}.layer_scalar" in placed


def test_hooks_come_off_again(model_dir, tmp_path):
    from accelerate.hooks import remove_hook_from_submodules

    expected = logits(load_model(model_dir))
    model = dispatched(load_model(model_dir), tmp_path, MAPS["half a layer"])
    remove_hook_from_submodules(model)
    assert not hooks(model)
    assert not offloaded(model)
    assert_same(logits(model), expected)


def test_modules_loaded_as_a_whole(model_dir, tmp_path):
    model = load_model(model_dir)
    expected = logits(model)
    model = dispatched(
        model, tmp_path, MAPS["two layers"], preload_module_classes=["Gemma4TextDecoderLayer"]
    )
    assert hooks(model)[LAYER][-1].place_submodules
    for _ in range(2):
        assert_same(logits(model), expected)


def test_maps_without_such_entries_pass_as_they_are(model_dir, tmp_path):
    spelled_out = {
        f"model.{name}": "cpu" for name, _ in load_model(model_dir).model.named_children()
    }
    spelled_out |= {"lm_head": "cpu", TOWERS[0]: "disk"}
    for device_map in (spelled_out, {"": "cpu"}):
        found = []
        for active in (True, False):
            model = load_model(model_dir)
            with (
                gemma4_compat.disabled(*([] if active else ["root_device_map"])),
                placements(model) as placed,
            ):
                dispatched(model, tmp_path / str(active), device_map, force_hooks=True)
            found.append((placed, {n: [repr(h) for h in each] for n, each in hooks(model).items()}))
        assert found[0] == found[1]


# -- on a GPU --------------------------------------------------------------------------------------

VOCABULARY = 2**16


@pytest.fixture(scope="module")
def large_table_dir(tmp_path_factory):
    """A checkpoint with a per-layer-embedding table of 96 MB; the rest takes a few MB."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=512,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=128,
        hidden_size_per_layer_input=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=128,
    )
    path = tmp_path_factory.mktemp("large")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Gemma4ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def peak(load):
    """The model, and the bytes that ``load`` adds on GPU 0: afterwards and at the peak."""
    gc.collect()
    torch.cuda.synchronize(0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    model = load()
    torch.cuda.synchronize(0)
    resident = torch.cuda.memory_allocated(0) - before
    return model, resident, torch.cuda.max_memory_allocated(0) - before


@pytest.mark.cuda
@pytest.mark.parametrize("way", ["from_pretrained", "dispatch_model"])
@pytest.mark.regression("root_device_map", r"MiB at the peak for")
def test_peak_memory(large_table_dir, tmp_path, way):
    from transformers import Gemma4ForCausalLM

    device_map = {"model.embed_tokens_per_layer": "cpu", "": 0}
    torch.zeros(1, device=0)  # create the CUDA context and its workspaces
    if way == "from_pretrained":
        model, resident, most = peak(
            lambda: Gemma4ForCausalLM.from_pretrained(
                large_table_dir, dtype=torch.bfloat16, device_map=device_map
            )
        )
    else:
        model = Gemma4ForCausalLM.from_pretrained(large_table_dir, dtype=torch.bfloat16)
        model, resident, most = peak(lambda: dispatched(model, tmp_path, device_map, 0))
    on_gpu = [p for p in model.parameters() if p.is_cuda]
    largest = max(p.numel() * p.element_size() for p in on_gpu)
    assert 0 < resident < 32 * 2**20
    assert most <= 1.05 * resident + largest + 2**20, (
        f"{most / 2**20:.0f} MiB at the peak for {resident / 2**20:.0f} MiB"
    )


@pytest.mark.cuda(gpus=2)
@pytest.mark.parametrize("where", [1, "cpu"])
@pytest.mark.regression("root_device_map", r"found at least two devices|same device")
def test_two_gpus(model_dir, tmp_path, where):
    device_map = {LAYER: 1, TOWERS[0]: "cpu", f"{LAYER[:-1]}1.mlp": where, "": 0}
    expected = logits(load_model(model_dir, device_map={"": 0}))
    model = dispatched(load_model(model_dir), tmp_path, device_map, 0)
    assert {p.device.index for n, p in model.named_parameters() if n.startswith(LAYER)} == {1}
    for _ in range(2):
        assert_same(logits(model), expected)


def test_the_patch_is_where_dispatch_model_looks(pristine):
    import accelerate

    status = gemma4_compat.status()["root_device_map"].state.value
    function = sys.modules["accelerate.big_modeling"].attach_align_device_hook_on_blocks
    assert function is accelerate.hooks.attach_align_device_hook_on_blocks
    assert hasattr(function, "__wrapped__") is (status == "applied")


@pytest.mark.regression("root_device_map", r"we need a `value` to put in on cpu")
@pytest.mark.parametrize("name", ["towers", "two layers", "half a layer", "no such module"])
def test_loaded_from_a_checkpoint(model_dir, tmp_path, name):
    """from_pretrained does not load the weights for the disk, so they cannot be placed first."""
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(
        model_dir, device_map=MAPS[name], dtype=torch.bfloat16, offload_folder=tmp_path
    )
    assert offloaded(model)
    assert_same(logits(model), logits(load_model(model_dir)))
