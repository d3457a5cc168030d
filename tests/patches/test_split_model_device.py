"""The ``device`` of a split model is the device of its inputs."""

from __future__ import annotations

import pytest
import torch

import gemma4_compat
from gemma4_compat.model.caches import cache_name
from gemma4_compat.tiny import image_inputs, text_inputs
from tests.support import assert_same, logits, new_model, split

CPU = torch.device("cpu")
META = r"Cannot copy out of meta tensor|Tensor\.item\(\) cannot be called on meta tensors"


def tokens(model, inputs=None, **options):
    inputs = text_inputs(model.config) if inputs is None else inputs
    return model.generate(
        **inputs, **options, max_new_tokens=12, min_new_tokens=12, do_sample=False
    )


@pytest.fixture
def whole(model_dir):
    return new_model(model_dir)


@pytest.fixture
def divided(model_dir, tmp_path):
    return split(new_model(model_dir), tmp_path)


@pytest.mark.regression("split_model_device", r"the device is meta")
def test_device(divided):
    parts = {
        "model": divided,
        "base model": divided.model,
        "language model": divided.model.language_model,
        "vision tower": divided.model.vision_tower,
        "audio tower": divided.model.audio_tower,
    }
    assert divided.model.vision_tower.patch_embedder.input_proj.weight.is_meta
    for name, part in parts.items():
        assert part.device == CPU, f"{name}: the device is {part.device}"
    assert divided.device == gemma4_compat.input_device(divided)


@pytest.mark.regression("split_model_device", META)
def test_inputs_brought_to_the_device(whole, divided):
    """The code of the model cards works, even after the hooks have offloaded the weights again."""
    for _ in range(2):
        for make in (text_inputs, image_inputs):
            inputs = {key: value.to(divided.device) for key, value in make(whole.config).items()}
            with torch.no_grad():
                assert torch.equal(divided(**inputs).logits, whole(**inputs).logits)
                assert torch.equal(tokens(divided, inputs), tokens(whole, inputs))


#: Errors of assisted generation on one device, in transformers 5.12 and 5.13, and 5.15 to 5.17.
#: The sliding caches cannot take rejected tokens back, or have another length than the mask.
NOT_ON_ONE_DEVICE = (
    "Cannot `crop` a `DynamicSlidingWindowLayer`",
    "must match the size of tensor b (8) at non-singleton dimension 3",
)


def assisted(model, **options):
    """Skips on releases that raise an error on one device."""
    try:
        return tokens(model, **options)
    except (ValueError, RuntimeError) as error:
        if not any(text in str(error) for text in NOT_ON_ONE_DEVICE):
            raise
        pytest.skip("on one device, this release raises the same error")


@pytest.mark.regression("split_model_device", META)
def test_prompt_lookup(whole, divided):
    expected = assisted(whole, prompt_lookup_num_tokens=3)
    for _ in range(2):
        assert torch.equal(tokens(divided, prompt_lookup_num_tokens=3), expected)


@pytest.mark.regression("split_model_device", META)
@pytest.mark.parametrize("side", ["main", "assistant"])
def test_assisted_generation(whole, divided, model_dir, side):
    expected = assisted(whole, assistant_model=new_model(model_dir))
    if side == "main":
        found = tokens(divided, assistant_model=whole)
    else:
        found = tokens(whole, assistant_model=divided)
    assert torch.equal(found, expected)


@pytest.mark.regression("split_model_device", META)
def test_generate_without_inputs(whole, divided):
    assert torch.equal(tokens(divided, {}), tokens(whole, {}))


@pytest.mark.usefixtures("pristine")
def test_with_an_adapter(model_dir, adapter_dir, tmp_path):
    from peft import PeftModel

    model = PeftModel.from_pretrained(split(new_model(model_dir), tmp_path), adapter_dir)
    assert model.device == CPU, f"the device is {model.device}"


@pytest.mark.regression("split_model_device", r"the device is meta")
def test_other_models(llama_dir, tmp_path):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama_dir).eval()
    ids = torch.arange(3, 15)[None]
    expected = model(ids).logits
    model = split(model, tmp_path, {"model.embed_tokens": "disk", "": "cpu"})
    assert model.device == CPU, f"the device is {model.device}"
    assert torch.equal(model(ids.to(model.device)).logits, expected)


@pytest.mark.regression("split_model_device", r"the device is meta")
def test_offloaded_without_a_device_map(model_dir):
    """Without ``hf_device_map``, only the device meta prevented ``generate`` from compiling."""
    from accelerate import cpu_offload
    from transformers import GenerationConfig, StaticCache

    expected = logits(new_model(model_dir))
    model = new_model(model_dir)
    vars(model).pop("hf_device_map", None)
    cpu_offload(model, execution_device="cpu")
    assert model.device == CPU, f"the device is {model.device}"
    assert_same(logits(model), expected)
    cache = {cache_name(): StaticCache(config=model.config, max_cache_len=16)}
    config = GenerationConfig(cache_implementation="static")
    config.compile_config = compile_everywhere()
    assert not model._valid_auto_compile_criteria(cache, config)
    assert not hasattr(model, "hf_device_map")
    assert new_model(model_dir)._valid_auto_compile_criteria(cache, config)


def compile_everywhere():
    """A config with which ``generate`` compiles on the CPU as well."""
    from transformers import CompileConfig

    config = CompileConfig()
    config._compile_all_devices = True
    return config


def test_models_without_weights_say_meta(whole):
    from accelerate import init_empty_weights
    from transformers import Gemma4ForConditionalGeneration

    with init_empty_weights():
        assert Gemma4ForConditionalGeneration(whole.config).device.type == "meta"
    with torch.device("meta"):
        model = Gemma4ForConditionalGeneration(whole.config)
    assert model.device.type == model.model.vision_tower.device.type == "meta"


def test_whole_models_are_as_ever(whole):
    assert whole.device == whole.model.vision_tower.device == CPU
    assert whole.to("meta").device.type == "meta"


def test_taken_back(divided):
    with gemma4_compat.disabled("split_model_device"):
        assert divided.device == next(divided.parameters()).device
    assert divided.device == CPU


def test_a_subclass_with_a_device_of_its_own(whole):
    from transformers import Gemma4ForConditionalGeneration

    class Mine(Gemma4ForConditionalGeneration):
        @property
        def device(self):
            return "mine", super().device

    whole.__class__ = Mine
    assert whole.device == ("mine", CPU)


def test_no_setter_and_the_docstring():
    from transformers.modeling_utils import ModuleUtilsMixin

    assert ModuleUtilsMixin.device.fset is None
    assert "The device on which the module is" in ModuleUtilsMixin.device.__doc__


def test_compiled(whole):
    """A forward that reads ``device``, as in some models, can be compiled."""

    class Reads(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return x.to(self.model.device) + 1

    module = Reads(whole.model.language_model.norm)
    module.model.__class__ = _with_device(type(module.model))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))


def _with_device(cls):
    from transformers.modeling_utils import ModuleUtilsMixin

    return type(cls.__name__, (cls, ModuleUtilsMixin), {})
