"""Models of other families come out bit for bit as without the patches."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import transformers

import gemma4_compat
from gemma4_compat.runtime.host import page_locked
from tests.test_docs import is_newest

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6,
    "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "attn_implementation": "eager",
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
FAMILIES = [
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "GPT2", "Phi3", "Olmo2",
    "Mixtral", "Qwen3Moe",
]  # fmt: skip
FORMS = ("whole", "layers on the CPU", "all on the CPU", "all on the disk")
IDS = torch.tensor([[3, 50, 7, 7, 90, 4, 31, 8, 9], [0, 0, 12, 5, 66, 6, 71, 20, 3]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}


def build(family):
    config = getattr(transformers, f"{family}Config")(**SIZES, **EXPERTS)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def placed(model, form, folder):
    from accelerate import cpu_offload, disk_offload, dispatch_model

    cpu = torch.device("cpu")
    if form == "all on the CPU":
        return cpu_offload(model, execution_device=cpu)
    if form == "all on the disk":
        return disk_offload(model, folder, execution_device=cpu)
    if form == "layers on the CPU":
        stack = model.model if hasattr(model, "model") else model.transformer
        layers = "layers" if hasattr(stack, "layers") else "h"
        prefix = next(name for name, module in model.named_modules() if module is stack)
        tree = {name: "cpu" for name, _ in model.named_children() if name != prefix}
        tree |= {f"{prefix}.{name}": "cpu" for name, _ in stack.named_children()}
        del tree[f"{prefix}.{layers}"]
        tree |= {f"{prefix}.{layers}.{n}": ("cpu", "disk")[n % 2] for n in range(4)}
        return dispatch_model(model, tree, main_device="cpu", offload_dir=folder, force_hooks=True)
    return model


def results(family, form, folder):
    """What a model computes, by name; the error where there is one."""
    folder.mkdir()
    model = placed(build(family), form, folder)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}

    def logits():
        with torch.no_grad():
            return model(**INPUTS).logits

    def gradients():
        model(**INPUTS, labels=IDS).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def cached(implementation):
        return model.generate(
            **INPUTS, **options, cache_implementation=implementation, disable_compile=True
        )

    calls = {
        "logits": logits, "gradients": gradients, "dynamic": lambda: cached(None),
        "static": lambda: cached("static"), "again": logits,
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = repr(error)[:300]
    return model, found


#: By default, each family in one of the forms.
CELLS = [
    pytest.param(family, form, marks=[pytest.mark.slow] if (i + j) % len(FORMS) else [])
    for i, family in enumerate(FAMILIES)
    for j, form in enumerate(FORMS)
]


@pytest.fixture(scope="module")
def without(request, tmp_path_factory):
    """The results of all tests without the patches, which take seconds to come off and on."""
    found = {}
    with gemma4_compat.disabled():
        for item in request.session.items:
            if item.path == request.path and "without" in item.fixturenames:
                folder = tmp_path_factory.mktemp("without") / "model"
                found[item.name] = EXPECTED[item.originalname](folder, **item.callspec.params)
    return found


@pytest.fixture
def expected(request, without):
    return without[request.node.name]


@pytest.mark.xdist_group("other models")
@pytest.mark.parametrize(("family", "form"), CELLS)
def test_results_are_as_without_the_patches(family, form, expected, tmp_path):
    assert isinstance(expected["logits"], torch.Tensor)
    before = page_locked.locked(), threading.active_count()
    model, found = results(family, form, tmp_path / "with")
    for name, value in expected.items():
        if not isinstance(value, str):  # an error may be a bug that is mended
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)
    assert (page_locked.locked(), threading.active_count()) == before
    assert not any("gemma4_compat" in str(vars(m).get("_hf_hook")) for m in model.modules())


@pytest.mark.parametrize("form", FORMS)
def test_a_hooked_forward_has_one_frame_of_ours(form, tmp_path):
    model = placed(build("Llama"), form, tmp_path)
    counts = []

    def count(*_):
        frame, ours = sys._getframe(), 0
        while frame is not None:
            if frame.f_code.co_name == "_call_impl":
                counts.append(ours)
                ours = 0
            ours += frame.f_globals.get("__name__", "").startswith("gemma4_compat.")
            frame = frame.f_back

    for module in model.modules():
        module.register_forward_pre_hook(count)
        if "_old_forward" in vars(module):
            old = module._old_forward
            module._old_forward = lambda *args, old=old, **kw: (count(), old(*args, **kw))[1]
    with torch.no_grad():
        model(**INPUTS)
    assert counts
    assert max(counts) <= 1


# -- relatives of Gemma 4 -------------------------------------------------------------------------

NEWEST = pytest.mark.skipif(not is_newest(), reason="earlier releases refuse these configs")
SMALL = {**{k: v for k, v in SIZES.items() if k != "attn_implementation"}, "global_head_dim": 8}
SMALL["layer_types"] = ["sliding_attention", "full_attention"] * 2
NO_PLE = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
}  # fmt: skip
ASSISTANT = {
    "text_config": {**SMALL, **NO_PLE, "num_kv_shared_layers": 4}, "backbone_hidden_size": 32,
}  # fmt: skip
#: the class of the model, that of its config, and the config's options
RELATIVES = {
    "diffusion_gemma": ("DiffusionGemmaForBlockDiffusion", "DiffusionGemmaConfig", {
        "text_config": {**SMALL, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
        "vision_config": TOWER, "canvas_length": 5,
    }),
    "embedding_gemma2": ("EmbeddingGemma2TextModel", "EmbeddingGemma2TextConfig", {
        **SMALL, "hidden_size_per_layer_input": 16, "embedding_dim": 24,
    }),
    "gemma4_assistant": ("Gemma4AssistantForCausalLM", "Gemma4AssistantConfig", ASSISTANT),
    "gemma4_unified_assistant": (
        "Gemma4UnifiedAssistantForCausalLM", "Gemma4UnifiedAssistantConfig", ASSISTANT,
    ),
    "gemma3n": ("Gemma3nForCausalLM", "Gemma3nTextConfig", {
        **SMALL, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2, "laurel_rank": 8, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    }),
}  # fmt: skip


def relative(name, dtype):
    """A tiny random model, and inputs of its forward."""
    cls, config, options = RELATIVES[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**options)).eval().to(dtype)
    inputs = dict(INPUTS)
    if "assistant" in name:
        keys = {kind: torch.randn(2, 2, 2, 9, 8, dtype=dtype) for kind in set(SMALL["layer_types"])}
        del inputs["input_ids"]
        inputs["inputs_embeds"] = torch.randn(2, 1, 64, dtype=dtype)
        inputs["position_ids"] = torch.full((2, 1), 8)
        inputs["shared_kv_states"] = {kind: tuple(both) for kind, both in keys.items()}
    if name == "diffusion_gemma":
        inputs["decoder_input_ids"] = IDS[:, :5]
    return model, inputs


def results_of_relative(folder, name, form, dtype):
    from accelerate import dispatch_model

    model, inputs = relative(name, dtype)
    if form == "layers on the disk":
        layers = [path for path, _ in model.named_modules() if path.endswith("layers.1")]
        device_map = {**dict.fromkeys(layers, "disk"), "": "cpu"}
        model = dispatch_model(
            model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True
        )

    def outputs():
        output = model(**inputs)
        return output.last_hidden_state if "embedding" in name else output.logits

    def generated(**options):
        torch.manual_seed(0)
        options = {"max_new_tokens": 5, "disable_compile": True, **options}
        found = model.generate(**INPUTS, **options)
        return found if torch.is_tensor(found) else found.sequences

    with torch.no_grad():
        found = {"outputs": outputs()}
        if name in ("diffusion_gemma", "gemma3n"):
            found["dynamic"] = generated()
            found["static"] = generated(cache_implementation="static")
    outputs().float().square().mean().backward()
    found |= {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
    return found


@NEWEST
@pytest.mark.xdist_group("other models")
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("name", RELATIVES)
@pytest.mark.parametrize("form", ["whole", "layers on the disk"])
def test_relatives_of_gemma_4(name, form, dtype, expected, tmp_path):
    """The patches touch classes that these models share with Gemma 4, or copies of them."""
    found = results_of_relative(tmp_path, name, form, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def tokens(assistant):
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**SMALL, **NO_PLE)
    model = transformers.Gemma4ForCausalLM(config).eval()
    helper = relative("gemma4_assistant", torch.float32)[0] if assistant else None
    if helper is not None:
        helper.generation_config.num_assistant_tokens = 3
    options = {"assistant_model": helper, "max_new_tokens": 12, "do_sample": False}
    return model.generate(IDS[:1], **options)


@NEWEST
@pytest.mark.xdist_group("other models")
@pytest.mark.parametrize("assistant", [True])
def test_an_assistant_of_gemma_4(assistant, expected):
    """Its tokens are those of a greedy search, and the patches change nothing."""
    assert torch.equal(tokens(assistant), expected)
    assert torch.equal(tokens(False), expected)


EXPECTED = {
    "test_results_are_as_without_the_patches": lambda folder, family, form: results(
        family, form, folder
    )[1],
    "test_relatives_of_gemma_4": results_of_relative,
    "test_an_assistant_of_gemma_4": lambda folder, assistant: tokens(assistant),
}
