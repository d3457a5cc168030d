"""Models compute their RMS norms in one kernel each, with the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import gemma4_compat
from gemma4_compat.model.caches import cache_name
from gemma4_compat.runtime.kernels import launch, rms_norm, watch

FAMILIES = ("gemma4", "gemma3n", "unified")
TEXT = {
    "vocab_size": 96, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 128, "sliding_window": 16, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 96,
}  # fmt: skip


def make(kind="gemma4", device="cuda", dtype=torch.bfloat16):
    import transformers

    own = {
        "gemma4": ("Gemma4", {"intermediate_size": 256, "hidden_size_per_layer_input": 128}),
        "unified": ("Gemma4Unified", {"intermediate_size": 256}),
        "gemma3n": (
            "Gemma3n",
            {"intermediate_size": [256] * 4, "hidden_size_per_layer_input": 128},
        ),
    }
    prefix, options = own[kind]
    if not hasattr(transformers, f"{prefix}ForCausalLM"):
        pytest.skip(f"this transformers has no {prefix}")
    if kind == "gemma3n":
        options |= {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    else:
        options["global_head_dim"] = 256
    config = getattr(transformers, f"{prefix}TextConfig")
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config(**TEXT, **options))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1, 0.2)
    return model.to(device, dtype).eval()


def launched(run):
    """The names of the kernels that the GPU runs."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type.name == "CUDA"]


def assert_one_kernel(kind):
    model = make(kind)
    hidden = torch.randn(1, 1, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        names = launched(lambda: model.model.norm(hidden))
    assert names == ["rms_norm"], f"{len(names)} kernels for a norm"


@pytest.mark.cuda
@pytest.mark.regression("norm_kernels", r"\d kernels for a norm")
def test_one_kernel():
    assert_one_kernel("gemma4")


def logits(model, ids, **options):
    """Those of a prompt and of up to three decode steps."""
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True, **options)
        found = [output.logits]
        for step in range(min(3, ids.shape[1])):
            cache = {cache_name(): output.past_key_values}
            output = model(input_ids=ids[:, step : step + 1], use_cache=True, **cache)
            found.append(output.logits)
    return torch.cat(found, dim=1)


def check_logits(kind, shape, **options):
    model = make(kind)
    ids = torch.randint(5, 96, shape, device="cuda")
    with gemma4_compat.disabled("norm_kernels"):
        expected = logits(model, ids, **options)
    for _ in range(2):
        assert torch.equal(logits(model, ids, **options), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (1, 7), (1, 64), (1, 600), (3, 5), (2, 2100)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits(kind, shape):
    check_logits(kind, shape)


@pytest.mark.cuda
def test_padded_batch():
    mask = torch.ones(3, 20, dtype=torch.long, device="cuda")
    mask[1, :7] = mask[2, :13] = 0
    model, ids = make(), torch.randint(5, 96, (3, 20), device="cuda")
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with gemma4_compat.disabled("norm_kernels"):
        expected = model.generate(ids, **options).logits
    assert all(map(torch.equal, model.generate(ids, **options).logits, expected))


def step(model, ids):
    model.train().zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.cuda
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=str)
def test_training(checkpointing):
    """A reentrant checkpoint runs the forward without gradients first."""
    model, ids = make(), torch.randint(5, 96, (2, 40), device="cuda")
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    torch.manual_seed(0)
    with gemma4_compat.disabled("norm_kernels"):
        expected = step(model, ids)
    torch.manual_seed(0)
    assert all(map(torch.equal, step(model, ids), expected))


def adapted(kind, dtype=torch.bfloat16):
    """A frozen model with LoRA, whose norms and layers differ."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    return get_peft_model(make(kind, dtype=dtype), config)


def trained_step(model, ids, cast=None):
    model.train().zero_grad()
    with torch.autocast("cuda", cast or torch.bfloat16, enabled=cast is not None):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


TRAINED = pytest.mark.parametrize(
    ("kind", "dtype", "cast", "checkpointing"),
    [
        ("gemma4", torch.bfloat16, None, None),
        ("gemma4", torch.bfloat16, None, False),
        ("gemma4", torch.bfloat16, None, True),
        ("gemma4", torch.bfloat16, torch.bfloat16, False),
        ("gemma4", torch.float16, None, False),
        ("gemma4", torch.float32, torch.bfloat16, False),
        ("gemma4", torch.float32, None, False),
        ("unified", torch.bfloat16, None, False),
        ("gemma3n", torch.bfloat16, None, False),
    ],
    ids=str,
)


@pytest.mark.cuda
@TRAINED
@pytest.mark.parametrize("shape", [(2, 40), (1, 7), (1, 700)], ids=str)
def test_gradients_of_an_adapter(kind, dtype, cast, checkpointing, shape):
    """Bit for bit, in as many steps as it takes to compare kernels and to use them."""
    model, ids = adapted(kind, dtype), torch.randint(5, 96, shape, device="cuda")
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    with gemma4_compat.disabled("norm_kernels"):
        expected = trained_step(model, ids, cast)
        assert all(map(torch.equal, trained_step(model, ids, cast), expected)), "no reference"
    for _ in range(2):
        assert all(map(torch.equal, trained_step(model, ids, cast), expected))
    used = "rms_norm_gradient" in launched(lambda: trained_step(model, ids, cast))
    assert used == (dtype != torch.float32 or cast is not None)
    assert launch.without() == []


@pytest.mark.cuda
def test_an_input_that_changes_before_the_backward():
    norm = make().model.norm.requires_grad_(False)
    hidden = torch.randn(2, 9, 256, device="cuda", dtype=torch.bfloat16)

    def gradient():
        leaf = hidden.clone().requires_grad_()
        inputs = leaf * 2
        out = norm(inputs)
        inputs += 1
        out.float().square().sum().backward()
        return leaf.grad

    with gemma4_compat.disabled("norm_kernels"):
        expected = gradient()
    assert torch.equal(gradient(), expected)


@pytest.mark.cuda
def test_a_hook_that_changes_the_input():
    model, ids = adapted("gemma4"), torch.randint(5, 96, (2, 40), device="cuda")
    layer = model.get_submodule("base_model.model.model.layers.1")

    def triple(module, inputs, output):
        inputs[0].mul_(3)

    handle = layer.post_attention_layernorm.register_forward_hook(triple)
    with gemma4_compat.disabled("norm_kernels"):
        expected = trained_step(model, ids)
    assert all(map(torch.equal, trained_step(model, ids), expected))
    handle.remove()


@pytest.mark.cuda
def test_a_second_derivative():
    """Autograd's own, of which some sums round in another order: 2**-8 in bfloat16, a few times."""
    model, ids = adapted("gemma4"), torch.randint(5, 96, (1, 9), device="cuda")

    def penalty():
        model.zero_grad()
        weights = [p for p in model.parameters() if p.requires_grad]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = model(input_ids=ids, labels=ids, use_cache=False).logits.float().square().mean()
            grads = torch.autograd.grad(loss, weights, create_graph=True)
            sum(each.float().square().sum() for each in grads).backward()
        return torch.cat([p.grad.flatten() for p in weights])

    with gemma4_compat.disabled("norm_kernels"):
        expected = penalty()
    assert (penalty() - expected).norm() < 2**-5 * expected.norm()


@pytest.mark.cuda
def test_copies_and_the_switch():
    model, ids = make(), torch.randint(5, 96, (1, 9), device="cuda")
    expected = logits(model, ids)
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied, ids), expected)
    with torch.no_grad():
        assert "rms_norm" in launched(lambda: copied(input_ids=ids))
        with gemma4_compat.disabled("norm_kernels"):
            assert "rms_norm" not in launched(lambda: copied(input_ids=ids))


@pytest.mark.cuda
def test_torch_compile():
    """The compiler sees the original code."""
    norm, hidden = make().model.norm, torch.randn(1, 9, 256, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(hidden), norm(hidden))


@pytest.mark.cuda
def test_a_captured_step(monkeypatch):
    """All its norms use kernels that the eager step before it has compared."""
    launch.reset(compiled=False)
    model, ids = make(), torch.randint(5, 96, (1, 9), device="cuda")
    model.hf_device_map = {"": 0, "a tower": "cpu"}  # transformers does not compile such a model
    used, tried, compare = [], [], rms_norm._equal_kind

    def comparing(*args):
        tried.append(torch.cuda.is_current_stream_capturing())
        kind = compare(*args)
        launch = kind.launch

        def launching(*arguments):
            used.append(torch.cuda.is_current_stream_capturing())
            return launch(*arguments)

        monkeypatch.setattr(kind, "launch", launching)
        return kind

    monkeypatch.setattr(watch, "KNOWN", (*watch.KNOWN, __name__))
    monkeypatch.setattr(rms_norm, "_equal_kind", comparing)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with gemma4_compat.disabled("norm_kernels"):
        expected = model.generate(ids, **options).logits
    with gemma4_compat.disabled("layer_kernels"):
        assert all(map(torch.equal, model.generate(ids, **options).logits, expected))
    norms = sum(type(module).__name__ == "Gemma4RMSNorm" for module in model.modules())
    assert sum(used) == norms
    assert tried
    assert not any(tried)


@pytest.mark.cuda
@pytest.mark.regression("norm_kernels", r"\d kernels for a norm")
def test_one_kernel_of_gemma3n():
    assert_one_kernel("gemma3n")


@pytest.mark.cuda
@pytest.mark.regression("norm_kernels", r"\d kernels for a norm")
def test_one_kernel_of_unified():
    assert_one_kernel("unified")
