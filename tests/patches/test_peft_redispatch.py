"""An adapter on a split base model does not move the weights of the base model."""

from __future__ import annotations

import logging

import pytest
import torch

from gemma4_compat.tiny import BROAD_TARGETS, TOWERS, text_inputs
from tests.support import adapter_parameters, assert_same, logits, new_model, offloaded, split

SPLIT_TOWERS = dict.fromkeys(TOWERS, "disk")
KINDS = pytest.mark.parametrize("kind", [None, "nf4", "nf4-nested"], ids=["bf16", "nf4", "nested"])


def base_of(model):
    return model.base_model.model if hasattr(model, "peft_config") else model


def fingerprint(model, folder):
    """The devices of the base model's tensors, its hooks, its offload files and its device map."""
    base = base_of(model)
    tensors = {}
    for name, parameter in base.named_parameters():
        if "lora_" not in name:
            # A forward replaces parameters on meta, and may repack data in place on the CPU.
            identity = None if parameter.is_meta else id(parameter)
            tensors[name.replace(".base_layer.", ".")] = (parameter.device, identity)
    hooks = {
        name.replace(".base_layer", ""): id(module._hf_hook)
        for name, module in base.named_modules()
        if hasattr(module, "_hf_hook")
    }
    files = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    return tensors, hooks, files, dict(base.hf_device_map)


def astray(model):
    """The adapter tensors that are not on the execution device of their layer."""
    return {n for n, p in adapter_parameters(base_of(model)).items() if p.device.type != "cpu"}


def assert_untouched(model, before, folder):
    tensors, hooks, files, device_map = fingerprint(model, folder)
    moved = [name for name in before[0] if before[0][name] != tensors.get(name)]
    assert not moved, f"offload was undone or the base moved: {len(moved)} tensors, {moved[:2]}"
    assert hooks == before[1], "hooks were removed, replaced or added"
    assert files == before[2], "offloaded weights were written anew"
    assert device_map == before[3]
    assert not astray(model), "adapter tensors off their execution device"


@pytest.mark.regression("peft_redispatch", r"offload was undone")
def test_offload_survives_an_adapter(model_dir, language_adapter_dir, tmp_path):
    from peft import PeftModel

    model = split(new_model(model_dir), tmp_path)
    before = fingerprint(model, tmp_path)
    model = PeftModel.from_pretrained(model, language_adapter_dir)
    assert_untouched(model, before, tmp_path)


@pytest.mark.regression(
    "peft_redispatch", r"KeyError: (1|'sliding_attention')$|offload was undone|meta tensor"
)
def test_device_map_given_to_peft(model_dir, language_adapter_dir, tmp_path):
    """Users see ``KeyError: 22`` here: PEFT calls dispatch_model without skip_keys."""
    from peft import PeftModel

    expected = logits(PeftModel.from_pretrained(new_model(model_dir), language_adapter_dir))
    model = split(new_model(model_dir), tmp_path)
    before = fingerprint(model, tmp_path)
    device_map = {**dict.fromkeys(TOWERS, "disk"), "": "cpu"}
    model = PeftModel.from_pretrained(
        model, language_adapter_dir, device_map=device_map, offload_dir=str(tmp_path / "again")
    )
    assert_same(logits(model), expected)
    assert_untouched(model, before, tmp_path)


@KINDS
def test_split_model_gives_one_device_logits(
    model_dir, adapter_dir, second_adapter_dir, kind, tmp_path
):
    from peft import PeftModel

    one = PeftModel.from_pretrained(new_model(model_dir, kind), adapter_dir)
    one.load_adapter(second_adapter_dir, "second")
    expected = {}
    for name in ("default", "second"):
        one.set_adapter(name)
        expected[name] = logits(one)
    with one.disable_adapter():
        expected["base"] = logits(one)
    assert not torch.equal(expected["default"]["image"], expected["second"]["image"])

    model = split(new_model(model_dir, kind), tmp_path)
    before = fingerprint(model, tmp_path)
    model = PeftModel.from_pretrained(model, adapter_dir)
    assert_untouched(model, before, tmp_path)
    for _ in range(2):
        assert_same(logits(model), expected["default"])
    model.load_adapter(second_adapter_dir, "second")
    assert_untouched(model, before, tmp_path)
    model.set_adapter("second")
    assert_same(logits(model), expected["second"])
    model.delete_adapter("second")
    model.set_adapter("default")
    assert_same(logits(model), expected["default"])
    with model.disable_adapter():
        assert_same(logits(model), expected["base"])
    assert_same(logits(model.unload()), expected["base"])


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("is_trainable", [False, True])
def test_ways_to_load(model_dir, adapter_dir, low_cpu_mem_usage, is_trainable, tmp_path):
    from peft import PeftModel

    options = {"low_cpu_mem_usage": low_cpu_mem_usage, "is_trainable": is_trainable}
    one = PeftModel.from_pretrained(new_model(model_dir), adapter_dir, **options).eval()
    model = split(new_model(model_dir), tmp_path)
    before = fingerprint(model, tmp_path)
    model = PeftModel.from_pretrained(model, adapter_dir, **options).eval()
    assert_untouched(model, before, tmp_path)
    assert_same(logits(model), logits(one))


def test_adapter_saved_from_a_split_model_loads_again(model_dir, adapter_dir, tmp_path):
    from peft import PeftModel

    model = PeftModel.from_pretrained(split(new_model(model_dir), tmp_path), adapter_dir)
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    again = PeftModel.from_pretrained(new_model(model_dir), tmp_path / "saved")
    assert_same(logits(again), expected)


def gradients(model, steps=2):
    """Run training steps; return the losses and the gradients of the last step."""
    batch = text_inputs(base_of(model).config)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@KINDS
def test_training_on_a_split_model(model_dir, kind, tmp_path):
    """Decoder layers are on disk, so that the autograd graph contains offloaded layers."""
    from peft import LoraConfig, get_peft_model

    def adapted(model):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=BROAD_TARGETS, init_lora_weights=False)
        return get_peft_model(model, config).train()

    expected_losses, expected = gradients(adapted(new_model(model_dir, kind)))
    device_map = {f"model.language_model.layers.{i}": "disk" for i in (1, 4)}
    model = split(new_model(model_dir, kind), tmp_path, {**device_map, "": "cpu"})
    before = fingerprint(model, tmp_path)
    model = adapted(model)
    assert_untouched(model, before, tmp_path)
    losses, found = gradients(model)
    assert losses == expected_losses
    language = {name for name in adapter_parameters(model) if "language_model" in name}
    used = {name for name in expected if "language_model" in name}
    assert used <= language
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    assert_untouched(model, before, tmp_path)


@KINDS
def test_merging_into_a_split_model(model_dir, adapter_dir, kind, tmp_path):
    from peft import PeftModel

    one = PeftModel.from_pretrained(new_model(model_dir, kind), adapter_dir).merge_and_unload()
    model = split(new_model(model_dir, kind), tmp_path)
    model = PeftModel.from_pretrained(model, adapter_dir).merge_and_unload()
    assert offloaded(model)
    for _ in range(2):
        assert_same(logits(model), logits(one))


def tuner_configs():
    """Adapters that read the base weight when they are created, when they run, or never."""
    from peft import (
        AdaLoraConfig,
        BOFTConfig,
        HRAConfig,
        IA3Config,
        LoraConfig,
        OFTConfig,
        VeraConfig,
    )

    targets = {"target_modules": ["q_proj", "down_proj"]}
    return {
        "lora": LoraConfig(init_lora_weights=False, **targets),
        "dora": LoraConfig(use_dora=True, init_lora_weights=False, **targets),
        "pissa": LoraConfig(init_lora_weights="pissa", **targets),
        "adalora": AdaLoraConfig(total_step=10, init_lora_weights=False, **targets),
        "ia3": IA3Config(feedforward_modules=["down_proj"], init_ia3_weights=False, **targets),
        "oft": OFTConfig(oft_block_size=32, r=0, init_weights=False, **targets),
        "boft": BOFTConfig(boft_block_size=32, init_weights=False, **targets),
        "hra": HRAConfig(init_weights=False, **targets),
        "vera": VeraConfig(init_weights=False, **targets),
    }


@pytest.mark.parametrize("name", list(tuner_configs()))
def test_every_kind_of_adapter_on_offloaded_layers(model_dir, name, tmp_path):
    from peft import get_peft_model

    def adapted(model):
        torch.manual_seed(0)
        return get_peft_model(model, tuner_configs()[name]).eval()

    one = adapted(new_model(model_dir))
    layers = {f"model.language_model.layers.{i}": "disk" for i in (1, 4)}
    model = split(new_model(model_dir), tmp_path, {**layers, **SPLIT_TOWERS, "": "cpu"})
    before = fingerprint(model, tmp_path)
    # PiSSA writes its residual to the base weight, by design.
    model = adapted(model)
    if name != "pissa":
        assert_untouched(model, before, tmp_path)
    for _ in range(2):
        assert_same(logits(model), logits(one))
    assert offloaded(model)


def test_dora_on_a_quantized_split_model(model_dir, tmp_path):
    from peft import LoraConfig, get_peft_model

    def adapted(model):
        torch.manual_seed(0)
        config = LoraConfig(target_modules=["v_proj"], use_dora=True, init_lora_weights=False)
        return get_peft_model(model, config).eval()

    one = adapted(new_model(model_dir, "nf4-nested"))
    layers = {"model.language_model.layers.1": "disk", "": "cpu"}
    model = adapted(split(new_model(model_dir, "nf4-nested"), tmp_path, layers))
    assert_same(logits(model), logits(one))
    assert_same(logits(model), logits(one))


def test_layers_are_offloaded_again_after_an_exception(model_dir, language_adapter_dir, tmp_path):
    from peft import PeftModel

    model = split(
        new_model(model_dir), tmp_path, {"model.language_model.layers.1": "disk", "": "cpu"}
    )
    model = PeftModel.from_pretrained(model, language_adapter_dir)
    before = offloaded(model)
    layer = model.base_model.model.model.language_model.layers[1].mlp.down_proj
    with pytest.raises(RuntimeError):
        layer(torch.zeros(1, 3, dtype=torch.bfloat16))
    logits(model, ("text",))
    assert offloaded(model) == before


LAYER = "model.language_model.layers.1"
PROJECTION = f"{LAYER}.mlp.down_proj"


@pytest.mark.parametrize("kind", [None, "nf4-nested"], ids=["bf16", "nested"])
@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_hooks_that_are_removed_or_replaced_load_nothing(
    model_dir, language_adapter_dir, kind, replaced, tmp_path
):
    """Changes of the weights after the hooks are removed take effect."""
    from accelerate.hooks import remove_hook_from_submodules
    from peft import PeftModel

    def edited(model):
        layer = base_of(model).get_submodule(PROJECTION).get_base_layer()
        if kind is None:
            with torch.no_grad():
                layer.weight.mul_(0.5)
        else:
            layer.weight.quant_state.offset.mul_(0.5)
        return model

    one = edited(PeftModel.from_pretrained(new_model(model_dir, kind), language_adapter_dir))
    model = split(new_model(model_dir, kind), tmp_path, {LAYER: "disk", "": "cpu"})
    model = PeftModel.from_pretrained(model, language_adapter_dir)
    logits(model, ("text",))
    remove_hook_from_submodules(base_of(model))
    edited(model)
    if replaced:
        (tmp_path / "again").mkdir()
        split(base_of(model), tmp_path / "again", {LAYER: "disk", "": "cpu"})
    for _ in range(2):
        assert_same(logits(model, ("text",)), logits(one, ("text",)))
    if not replaced:
        assert not offloaded(model)
        model = model.merge_and_unload()
        assert_same(logits(model, ("text",)), logits(one.merge_and_unload(), ("text",)))


@KINDS
def test_merged_adapter_is_disabled_and_enabled_again(
    model_dir, language_adapter_dir, kind, tmp_path
):
    """If adapters are disabled, the forward of a merged layer unmerges them."""
    from peft import PeftModel

    def outputs(model):
        model = PeftModel.from_pretrained(model, language_adapter_dir)
        model.merge_adapter()
        yield logits(model, ("text",))
        with model.disable_adapter():
            yield logits(model, ("text",))
        yield logits(model, ("text",))

    model = split(new_model(model_dir, kind), tmp_path, {LAYER: "disk", "": "cpu"})
    for found, expected in zip(outputs(model), outputs(new_model(model_dir, kind)), strict=True):
        assert_same(found, expected)


def ours(caplog):
    return [record for record in caplog.records if record.name.startswith("gemma4_compat")]


def test_another_adapter_is_set_while_one_is_merged(model_dir, tmp_path):
    """PEFT unmerges the first one, from the offloaded weights as well."""
    from peft import LoraConfig, get_peft_model

    def switched(base):
        config = LoraConfig(r=4, target_modules=r".*language_model.*\.(q|o|up)_proj")
        model = get_peft_model(base, config, adapter_name="a")
        model.add_adapter("b", config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in adapter_parameters(model).values():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.set_adapter("b")
        model.merge_adapter()
        yield logits(model)
        with pytest.warns(UserWarning, match="Unmerging the model first"):
            model.set_adapter("a")
        yield logits(model)

    layers = {f"model.language_model.layers.{number}": "disk" for number in (1, 3)}
    model = split(new_model(model_dir), tmp_path, {**layers, "": "cpu"})
    for found, expected in zip(switched(model), switched(new_model(model_dir)), strict=True):
        assert_same(found, expected)
    assert offloaded(model)


def test_ignored_arguments_are_said_once_and_nothing_else_is(
    model_dir, language_adapter_dir, tmp_path, caplog
):
    from peft import PeftModel

    model = split(new_model(model_dir), tmp_path)
    with caplog.at_level(logging.WARNING, logger="gemma4_compat"):
        model = PeftModel.from_pretrained(model, language_adapter_dir)
        assert not ours(caplog)
        model.load_adapter(
            language_adapter_dir, "second", max_memory={"cpu": "1GiB"}, offload_folder="here"
        )
    (record,) = ours(caplog)
    assert "PEFT's load_adapter ignores max_memory, offload_folder" in record.message
    assert "base model's from_pretrained" in record.message


@pytest.mark.parametrize("spelling", ["offload_dir", "offload_folder"])
def test_base_without_a_device_map_stays_where_it_is(
    model_dir, language_adapter_dir, tmp_path, caplog, spelling
):
    from peft import PeftModel
    from transformers import Gemma4ForConditionalGeneration

    def plain():
        return Gemma4ForConditionalGeneration.from_pretrained(model_dir, dtype=torch.bfloat16)

    expected = logits(PeftModel.from_pretrained(plain(), language_adapter_dir).eval())
    options = {"device_map": {TOWERS[0]: "disk", "": "cpu"}, spelling: str(tmp_path / "offload")}
    with caplog.at_level(logging.WARNING, logger="gemma4_compat"):
        model = PeftModel.from_pretrained(plain(), language_adapter_dir, **options).eval()
    (record,) = ours(caplog)
    assert f"PEFT's load_adapter ignores device_map, {spelling}" in record.message
    assert not offloaded(model)
    assert_same(logits(model), expected)


def test_device_map_is_restored_after_an_error(model_dir, tmp_path):
    from peft import PeftModel

    model = split(new_model(model_dir), tmp_path)
    before = fingerprint(model, tmp_path)
    device_map = model.hf_device_map
    with pytest.raises((OSError, ValueError)):
        PeftModel.from_pretrained(model, str(tmp_path / "no adapter here"))
    assert model.hf_device_map is device_map
    assert fingerprint(model, tmp_path) == before


def test_device_map_with_a_module_that_does_not_exist(model_dir, language_adapter_dir, tmp_path):
    from peft import PeftModel

    model = split(new_model(model_dir), tmp_path)
    model.hf_device_map["model.multi_modal_projector"] = "cpu"
    before = fingerprint(model, tmp_path)
    model = PeftModel.from_pretrained(model, language_adapter_dir)
    assert_untouched(model, before, tmp_path)


def test_models_without_a_device_map_are_loaded_as_ever(language_adapter_dir, model_dir):
    from peft import PeftModel
    from transformers import Gemma4ForConditionalGeneration

    plain = Gemma4ForConditionalGeneration.from_pretrained(model_dir, dtype=torch.bfloat16)
    assert not hasattr(plain, "hf_device_map")
    model = PeftModel.from_pretrained(plain, language_adapter_dir)
    assert not hasattr(model, "hf_device_map")


def test_mixed_models_are_left_to_peft(model_dir, adapter_dir, tmp_path):
    """PEFT raises, instead of an offload that is gone without an error."""
    from peft import PeftMixedModel

    model = split(new_model(model_dir), tmp_path)
    with pytest.raises(AttributeError, match="_update_offload"):
        PeftMixedModel.from_pretrained(model, adapter_dir)


def test_the_way_round_for_mixed_models(model_dir, language_adapter_dir, tmp_path):
    """One adapter is created, and the other is loaded; both are merged in place."""
    from peft import LoHaConfig, get_peft_model

    def merged(base):
        torch.manual_seed(0)
        config = LoHaConfig(r=4, target_modules=["up_proj"], init_weights=False)
        model = get_peft_model(base, config, "loha", mixed=True)
        model.load_adapter(language_adapter_dir, "lora")
        model.set_adapter(["loha", "lora"])
        yield logits(model.eval(), ("text",))
        model.base_model.merge_adapter()
        yield logits(model.unload(), ("text",))

    model = split(new_model(model_dir), tmp_path, {LAYER: "disk", "": "cpu"})
    for found, expected in zip(merged(model), merged(new_model(model_dir)), strict=True):
        assert_same(found, expected)
    assert offloaded(model)


@pytest.mark.parametrize("name", ["kasa", "unilora"])
def test_adapters_of_newer_releases(model_dir, name, tmp_path):
    """KaSA truncates the base weight; UniLoRA has tensors that are not parameters."""
    import peft

    targets = {"target_modules": ["q_proj", "down_proj"]}
    if name == "kasa":
        if not hasattr(peft, "KasaConfig"):
            pytest.skip("this PEFT has no KaSA")
        config = peft.LoraConfig(kasa_config=peft.KasaConfig(), **targets)
    else:
        if not hasattr(peft, "UniLoraConfig"):
            pytest.skip("this PEFT has no UniLoRA")
        config = peft.UniLoraConfig(theta_d_length=64, **targets)

    def adapted(model):
        torch.manual_seed(0)
        return peft.get_peft_model(model, config).eval()

    one = adapted(new_model(model_dir))
    one.save_pretrained(tmp_path / "adapter")
    expected = logits(one, ("text",))
    base = {LAYER: "disk", "": "cpu"}
    model = adapted(split(new_model(model_dir), tmp_path / "new", base))
    for _ in range(2):
        assert_same(logits(model, ("text",)), expected)
    again = peft.PeftModel.from_pretrained(new_model(model_dir), tmp_path / "adapter").eval()
    model = split(new_model(model_dir), tmp_path / "loaded", base)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert_same(logits(model, ("text",)), logits(again, ("text",)))
    merged, expected = model.merge_and_unload(), again.merge_and_unload()
    assert_same(logits(merged, ("text",)), logits(expected, ("text",)))


PLE = "model.language_model.embed_tokens_per_layer"
META = r"expected device|meta tensor"


def on_embedding(name, embedding):
    """Adapters that read the weight of an embedding outside of the embedding's forward."""
    import peft

    if name == "parameter":
        return peft.LoraConfig(
            target_modules=[], target_parameters=[f"{embedding}.weight"], init_lora_weights=False
        )
    if name == "hira":
        if not hasattr(peft, "HiraConfig"):
            pytest.skip("this PEFT has no HiRA")
        return peft.HiraConfig(target_modules=[embedding], init_weights=False)
    options = {"use_dora": name == "dora", "init_lora_weights": False}
    return peft.LoraConfig(target_modules=[embedding], **options)


def adapted(model, config):
    from peft import get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, config).eval()


def assert_split_is_whole(model_dir, config, place, tmp_path):
    """New and loaded adapters compute the same on a split model as on a whole model."""
    from peft import PeftModel

    one = adapted(new_model(model_dir), config())
    expected = logits(one, ("text",))
    one.save_pretrained(tmp_path / "adapter")
    base = {place: "disk", "": "cpu"}
    model = split(new_model(model_dir), tmp_path / "new", base)
    logits(model, ("text",))  # a forward unties offloaded weights
    new = adapted(model, config())
    model = split(new_model(model_dir), tmp_path / "loaded", base)
    loaded = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    for model in (new, loaded):
        for _ in range(2):
            assert_same(logits(model, ("text",)), expected)
            assert any(name.startswith(place) for name in map(plain, offloaded(model)))
        with model.disable_adapter():
            assert_same(logits(model, ("text",)), logits(new_model(model_dir), ("text",)))
    if place != "model.language_model.embed_tokens":  # tied in the whole model
        merged, expected = loaded.merge_and_unload(), one.merge_and_unload()
        assert_same(logits(merged, ("text",)), logits(expected, ("text",)))


def plain(name):
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


@pytest.mark.regression("peft_redispatch", META)
@pytest.mark.parametrize("name", ["dora", "hira", "parameter"])
def test_adapters_that_take_the_weight_of_an_embedding(model_dir, name, tmp_path):
    assert_split_is_whole(model_dir, lambda: on_embedding(name, PLE), PLE, tmp_path)


@pytest.mark.parametrize("name", ["dora", "hira", "parameter"])
def test_adapters_that_take_the_weight_of_a_tied_embedding(model_dir, name, tmp_path):
    place = "model.language_model.embed_tokens"
    assert_split_is_whole(model_dir, lambda: on_embedding(name, place), place, tmp_path)


@pytest.mark.regression("peft_redispatch", META)
def test_frod(model_dir, tmp_path):
    import peft

    if not hasattr(peft, "FrodConfig"):
        pytest.skip("this PEFT has no FRoD")
    assert_split_is_whole(
        model_dir,
        lambda: peft.FrodConfig(
            target_modules=[f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.up_proj"],
            init_weights=False,
        ),
        LAYER,
        tmp_path,
    )


@pytest.mark.parametrize("name", ["lora", "dora", "parameter"])
def test_merged_adapter_of_an_embedding_is_disabled(model_dir, name, tmp_path):
    one = adapted(new_model(model_dir), on_embedding(name, PLE))
    model = split(new_model(model_dir), tmp_path, {PLE: "disk", "": "cpu"})
    model = adapted(model, on_embedding(name, PLE))
    for each in (one, model):
        each.merge_adapter()
    assert_same(logits(model, ("text",)), logits(one, ("text",)))
    with one.disable_adapter(), model.disable_adapter():
        for _ in range(2):  # the first forward unmerges the adapter
            assert_same(logits(model, ("text",)), logits(one, ("text",)))
    assert_same(logits(model, ("text",)), logits(one, ("text",)))


@pytest.mark.parametrize("kind", ["nf4-nested", "int8"])
def test_merged_adapter_of_quantized_layers_is_disabled(model_dir, kind):
    """The weights that are kept are those from before the forward, which may repack them."""
    from accelerate import cpu_offload
    from peft import LoraConfig

    found = []
    for is_offloaded in (False, True):
        model = new_model(model_dir, kind)
        if is_offloaded:
            cpu_offload(model, torch.device("cpu"))
        targets = r".*language_model\.layers\.\d+\.mlp\.(gate|down)_proj"
        model = adapted(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        model.merge_adapter()
        with model.disable_adapter():
            found.append([logits(model, ("text",))])  # it unmerges the adapter
        model.state_dict()
        found[-1] += [logits(model, ("text",)) for _ in range(2)]
    for one, split_one in zip(*found, strict=True):
        assert_same(split_one, one)


@pytest.mark.parametrize("kind", [None, "nf4-nested"])
def test_merged_adapter_is_replaced(model_dir, kind):
    """PEFT unmerges it; here its own weights are offloaded, too."""
    from accelerate import cpu_offload
    from peft import LoraConfig

    targets = r".*language_model\.layers\.\d+\.mlp\.(gate|down)_proj"
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    found = []
    for is_offloaded in (False, True):
        model = adapted(new_model(model_dir, kind), config)
        model.add_adapter("second", config)
        if is_offloaded:
            cpu_offload(model, torch.device("cpu"))
        model.merge_adapter()
        model.set_adapter("second")
        found.append(logits(model, ("text",)))
    assert_same(*reversed(found))


def test_lora_on_an_embedding_loads_rows(model_dir, tmp_path, monkeypatch):
    """The forward reads only rows of the base weight, even if the adapter is merged."""
    from gemma4_compat.runtime.host import table

    model = split(new_model(model_dir), tmp_path, {PLE: "disk", "": "cpu"})
    model = adapted(model, on_embedding("lora", PLE))

    def load(self):
        raise AssertionError("the whole table was loaded")

    monkeypatch.setattr(table._host_table(), "load", load)
    logits(model, ("text",))
    monkeypatch.undo()
    model.merge_adapter()
    monkeypatch.setattr(table._host_table(), "load", load)
    logits(model, ("text",))


def test_another_hook_that_raises_first(model_dir, tmp_path):
    """Its error is the only one, and the layer runs as before afterwards."""
    import warnings

    model = adapted(
        split(new_model(model_dir), tmp_path, {PLE: "disk", "": "cpu"}), on_embedding("lora", PLE)
    )
    expected = logits(model, ("text",))
    layer = next(m for n, m in model.named_modules() if n.endswith(PLE))

    def fail(*_):
        raise ValueError("a hook of the user's")

    handle = layer.register_forward_pre_hook(fail, prepend=True)
    with warnings.catch_warnings(record=True) as warned, pytest.raises(ValueError, match="user's"):
        logits(model, ("text",))
    handle.remove()
    assert not [each for each in warned if "always_call" in str(each.message)]
    assert_same(logits(model, ("text",)), expected)
