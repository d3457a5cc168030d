"""What a model computes on a GPU, to be compared in bits: ``python -m tests.exact CHECKPOINT OUT``.

Ten layers of E2B in NF4.  ``tests/test_exact.py`` runs it with this package and without it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import gemma4_compat
from tests.shapes import E2B_TEXT

#: The patches of an import that change bits, and why.
NAMED = {
    "full_attention_memory": "the kernel of transformers since 5.13, which needs less memory",
    "vision_uint8_pixels": "pixels become integers in front of a tower in 4 bits",
    "cudnn_attention": "cuDNN's gradients are wrong for some lengths",
    "loss_memory": "logits and gradients are computed in rows",
}
_VOCABULARY = 8192
_TEXT = {
    **E2B_TEXT,
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "layer_types": E2B_TEXT["layer_types"][:10],
    "num_hidden_layers": 10,
    "num_kv_shared_layers": 4,
}
_VISION = {"hidden_size": 768, "num_hidden_layers": 2, "use_clipped_linears": True}
_LENGTHS = (1, 17, 64, 300, 577, 1500, 4100)
_TRAINED = r".*language_model\.layers\.\d+\.(self_attn|mlp)\.(q|o|gate|down)_proj"


def save(folder):
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    special = {"image_token_id": 8000, "boi_token_id": 8001, "eoi_token_id": 8002}
    special |= {"video_token_id": 8003, "audio_token_id": 8004}
    config = Gemma4Config(text_config=_TEXT, vision_config=_VISION, **special)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Gemma4ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "language_model" in name and name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.data.fill_(0.25)  # with 1, a layer attends to one token, and rounding decides it
    model.to(torch.bfloat16).save_pretrained(folder)


def load(folder):
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return Gemma4ForConditionalGeneration.from_pretrained(
        folder, quantization_config=quantization, device_map={"": 0}, dtype=torch.bfloat16
    ).eval()


def ids(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 7900, (1, length), generator=generator).cuda()


def last_logits(model, ids, count, **inputs):
    inputs.setdefault("attention_mask", torch.ones_like(ids))
    return model(input_ids=ids, logits_to_keep=count, **inputs).logits.cpu()


def six_tokens(model, cache):
    inputs = {"past_key_values": cache, "use_cache": True}
    last_logits(model, ids(600, 3), 1, **inputs)
    logits = []
    for step in range(6):
        inputs["attention_mask"] = torch.ones((1, 601 + step), device="cuda", dtype=torch.int64)
        logits.append(last_logits(model, ids(1, 50 + step), 1, **inputs))
    return torch.cat(logits)


def with_image(model):
    config = model.config
    side = 6 * config.vision_config.pooling_kernel_size
    x, y = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy")
    pixels = torch.rand(1, side**2, 768, generator=torch.Generator().manual_seed(1))
    image = torch.full((1, 36), config.image_token_id).cuda()
    tokens = torch.cat([ids(10, 5), image, ids(10, 6)], 1)
    return last_logits(
        model,
        tokens,
        4,
        pixel_values=pixels.to("cuda", torch.bfloat16),
        image_position_ids=torch.stack([x, y], -1).reshape(1, -1, 2).cuda(),
        mm_token_type_ids=(tokens == config.image_token_id).long(),
    )


def generated(model, static):
    """The logits of a static cache's steps; upstream's run eagerly."""
    options = {"cache_implementation": "static"} if static else {}
    output = model.generate(
        input_ids=ids(64, 8),
        attention_mask=torch.ones_like(ids(64, 8)),
        disable_compile=static and not is_patched(),
        max_new_tokens=24,
        min_new_tokens=24,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return torch.stack(output.logits).cpu()


def is_patched():
    return gemma4_compat.status()["captured_decoding"].state == "applied"


@torch.no_grad()
def inference(model):
    from transformers import DynamicCache, StaticCache

    for length in _LENGTHS:
        yield f"prompt of {length}", last_logits(model, ids(length), min(length, 8))
    padded = torch.ones((2, 40), device="cuda", dtype=torch.int64)
    padded[0, :9] = 0
    rows = ids(40).repeat(2, 1)
    yield "padded batch", last_logits(model, rows, 4, attention_mask=padded)
    text = model.config.get_text_config()
    yield "dynamic cache", six_tokens(model, DynamicCache(config=text))
    yield "static cache", six_tokens(model, StaticCache(config=text, max_cache_len=700))
    yield "image", with_image(model)
    yield "generate", generated(model, static=False)
    yield "generate, static", generated(model, static=True)
    if is_patched():
        from tests.patches.test_captured_decoding import captures

        assert captures(model), "no step was captured"


def adapted(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=_TRAINED))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.01)
    return model.eval()


def step(model, length):
    """The loss, and the gradients of the adapter."""
    tokens = ids(length, 9)
    model.train()
    inputs = {"labels": tokens, "mm_token_type_ids": torch.zeros_like(tokens)}
    loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).loss
    loss.backward()
    gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    result = loss.detach().double().cpu(), torch.cat(gradients).double().cpu()
    model.zero_grad()
    model.eval()
    return result


def in_float64(model):
    """The model with the same values and no quantized layer."""
    import bitsandbytes as bnb

    for layer in [each for each in model.modules() if hasattr(each, "base_layer")]:
        layer.base_layer = _plain(layer.base_layer, bnb)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, bnb.nn.Linear4bit):
                setattr(parent, name, _plain(child, bnb))
    return model.double()


def _plain(layer, bnb):
    weight = bnb.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
    linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear


def main(folder, out):
    if not (Path(folder) / "config.json").exists():
        save(folder)
    model = load(folder)
    results = dict(inference(model))
    model = adapted(model)
    with torch.no_grad():
        results["adapter, prompt"] = last_logits(model, ids(300), 4)
        results["adapter, one token"] = last_logits(model, ids(1), 1)
        results["adapter, generate, static"] = generated(model, static=True)
    for length in (300, 704, 2048):
        results[f"step {length}"] = step(model, length)
    results["applied"] = {name for name in NAMED if gemma4_compat.status()[name].state == "applied"}
    if not is_patched():
        model = in_float64(model)
        with torch.no_grad(), model.disable_adapter():
            for length in _LENGTHS[1:-1]:
                exact = last_logits(model, ids(length), min(length, 8))
                results[f"float64 prompt of {length}"] = exact
        for length in (300, 704, 2048):
            results[f"float64 {length}"] = step(model, length)
    torch.save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
