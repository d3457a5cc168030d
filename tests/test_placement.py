"""``input_device``: the device for token tensors."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat import input_device
from gemma4_compat.tiny import TOWERS
from tests.support import assert_same, load_model, new_model, offloaded, split

CPU = torch.device("cpu")
META = torch.device("meta")
EMBEDDING = "model.language_model.embed_tokens"
#: The token embeddings on disk, executing on the CPU.
EMBEDDING_OFF = {EMBEDDING: "disk", "lm_head": "disk", "": "cpu"}


def hooked(model, device):
    """Set ``device`` as the execution device of the embeddings, without moving anything.

    Without a GPU, meta represents a device that does not hold the weights.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    hook = AlignDevicesHook(execution_device=device, offload=False)
    hook.init_hook = lambda module: module
    add_hook_to_module(model.get_input_embeddings(), hook)
    return model


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory, model_dir):
    """A checkpoint of the language model alone.

    In the multimodal model, Gemma4Model.forward itself reads the weight of the embeddings, and
    fails if that is offloaded.
    """
    from transformers import Gemma4ForCausalLM

    whole = new_model(model_dir)
    model = Gemma4ForCausalLM(whole.config.text_config).to(torch.bfloat16)
    model.model.load_state_dict(whole.model.language_model.state_dict())
    path = tmp_path_factory.mktemp("text")
    model.save_pretrained(path)
    return path


def load_text_model(text_dir, device_map=None):
    from transformers import Gemma4ForCausalLM

    return Gemma4ForCausalLM.from_pretrained(
        text_dir, dtype=torch.bfloat16, device_map=device_map or {"": "cpu"}
    ).eval()


def tokens(device=CPU):
    ids = torch.arange(3, 15, device=device)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def text_logits(model, device=CPU):
    with torch.no_grad():
        return {"text": model(**tokens(device)).logits.float().cpu()}


def adapted(model, **options):
    from peft import LoraConfig, get_peft_model

    options.setdefault("target_modules", r".*language_model.*\.q_proj")
    return get_peft_model(model, LoraConfig(r=2, **options))


def test_not_dispatched(model_dir):
    model = new_model(model_dir)
    assert input_device(model) == CPU
    assert input_device(model.model) == CPU
    assert input_device(model.model.language_model) == CPU
    assert input_device(adapted(model)) == CPU


def test_text_model_alone(text_dir):
    assert input_device(load_text_model(text_dir)) == CPU


def test_split(model_dir, language_adapter_dir, tmp_path):
    """A forward with tokens on that device equals the model on one device."""
    from peft import PeftModel

    model = split(new_model(model_dir), tmp_path)
    assert offloaded(model)
    for _ in range(2):
        assert input_device(model) == CPU
        assert_same(text_logits(model, input_device(model)), text_logits(new_model(model_dir)))
    model = PeftModel.from_pretrained(model, language_adapter_dir)
    assert input_device(model) == CPU
    assert input_device(model.base_model) == CPU


def test_offloaded_embeddings(text_dir, tmp_path):
    device_map = {"model.embed_tokens": "disk", "lm_head": "disk", "": "cpu"}
    model = split(load_text_model(text_dir), tmp_path, device_map)
    for _ in range(2):
        assert model.get_input_embeddings().weight.is_meta
        assert input_device(model) == CPU
        found = text_logits(model, input_device(model))
        assert_same(found, text_logits(load_text_model(text_dir)))


def test_execution_device_of_the_hook(model_dir):
    model = hooked(new_model(model_dir), META)
    assert model.get_input_embeddings().weight.device == CPU
    assert input_device(model) == META
    assert input_device(model.model.language_model) == META
    assert input_device(adapted(model)) == META


def test_several_hooks_on_one_module(model_dir, tmp_path):
    from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module

    model = split(new_model(model_dir), tmp_path, EMBEDDING_OFF)
    add_hook_to_module(model.get_input_embeddings(), ModelHook(), append=True)
    assert isinstance(model.get_input_embeddings()._hf_hook, SequentialHook)
    assert input_device(model) == CPU
    model = hooked(new_model(model_dir), META)
    add_hook_to_module(model.get_input_embeddings(), ModelHook(), append=True)
    assert isinstance(model.get_input_embeddings()._hf_hook, SequentialHook)
    assert input_device(model) == META


def test_hook_of_an_outer_module(model_dir):
    """``cpu_offload_with_hook`` moves the whole model; the embeddings have no hook."""
    from accelerate import cpu_offload_with_hook

    model, hook = cpu_offload_with_hook(new_model(model_dir), execution_device=META)
    assert model.get_input_embeddings().weight.device == CPU
    assert input_device(model) == META
    hook.remove()
    assert input_device(model) == CPU


def test_preloaded_with_an_outer_module(model_dir, tmp_path):
    """``preload_module_classes``: the hook of an outer module onloads the embeddings."""
    from accelerate import disk_offload

    model = new_model(model_dir)
    whole = [type(model.model.language_model).__name__]
    disk_offload(model, str(tmp_path), execution_device=CPU, preload_module_classes=whole)
    assert model.get_input_embeddings().weight.is_meta
    assert not hasattr(model.get_input_embeddings(), "_hf_hook")
    assert input_device(model) == CPU


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
def test_whole_model_offloaded(text_dir, way, tmp_path):
    import accelerate

    model = load_text_model(text_dir)
    extra = (str(tmp_path),) if way == "disk_offload" else ()
    getattr(accelerate, way)(model, *extra, execution_device=CPU)
    assert model.get_input_embeddings().weight.is_meta
    assert input_device(model) == CPU
    assert_same(text_logits(model, CPU), text_logits(load_text_model(text_dir)))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens"]},
        {"trainable_token_indices": {"embed_tokens": [3, 4]}},
        {"modules_to_save": ["embed_tokens"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_adapter_on_the_embeddings(model_dir, options, tmp_path):
    assert input_device(adapted(new_model(model_dir), **options)) == CPU
    model = adapted(hooked(new_model(model_dir), META), **options)
    assert input_device(model) == META
    if "target_modules" in options:  # the others cannot adapt offloaded modules
        model = adapted(split(new_model(model_dir), tmp_path, EMBEDDING_OFF), **options)
        assert input_device(model) == CPU


def test_wrappers(model_dir, tmp_path):
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    model = hooked(new_model(model_dir), META)
    assert input_device(torch.compile(model)) == META
    assert input_device(torch.compile(adapted(model))) == META
    model = new_model(model_dir)
    assert input_device(DataParallel(model)) == CPU
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        assert input_device(DistributedDataParallel(model)) == CPU
        assert input_device(torch.compile(DistributedDataParallel(adapted(model)))) == CPU
    finally:
        torch.distributed.destroy_process_group()


def test_distributed_tensors(model_dir, tmp_path):
    from torch.distributed.fsdp import fully_shard

    model = new_model(model_dir)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(model, mesh=mesh)
        assert type(model.get_input_embeddings().weight).__name__ == "DTensor"
        assert input_device(model) == CPU
    finally:
        torch.distributed.destroy_process_group()


def test_quantized(model_dir):
    assert input_device(new_model(model_dir, "nf4")) == CPU


def test_nothing_is_changed(model_dir, tmp_path):
    model = split(new_model(model_dir), tmp_path, EMBEDDING_OFF)
    before = {n: (id(p), p.device) for n, p in model.named_parameters()}
    input_device(model)
    assert before == {n: (id(p), p.device) for n, p in model.named_parameters()}


def test_no_token_embeddings(model_dir):
    for model in (torch.nn.Linear(2, 2), torch.nn.Sequential(), object(), None, "model"):
        with pytest.raises(TypeError, match=f"{type(model).__name__} has no token embeddings"):
            input_device(model)


def test_nothing_loaded(model_dir):
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    config = Gemma4Config.from_pretrained(model_dir)
    with torch.device("meta"):
        model = Gemma4ForConditionalGeneration(config)
    with pytest.raises(ValueError, match=r"Gemma4ForConditionalGeneration .* no weights loaded"):
        input_device(model)


@pytest.mark.cuda
def test_towers_on_the_host_of_a_gpu(model_dir, adapter_dir):
    from peft import PeftModel

    gpu = torch.device("cuda:0")
    assert input_device(load_model(model_dir, device_map={"": 0})) == gpu
    device_map = {**dict.fromkeys(TOWERS, "cpu"), "": 0}
    model = load_model(model_dir, "nf4", device_map, llm_int8_enable_fp32_cpu_offload=True)
    assert input_device(model) == gpu
    assert input_device(PeftModel.from_pretrained(model, adapter_dir)) == gpu


@pytest.mark.cuda
def test_embeddings_on_the_host_of_a_gpu(text_dir):
    """The embeddings compute on the GPU; tokens on the CPU would move the logits to the CPU."""
    gpu = torch.device("cuda:0")
    device_map = {"model.embed_tokens": "cpu", "lm_head": "cpu", "": 0}
    model = load_text_model(text_dir, device_map)
    assert model.get_input_embeddings().weight.is_meta
    assert input_device(model) == gpu
    with torch.no_grad():
        there, back = model(**tokens(gpu)).logits, model(**tokens()).logits
    assert (there.device, back.device) == (gpu, CPU)
    assert torch.equal(there.cpu(), back)


@pytest.mark.cuda(gpus=2)
def test_second_gpu(model_dir):
    # No entry "": with one, accelerate gives modules on GPU 1 hooks for GPU 0.
    parts = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    device_map = {f"model.{part}": 0 for part in parts}
    device_map |= {"model.language_model": 1, "lm_head": 1}
    assert input_device(load_model(model_dir, device_map=device_map)) == torch.device("cuda:1")
