"""The peak memory of activations, measured on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemma4_compat.model import meta
from gemma4_compat.planning import peak
from tests.shapes import E2B_TEXT, write_config
from tests.support import load_model, quantization

KIB = 1024


def test_counts_what_exists_at_once():
    model = nn.Linear(256, 256, bias=False, device="meta")
    with torch.no_grad(), peak.PeakMemory(model) as memory:
        first = torch.empty(1, 256, device="meta")  # 1 KiB
        second = model(first)
        view = second[:, :10]
        third = second + 1
        del first, second
        assert memory.live == 2 * KIB  # the view keeps the whole tensor
        assert memory.peak == 3 * KIB
        del view
        assert memory.live == KIB
        fourth = torch.empty(1, device="meta")
        assert memory.live == KIB + 512  # allocations are rounded up
        del third, fourth
    assert memory.live == 0
    assert memory.peak == 3 * KIB


@pytest.mark.parametrize("past", [0, 5, 30])
def test_meta_tensors_take_what_real_ones_take(model_dir, past):
    """The same forward with real tensors, and with the replaced attention kernel, on the CPU."""
    from transformers import StaticCache

    model = load_model(model_dir, None).to(torch.bfloat16)
    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=past + 17)
    ids = torch.full((1, past + 16), 3)
    with torch.no_grad(), peak._measuring(model) as (memory, _):
        model(input_ids=ids[:, : past or 1], past_key_values=cache, logits_to_keep=1)
        start = memory.peak = memory.live
        model(input_ids=ids[:, past:], past_key_values=cache, logits_to_keep=1)
    plain = meta.meta_model(model_dir)
    expected = memory.peak - start
    assert peak.forward_peak(plain, 16, past)[0] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("tokens", [16, 17])
def test_one_layer_of_each_kind_is_enough(model_dir, monkeypatch, tokens):
    """The peak with all layers is the same."""
    model = meta.meta_model(model_dir)
    few, _ = peak.forward_peak(model, tokens, 0)
    monkeypatch.setattr(peak, "one_layer_of_each_kind", _all_layers)
    every, _ = peak.forward_peak(model, tokens, 0)
    assert few == every


class _all_layers:
    def __init__(self, model):
        self.layers = dict.fromkeys(range(len(peak._decoder(model))), 1)

    def __enter__(self):
        return self.layers

    def __exit__(self, *_):
        pass


def test_training_needs_what_a_training_of_all_layers_needs(model_dir, monkeypatch):
    """Layers of a kind are counted once and multiplied.

    In so small a model the peak can be in the backward of a layer, where that is a little less.
    """
    peft = pytest.importorskip("peft")

    def adapted():
        model = meta.meta_model(model_dir)
        config = peft.LoraConfig(r=4, target_modules=r".*layers\.\d+\.mlp\.(up|down)_proj")
        return peft.get_peft_model(model, config)

    few = peak.training_peak(adapted(), 32)
    monkeypatch.setattr(peak, "one_layer_of_each_kind", _all_layers)
    every = peak.training_peak(adapted(), 32)
    assert 0.95 * every <= few <= 1.15 * every


def test_4_bit_layers_dequantize_their_weight(model_dir):
    pytest.importorskip("bitsandbytes")
    plain, quantized = (
        meta.meta_model(model_dir),
        meta.meta_model(model_dir, meta.bnb_config("nf4")),
    )
    more = peak.forward_peak(quantized, 16, 0)[0] - peak.forward_peak(plain, 16, 0)[0]
    weights = [
        2 * module.in_features * module.out_features
        for module in quantized.modules()
        if type(module).__name__ == "Linear4bit"
    ]
    assert 0 < more <= max(weights)


@pytest.mark.parametrize("tokens", [4, 40])
def test_4_bit_experts_take_what_real_ones_take(moe_dir, tokens):
    """4 tokens dequantize the experts that they are routed to, 40 all, a tensor at a time."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    config = quantization("nf4", llm_int8_skip_modules=["lm_head"])
    real = AutoModelForCausalLM.from_pretrained(
        moe_dir, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    on_meta = meta.meta_model(moe_dir, config)
    peak._use_kernels(on_meta)

    def taken(model, device):
        experts = model.model.layers[0].experts
        states = torch.zeros(tokens, 128, dtype=torch.bfloat16, device=device)
        indices = torch.arange(2 * tokens, device=device).reshape(tokens, 2) % 32
        with torch.no_grad(), peak.PeakMemory(experts) as memory:
            experts(states, indices, torch.ones(tokens, 2, dtype=torch.bfloat16, device=device))
        return memory.peak

    found, size = taken(on_meta, "meta"), 2 * 48 * 128
    freed = 32 * size if tokens == 40 else 0  # of down_proj; memory does not see it
    assert found > (32 * 2 * size if tokens == 40 else 8 * 3 * size)
    assert found == pytest.approx(taken(real, "cpu") - freed, rel=0.2)


def test_the_model_is_unchanged(model_dir):
    model = meta.meta_model(model_dir)
    names = [name for name, _ in model.named_modules()]
    peak.forward_peak(model, 4, 0)
    assert [name for name, _ in model.named_modules()] == names


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory):
    """A checkpoint with the widths of an E2B, ten layers and a small vocabulary."""
    from transformers import AutoConfig, Gemma4ForCausalLM

    text = {**E2B_TEXT, "num_hidden_layers": 10, "layer_types": E2B_TEXT["layer_types"][:10]}
    text |= {"num_kv_shared_layers": 5, "vocab_size": 32768, "vocab_size_per_layer_input": 32768}
    folder = write_config(tmp_path_factory.mktemp("wide"), text)
    config = AutoConfig.from_pretrained(folder).get_text_config()
    Gemma4ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def on_gpu(folder, kind):
    from transformers import Gemma4ForCausalLM

    options = {"quantization_config": quantization(kind)} if kind else {}
    return Gemma4ForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": 0}, **options
    )


def measured(run):
    """The peak of a second run above the memory that remains after it."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = run()
    torch.cuda.synchronize()
    peaked = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del kept
    return peaked


@pytest.mark.cuda
@pytest.mark.parametrize("past", [0, 2048, 14336])
@pytest.mark.parametrize("kind", [None, "nf4-nested"])
def test_a_forward_on_a_gpu(wide_dir, kind, past):
    from transformers import DynamicCache

    model = on_gpu(wide_dir, kind).eval()
    ids = torch.full((1, past + 2048), 3, device=0)
    caches = []
    for _ in range(2):
        caches.append(DynamicCache(config=model.config))
        with torch.no_grad():
            for start in range(0, past, 2048):
                step = ids[:, start : start + 2048]
                model(input_ids=step, past_key_values=caches[-1], logits_to_keep=1)

    def run():
        cache = caches.pop()
        with torch.no_grad():
            model(input_ids=ids[:, past:], past_key_values=cache, logits_to_keep=1)
        return cache

    plain = meta.meta_model(wide_dir, None if kind is None else meta.bnb_config("nf4"))
    real = measured(run)
    # Of so small a peak, the MiB that is not split off each large tensor is up to a sixth.
    assert real <= peak.forward_peak(plain, 2048, past)[0] <= 1.2 * real


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [None, "nf4-nested"])
def test_a_training_step_on_a_gpu(wide_dir, kind):
    peft = pytest.importorskip("peft")

    def adapted(model):
        model.is_loaded_in_4bit = kind is not None
        config = peft.LoraConfig(r=16, target_modules=r".*layers\.\d+\.(self_attn|mlp)\.\w+_proj")
        return peft.get_peft_model(model, config)

    model = adapted(on_gpu(wide_dir, kind)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    ids = torch.full((1, 1024), 3, device=0)

    def run():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()

    plain = meta.meta_model(wide_dir, None if kind is None else meta.bnb_config("nf4"))
    real = measured(run)
    predicted = peak.training_peak(adapted(plain), 1024)
    assert real <= predicted <= 1.15 * real
