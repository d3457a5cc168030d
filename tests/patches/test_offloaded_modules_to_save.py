"""modules_to_save and trainable tokens work if the module is offloaded."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import text_inputs
from tests.support import assert_same, load_model, logits, new_model, split

LANGUAGE = "model.language_model"
TARGETS = r".*language_model\.layers\.[0-2]\..*q_proj"
#: the module on disk, for each entry of modules_to_save
OFFLOADED = {
    "embedding_projection": "model.embed_vision",
    "per_layer_model_projection": f"{LANGUAGE}.per_layer_model_projection",
    "up_proj": f"{LANGUAGE}.layers.1",
    "mlp": f"{LANGUAGE}.layers.1",
    "norm": f"{LANGUAGE}.norm",
    "embed_tokens": f"{LANGUAGE}.embed_tokens",
    "embed_tokens_per_layer": f"{LANGUAGE}.embed_tokens_per_layer",
    "lm_head": "lm_head",
    "input_proj": "model.vision_tower",
}
TOKENS = [0, 5, 77, 499]  # 0 is the pad token
MODULES = pytest.mark.parametrize("name", OFFLOADED)
TRAINED = ("modules_to_save.", "trainable_tokens_delta", "lora_")


def config(name):
    from peft import LoraConfig

    if name == "tokens":
        trained = {"trainable_token_indices": {"embed_tokens": TOKENS}}
    else:
        trained = {"modules_to_save": [name]}
    return LoraConfig(r=4, target_modules=TARGETS, **trained)


def trained(model):
    return {n: p for n, p in model.named_parameters() if any(part in n for part in TRAINED)}


def adapted(model, name, seed=0):
    """Add a new adapter with random values, as after training."""
    from peft import get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(model, config(name)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(model).values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((0.1 * noise).to(parameter.dtype))
    return model


def build(model_dir, folder, name, seed=0):
    """Save an adapter of a whole model, and return the model with it."""
    model = adapted(new_model(model_dir), name, seed)
    model.save_pretrained(folder)
    return model


def offload(model_dir, folder, name, kind=None):
    place = OFFLOADED["embed_tokens" if name == "tokens" else name]
    return split(new_model(model_dir, kind), folder, {place: "disk", "": "cpu"})


@MODULES
def test_loaded_adapter_gives_the_whole_models_logits(model_dir, name, tmp_path):
    from peft import PeftModel

    one = build(model_dir, tmp_path / "adapter", name)
    expected = logits(one)
    model = offload(model_dir, tmp_path / "offload", name)
    logits(model)  # the placement of tied weights changes with the first forward
    model = PeftModel.from_pretrained(model, tmp_path / "adapter")
    assert not [n for n, p in trained(model).items() if p.is_meta]
    for _ in range(2):
        assert_same(logits(model), expected)
    model.save_pretrained(tmp_path / "again")
    again = PeftModel.from_pretrained(new_model(model_dir), tmp_path / "again").eval()
    assert_same(logits(again), expected)
    with model.disable_adapter():
        assert_same(logits(model), logits(new_model(model_dir)))
    assert_same(logits(model.merge_and_unload()), logits(one.merge_and_unload()))


@pytest.mark.regression(
    "offloaded_modules_to_save",
    r"unexpected keyword argument 'hooks'|logits differ by|Cannot copy out of meta tensor",
)
@pytest.mark.parametrize("name", ["embedding_projection", "up_proj"])
def test_copy_is_trained_and_saved(model_dir, name, tmp_path):
    """The adapter is new: without peft_redispatch, loading one would undo the offloading."""
    from peft import PeftModel

    expected = logits(adapted(new_model(model_dir), name))
    model = adapted(offload(model_dir, tmp_path / "offload", name), name)
    assert_same(logits(model), expected)
    model.save_pretrained(tmp_path / "again")
    assert_same(
        logits(PeftModel.from_pretrained(new_model(model_dir), tmp_path / "again").eval()),
        expected,
    )


@pytest.mark.regression("offloaded_modules_to_save", r"on device meta|meta tensor")
def test_trainable_tokens(model_dir, tmp_path):
    from peft import PeftModel

    expected = logits(adapted(new_model(model_dir), "tokens"))
    model = offload(model_dir, tmp_path / "offload", "tokens")
    logits(model)
    model = adapted(model, "tokens")
    for _ in range(2):
        assert_same(logits(model), expected)
    with model.disable_adapter():
        assert_same(logits(model), logits(new_model(model_dir)))
    model.save_pretrained(tmp_path / "again")
    again = PeftModel.from_pretrained(new_model(model_dir), tmp_path / "again").eval()
    assert_same(logits(again), expected)


def test_trainable_tokens_are_loaded_and_merged(model_dir, tmp_path):
    from peft import PeftModel

    one = build(model_dir, tmp_path / "adapter", "tokens")
    expected = logits(one)
    model = offload(model_dir, tmp_path / "offload", "tokens")
    logits(model)
    model = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert_same(logits(model), expected)
    assert_same(logits(model.merge_and_unload()), logits(one.merge_and_unload()))


def steps(model, number=2):
    """Train all parameters that require gradients; return the losses and the last gradients."""
    inputs = text_inputs(model.config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["up_proj", "norm", "embed_tokens", "lm_head", "tokens"])
def test_training(model_dir, name, tmp_path):
    one = adapted(new_model(model_dir), name).train()
    losses, expected = steps(one)
    model = offload(model_dir, tmp_path / "offload", name)
    logits(model, ("text",))
    model = adapted(model, name).train()
    assert steps(model)[0] == losses
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert {n for n in trained(model) if any(part in n for part in TRAINED[:2])} & found.keys()
    for parameter, gradient in found.items():
        assert torch.equal(gradient, expected[parameter]), parameter
    assert_same(logits(model.eval(), ("text",)), logits(one.eval(), ("text",)))


def test_second_adapter_with_another_copy(model_dir, tmp_path):
    from peft import PeftModel

    build(model_dir, tmp_path / "one", "up_proj")
    build(model_dir, tmp_path / "two", "up_proj", seed=1)

    def loaded(model):
        model = PeftModel.from_pretrained(model, tmp_path / "one").eval()
        model.load_adapter(tmp_path / "two", "two")
        return model

    one = loaded(new_model(model_dir))
    model = loaded(offload(model_dir, tmp_path / "offload", "up_proj"))
    for name in ("two", "default"):
        one.set_adapter(name)
        model.set_adapter(name)
        assert_same(logits(model), logits(one))
    model.delete_adapter("two")
    assert_same(logits(model), logits(one))


def test_second_adapter_with_tokens_of_tied_ends(model_dir, tmp_path):
    """Each adapter gives the same logits as alone: the tied head uses the active adapter."""
    from peft import PeftModel, TrainableTokensConfig, get_peft_model

    one = get_peft_model(new_model(model_dir), TrainableTokensConfig(token_indices=TOKENS)).eval()
    expected = {}
    for name in ("default", "two"):
        with torch.no_grad():
            trained(one)[next(iter(trained(one)))].add_(0.1)
        one.save_pretrained(tmp_path / name)
        expected[name] = logits(one, ("text",))
    model = offload(model_dir, tmp_path / "offload", "tokens")
    model = PeftModel.from_pretrained(model, tmp_path / "default").eval()
    model.load_adapter(tmp_path / "two", "two")
    assert_same(logits(model, ("text",)), expected["default"])
    for name in ("two", "default"):
        model.set_adapter(name)
        assert_same(logits(model, ("text",)), expected[name])
    model.set_adapter("two")
    model.delete_adapter("two")
    model.set_adapter("default")
    assert_same(logits(model, ("text",)), expected["default"])


def test_quantized_base(model_dir, tmp_path):
    """Only modules that bitsandbytes does not quantize can be copied: others cannot be trained."""
    from peft import PeftModel

    one = adapted(new_model(model_dir, "nf4-nested"), "embed_tokens")
    one.save_pretrained(tmp_path / "adapter")
    model = offload(model_dir, tmp_path / "offload", "embed_tokens", "nf4-nested")
    model = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert_same(logits(model), logits(one))


def test_original_stays_offloaded_and_shares_nothing_with_its_copy(model_dir, tmp_path):
    model = offload(model_dir, tmp_path / "offload", "up_proj")
    hooks = {name: m._hf_hook for name, m in model.named_modules() if hasattr(m, "_hf_hook")}
    model = adapted(model, "up_proj")
    wrapper = model.base_model.model.get_submodule(f"{LANGUAGE}.layers.1.mlp.up_proj")
    assert wrapper.original_module.weight.is_meta
    assert vars(wrapper.original_module)["_hf_hook"] is hooks[f"{LANGUAGE}.layers.1.mlp.up_proj"]
    copy = wrapper.modules_to_save["default"]
    assert copy.weight.device.type == "cpu"
    assert not copy._hf_hook.offload
    before = wrapper.original_module._hf_hook.weights_map["weight"].clone()
    with torch.no_grad():
        copy.weight.add_(1)
    assert torch.equal(wrapper.original_module._hf_hook.weights_map["weight"], before)


def test_modules_that_are_not_offloaded_are_copied_as_ever(model_dir):
    model = adapted(new_model(model_dir), "up_proj")
    wrapper = model.base_model.model.get_submodule(f"{LANGUAGE}.layers.1.mlp.up_proj")
    assert "_hf_hook" not in vars(wrapper.modules_to_save["default"])


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", ["embedding_projection", "per_layer_model_projection", "embed_tokens"]
)
def test_copy_is_on_the_gpu(model_dir, name, tmp_path):
    from peft import PeftModel

    build(model_dir, tmp_path / "adapter", name)
    one = PeftModel.from_pretrained(load_model(model_dir, None, {"": 0}), tmp_path / "adapter")
    model = load_model(model_dir, None, {OFFLOADED[name]: "cpu", "": 0})
    model = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert {p.device.type for p in trained(model).values()} == {"cuda"}
    assert_same(logits(model), logits(one.eval()))
    with model.disable_adapter(), one.disable_adapter():
        assert_same(logits(model), logits(one))
    assert_same(logits(model.merge_and_unload()), logits(one.merge_and_unload()))


@pytest.mark.cuda
def test_trainable_tokens_on_a_gpu(model_dir, tmp_path):
    from peft import PeftModel

    build(model_dir, tmp_path / "adapter", "tokens")
    one = PeftModel.from_pretrained(load_model(model_dir, None, {"": 0}), tmp_path / "adapter")
    model = load_model(model_dir, None, {OFFLOADED["embed_tokens"]: "cpu", "": 0})
    model = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    for _ in range(2):
        assert_same(logits(model), logits(one.eval()))
    assert_same(logits(model.merge_and_unload()), logits(one.merge_and_unload()))
