"""The users' own snippets, as posted, except for model, adapter and offload folder."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.tiny import text_inputs
from tests.support import assert_same, logits, on_one_gpu, transplant

pytestmark = [pytest.mark.cuda, pytest.mark.each_stack]


def quant_config(double_quant, **options):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_enable_fp32_cpu_offload=True,
        **options,
    )


MODEL_KWARGS = {
    "dtype": torch.bfloat16,
    "attn_implementation": "sdpa",
    "trust_remote_code": False,
    "low_cpu_mem_usage": False,
}
FIRST_MAP = {
    "model.vision_tower": "cpu",
    "model.multi_modal_projector": "cpu",
    "model.audio_tower": "cpu",
    "": 0,  # This sets the rest of the model to GPU 0
}
LATER_MAP = {"model.vision_tower": "cpu", "model.audio_tower": "cpu", "": 0}


def load(model_dir, folder, config, device_map, max_memory=None):
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(
        model_dir,
        quantization_config=config,
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=str(folder),
        **MODEL_KWARGS,
    )


def get_input_embedding_device(model):
    candidates = [model]

    if hasattr(model, "base_model"):
        candidates.append(model.base_model)
        if hasattr(model.base_model, "model"):
            candidates.append(model.base_model.model)

    for obj in candidates:
        try:
            emb = obj.get_input_embeddings()
            if emb is not None and hasattr(emb, "weight"):
                return emb.weight.device
        except Exception:
            pass

    return torch.device("cuda:0")


def generate(model, **options):
    model.eval()
    model.config.use_cache = True
    if hasattr(model, "generation_config") and model.generation_config is not None:
        model.generation_config.use_cache = True
    inputs = text_inputs(model.config)
    input_device = get_input_embedding_device(model)
    if input_device.type == "meta":  # not in the users' maps
        input_device = torch.device("cuda:0")
    for key, value in inputs.items():
        if torch.is_tensor(value):
            inputs[key] = value.to(input_device)
    return model.generate(**inputs, max_new_tokens=8, do_sample=False, **options)


def check(model, base_like, model_dir, adapter_dir, kind, elsewhere=False):
    from peft import PeftModel

    one = on_one_gpu(model_dir, kind, base_like)
    if elsewhere:
        transplant(base_like, one)
    one = PeftModel.from_pretrained(one, adapter_dir).eval()
    assert_same(logits(model), logits(one))
    assert torch.equal(generate(model), generate(one))


def test_offloaded_towers_with_an_adapter(model_dir, adapter_dir, tmp_path):
    """The code of the first post."""
    from peft import PeftModel

    base_model = load(model_dir, tmp_path, quant_config(True), FIRST_MAP)
    if isinstance(base_model, PeftModel):
        base_model = base_model.merge_and_unload()
    model = PeftModel.from_pretrained(
        base_model, adapter_dir, adapter_name="client", is_trainable=False
    )
    check(model, base_model, model_dir, adapter_dir, "nf4-nested")


def test_device_map_given_to_peft_as_well(model_dir, adapter_dir, tmp_path):
    """The code of the second post, which raised KeyError: 22."""
    from peft import PeftModel

    base_model = load(model_dir, tmp_path, quant_config(True), FIRST_MAP)
    model = PeftModel.from_pretrained(
        base_model, adapter_dir, adapter_name="client", device_map=FIRST_MAP, is_trainable=False
    )
    check(model, base_model, model_dir, adapter_dir, "nf4-nested")


def test_offload_options_given_to_peft(model_dir, adapter_dir, tmp_path):
    """The code that they were advised to use, which moved the model to the second GPU."""
    from peft import PeftModel

    base_model = load(model_dir, tmp_path, quant_config(False), LATER_MAP)
    model = PeftModel.from_pretrained(
        base_model,
        adapter_dir,
        adapter_name="client",
        is_trainable=False,
        offload_dir=str(tmp_path),
        offload_buffers=True,
        ephemeral_gpu_offload=True,
        torch_device="cuda:0",
    )
    check(model, base_model, model_dir, adapter_dir, "nf4")


def test_automatic_map_with_too_little_memory(model_dir, adapter_dir, tmp_path):
    """The code of the third post: max_memory below the model's size, and an offloaded cache."""
    from peft import PeftModel
    from transformers import DynamicCache

    skip = ["model.vision_tower", "model.multi_modal_projector", "model.audio_tower", "lm_head"]
    config = quant_config(True, llm_int8_skip_modules=skip)
    whole = load(model_dir, tmp_path, config, {"": 0}).get_memory_footprint()
    base_model = load(model_dir, tmp_path, config, "auto", {0: int(whole * 0.6), "cpu": "24GiB"})
    assert any(parameter.is_meta for parameter in base_model.parameters())
    model = PeftModel.from_pretrained(
        base_model, adapter_dir, adapter_name="client", is_trainable=False
    )
    check(model, base_model, model_dir, adapter_dir, "nf4-nested", elsewhere=True)
    cache = DynamicCache(config=model.config, offloading=True)
    assert torch.equal(generate(model, past_key_values=cache), generate(model))
