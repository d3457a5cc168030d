"""load_in_4bit quantizes the fused experts of Gemma 4.

The reference is the same module with the weights that bitsandbytes dequantizes.  It uses the same
kernels, so outputs are compared bit for bit.  One token is multiplied with two matrices in 4 bits,
and its routing weights are rounded before the second product instead of after it: four roundings of
2**-9 in bfloat16.  In float32, the product with values in 4 bits does not round the weights to
bfloat16.
"""

from __future__ import annotations

import copy
import gc
import importlib
import io
import itertools
import logging
import re

import pytest
import torch
from packaging.version import Version

import gemma4_compat
from gemma4_compat.patches.offloading import fused_experts_4bit
from gemma4_compat.runtime.experts import kernel as experts_kernel
from gemma4_compat.runtime.experts.packed import IN_HOST_MEMORY, Packed, is_packed, quantized
from gemma4_compat.runtime.host import blocks, page_locked
from tests import support

OURS = "gemma4_compat.patches.offloading.fused_experts_4bit"
LAYERS, EXPERTS, TOP_K = 3, 32, 2
FUSED = ["gate_up_proj", "down_proj"]
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
KINDS = pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
ROUNDINGS = 2**-7
#: bitsandbytes' GEMV on a GPU rounds each weight and each product to bfloat16, in both matrices.
GPU_ROUNDINGS = 2**-6
SIZES = {
    "num_hidden_layers": LAYERS,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
NOTICE = re.compile(
    r"load_in_4bit quantizes the experts of (?P<layers>\d+) layers, too \(fused tensors such as "
    r"(?P<name>[\w.]+)\): (?P<before>[\d.e+-]+) GiB become (?P<after>[\d.e+-]+) GiB\.  To keep "
    r"them unquantized, set BitsAndBytesConfig\(llm_int8_skip_modules=\['lm_head', 'experts'\]\)\."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Like the text model of 26B-A4B: all relations between its sizes, and random values."""
    path = tmp_path_factory.mktemp("experts")
    support.save_random("Gemma4 experts", path, **SIZES)
    return path


def load(path, kind="nf4-nested", dtype=torch.bfloat16, device="cpu", **options):
    from transformers import AutoModelForCausalLM

    options.setdefault("llm_int8_skip_modules", support.NOT_PACKED)
    config = {} if kind is None else {"quantization_config": support.quantization(kind, **options)}
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, device_map={"": device}, **config
    )
    return model.eval()


def load_saved(path, **options):
    from transformers import AutoModelForCausalLM

    options = {"device_map": {"": "cpu"}, "dtype": torch.bfloat16, **options}
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def experts_of(model, layer=0):
    return model.get_submodule("model").layers[layer].experts


def values_of(parameter, dtype=None):
    """The values that bitsandbytes dequantizes, rounded to a dtype: its own, if none is given.

    Its kernel for the CPU is wrong if the blocks do not begin with the rows (0.49 to 0.50.2).
    """
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(parameter.quant_state)
    shape, state.shape = state.shape, (state.shape.numel() // state.blocksize, state.blocksize)
    state.dtype = dtype or state.dtype
    return dequantize_4bit(parameter.data, state).view(shape)


def dequantized(experts, dtype=torch.bfloat16):
    """The module with the weights that bitsandbytes dequantizes."""
    plain = copy.deepcopy(experts)
    for name in FUSED:
        weight = values_of(getattr(experts, name)).to(dtype)
        plain._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
    return plain


def routed(tokens, dtype=torch.bfloat16, device="cpu", seed=0):
    """Inputs of an experts module: hidden states, the routed experts, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, 128, generator=generator).to(dtype)
    chosen = [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)]
    weights = torch.rand(tokens, TOP_K, generator=generator).to(dtype)
    return states.to(device), torch.stack(chosen).to(device), weights.to(device)


def implement(implementation, *modules):
    for module in modules:
        module.config._experts_implementation = implementation


def logits(model, tokens=7):
    with torch.no_grad():
        ids = torch.arange(3, 3 + tokens, device=model.device)[None]
        return model(input_ids=ids).logits.float().cpu()


def assert_near(found, expected, tolerance):
    assert found.isfinite().all()
    off = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    assert off <= tolerance, f"off by {off:.3g} of the size"


def messages(caplog, function, *args, **kwargs):
    caplog.clear()
    with caplog.at_level(logging.INFO):
        result = function(*args, **kwargs)
    return result, [r.getMessage() for r in caplog.records if r.name == OURS]


def needs_fp4():
    """Skips where bitsandbytes quantizes nothing to fp4 on the CPU (0.46)."""
    from bitsandbytes.functional import quantize_4bit

    try:
        quantize_4bit(torch.ones(64), quant_type="fp4")
    except RuntimeError as error:
        pytest.skip(str(error))


# -- loading ------------------------------------------------------------------------------------


@pytest.mark.regression("fused_experts_4bit", "the experts take .* bytes")
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@KINDS
def test_experts_are_quantized(folder, kind, quant_type, caplog):
    if quant_type == "fp4":
        needs_fp4()
    model, said = messages(caplog, load, folder, kind, bnb_4bit_quant_type=quant_type)
    parameters = {name: p for name, p in model.named_parameters() if ".experts." in name}
    values = LAYERS * EXPERTS * 3 * 128 * 64
    size = sum(p.untyped_storage().nbytes() for p in parameters.values())
    assert size == values // 2, f"the experts take {size} bytes"
    states = [p.quant_state for p in parameters.values()]
    assert {state.quant_type for state in states} == {quant_type}
    assert {state.nested for state in states} == {kind == "nf4-nested"}
    (said,) = (NOTICE.fullmatch(message) for message in said)
    assert int(said["layers"]) == LAYERS
    assert said["name"] in parameters
    for state in states:
        own = [state.absmax] + ([state.state2.absmax] if state.nested else [])
        size += sum(tensor.nbytes for tensor in own)
    assert float(said["before"]) == pytest.approx(2 * values / 2**30, rel=5e-3)
    assert float(said["after"]) == pytest.approx(size / 2**30, rel=5e-3)


@pytest.mark.regression("fused_experts_4bit", "has no attribute 'quant_state'")
def test_values_are_those_of_linear_layers(folder):
    """Each expert has the bytes and scales that bitsandbytes gives its matrix as nn.Linear."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model, plain = load(folder, "nf4"), load(folder, None)
    for layer, name in itertools.product(range(LAYERS), FUSED):
        whole = getattr(experts_of(model, layer), name)
        for found, matrix in zip(
            values_of(whole), getattr(experts_of(plain, layer), name), strict=True
        ):
            packed, state = quantize_4bit(matrix.contiguous(), quant_type="nf4")
            assert torch.equal(found, dequantize_4bit(packed, state))


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
@pytest.mark.parametrize("width", [48, 64, 1024], ids="inner size {}".format)
def test_experts_are_slices(width, kind):
    """1024: the maxima of an expert are whole blocks of double quantization."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    weight = torch.randn(5, 128, width, generator=torch.Generator().manual_seed(0))
    parameter = Params4bit(
        weight.bfloat16(), quant_type="nf4", compress_statistics=kind == "nf4-nested"
    ).to("cpu")
    whole = values_of(parameter)
    assert (whole - weight).norm() < 0.11 * weight.norm()
    packed = Packed(parameter)
    assert torch.equal(packed.whole(), whole)
    for expert in range(5):
        assert torch.equal(packed.whole(expert), whole[expert])
    chosen = torch.tensor([3, 0, 3])
    assert torch.equal(packed.several(chosen), whole[chosen])
    if packed.rows_are_blocks():
        below = whole[chosen].flatten(0, 1)
        assert torch.equal(dequantize_4bit(*packed.stacked(chosen)), below)
        beside = whole[chosen].transpose(0, 1).flatten(1)
        assert torch.equal(dequantize_4bit(*packed.stacked_inputs(chosen)), beside)


@pytest.mark.parametrize("skipped", ["experts", "model.layers.1"])
def test_experts_that_the_config_skips(folder, skipped, caplog):
    names = [*support.NOT_PACKED, skipped]
    model, said = messages(caplog, load, folder, llm_int8_skip_modules=names)
    packed = [is_packed(experts_of(model, layer).down_proj) for layer in range(LAYERS)]
    assert packed == ([False] * 3 if skipped == "experts" else [True, False, True])
    assert len(said) == (skipped != "experts")
    unquantized = load(folder, None)
    for layer in [i for i in range(LAYERS) if not packed[i]]:
        for name in FUSED:
            expected = getattr(experts_of(unquantized, layer), name)
            assert torch.equal(getattr(experts_of(model, layer), name), expected)


def test_experts_that_share_blocks(tmp_path, caplog):
    """The size of an expert is no multiple of the blocksize of 64."""
    support.save_random(
        "Gemma4 experts", tmp_path, **SIZES | {"hidden_size": 96, "moe_intermediate_size": 33}
    )
    skipped = [*support.NOT_PACKED, "model.layers"]
    importlib.import_module("transformers.integrations.bitsandbytes")  # keeps the function itself
    with pytest.MonkeyPatch.context() as patch:
        # every layer but the experts is too narrow for bitsandbytes on some CPUs
        patch.setattr(
            "transformers.quantizers.quantizers_utils.should_convert_module", lambda *_: True
        )
        model, said = messages(caplog, load, tmp_path, llm_int8_skip_modules=skipped)
    assert not any(map(is_packed, model.parameters()))
    (message,) = said
    assert "the experts of 3 layers are not quantized" in message
    assert "no multiple of the blocksize" in message
    model.set_experts_implementation("eager")
    assert logits(model).isfinite().all()


def test_other_models(tmp_path, monkeypatch):
    """Another model with fused experts: as without us, unless the gate lets it in."""
    importlib.import_module("transformers.models.gemma4.modeling_gemma4")  # the patch waits for it
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() > 2:
                torch.nn.init.normal_(parameter, std=0.05)
        model.to(torch.bfloat16).save_pretrained(tmp_path)
    skipped = ["lm_head", "gate"]
    closed = load(tmp_path, llm_int8_skip_modules=skipped)
    with gemma4_compat.disabled("fused_experts_4bit"):
        without = load(tmp_path, llm_int8_skip_modules=skipped)
    assert closed.state_dict().keys() == without.state_dict().keys()
    assert {p.dtype for n, p in closed.named_parameters() if ".experts." in n} == {torch.bfloat16}
    assert torch.equal(logits(closed), logits(without))

    before = Bnb4BitHfQuantizer._process_model_before_weight_loading

    def open_gate(self, model, *args, **kwargs):
        before(self, model, *args, **kwargs)
        fused_experts_4bit.quantize_while_loading(self, model, Qwen3MoeExperts)

    monkeypatch.setattr(Bnb4BitHfQuantizer, "_process_model_before_weight_loading", open_gate)
    ours = fused_experts_4bit.experts_forward(Qwen3MoeExperts.forward)
    monkeypatch.setattr(Qwen3MoeExperts, "forward", ours)
    opened = load(tmp_path, llm_int8_skip_modules=skipped)
    experts = [layer.mlp.experts for layer in opened.model.layers]
    assert all(is_packed(getattr(each, name)) for each in experts for name in FUSED)
    found = [logits(opened), logits(opened, 1)]
    for layer in opened.model.layers:
        layer.mlp.experts = dequantized(layer.mlp.experts)
    assert torch.equal(found[0], logits(opened))
    assert_near(found[1], logits(opened, 1), ROUNDINGS)


def test_a_subclass_with_a_forward_of_its_own(folder):
    from transformers import AutoConfig, Gemma4ForCausalLM
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
    from transformers.quantizers.auto import AutoHfQuantizer

    importlib.import_module("transformers.integrations.bitsandbytes")  # the patch waits for it

    class Subclass(Gemma4TextExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    with torch.device("meta"):
        model = Gemma4ForCausalLM(AutoConfig.from_pretrained(folder))
    model.model.layers[1].experts.__class__ = Subclass
    config = support.quantization("nf4", llm_int8_skip_modules=support.NOT_PACKED)
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model, device_map={"": "cpu"})
    names = [f"model.layers.{layer}.experts.down_proj" for layer in range(LAYERS)]
    assert [quantizer.param_needs_quantization(model, n) for n in names] == [True, False, True]


# -- forward ------------------------------------------------------------------------------------


@pytest.mark.regression("fused_experts_4bit", "has no attribute 'quant_state'")
@IMPLEMENTATIONS
@KINDS
@pytest.mark.parametrize("tokens", [2, 8, 9, 40])
def test_forward(folder, kind, implementation, tokens):
    """From 9 tokens on, whole tensors are dequantized; grouped_mm stands in for batched_mm."""
    experts = experts_of(load(folder, kind))
    plain = dequantized(experts)
    few = 2 * tokens * TOP_K <= EXPERTS
    implement(implementation, experts)
    if implementation != "eager":
        implement("batched_mm" if few else "grouped_mm", plain)
    with torch.no_grad():
        assert torch.equal(experts(*routed(tokens)), plain(*routed(tokens)))


@IMPLEMENTATIONS
def test_calls(folder, implementation):
    """By keyword; without any token; with inputs of another dtype."""
    experts = experts_of(load(folder))
    plain = dequantized(experts)
    implement(implementation, experts, plain)
    states, indices, weights = routed(20)
    names = {"hidden_states": states, "top_k_index": indices, "top_k_weights": weights}
    with torch.no_grad():
        assert torch.equal(experts(**names), experts(states, indices, weights))
        assert experts(states[:0], indices[:0], weights[:0]).shape == (0, 128)
        found = experts(states.float(), indices, weights)
        assert found.dtype == torch.float32
        assert torch.equal(found, experts(states, indices, weights).float())


@IMPLEMENTATIONS
@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_token(folder, kind, implementation, dtype):
    model = load(folder, kind, bnb_4bit_compute_dtype=dtype)
    for layer in range(LAYERS):
        experts = experts_of(model, layer)
        plain = dequantized(experts, dtype)
        implement(implementation, experts, plain)
        with torch.no_grad():
            for seed in range(4):
                inputs = routed(1, dtype, seed=seed)
                assert_near(experts(*inputs), plain(*inputs), ROUNDINGS)


def test_one_token_with_narrow_experts(moe_dir):
    """Blocks contain values of two rows, so that the 4-bit matrices cannot be put together."""
    model = load(moe_dir)
    experts = experts_of(model)
    plain = dequantized(experts)
    implement("batched_mm", experts, plain)
    with torch.no_grad():
        assert torch.equal(experts(*routed(1)), plain(*routed(1)))


@IMPLEMENTATIONS
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_compute_dtype(folder, implementation, tokens):
    """The inputs are cast to the compute dtype, as those of a Linear4bit are, and back."""
    experts = experts_of(load(folder, bnb_4bit_compute_dtype=torch.float32))
    plain = dequantized(experts, torch.float32)
    implement(implementation, experts, plain)
    states, indices, weights = routed(tokens)
    with torch.no_grad():
        found = experts(states, indices, weights)
        expected = plain(states.float(), indices, weights)
    assert found.dtype == torch.bfloat16
    assert_near(found, expected, 2**-8)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_compiled(folder, tokens):
    """One graph, except with releases of bitsandbytes whose own layers break it."""
    import bitsandbytes

    experts = experts_of(load(folder))
    implement("grouped_mm", experts)
    whole = Version(bitsandbytes.__version__) >= Version("0.50")
    torch._dynamo.reset()
    with torch.no_grad():
        expected = experts(*routed(tokens))
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=whole)
        assert torch.equal(compiled(*routed(tokens)), expected)


def test_logits(folder):
    """The whole model equals the model with dequantized experts."""
    model = load(folder)
    plain = copy.deepcopy(model)
    for layer in plain.model.layers:
        layer.experts = dequantized(layer.experts)
    assert torch.equal(logits(model, 40), logits(plain, 40))
    assert_near(logits(model, 1), logits(plain, 1), LAYERS * ROUNDINGS)


@pytest.mark.regression("fused_experts_4bit", "has no attribute 'quant_state'")
def test_as_good_as_linear_layers(folder):
    """The outputs are as near to those in bfloat16 as with each expert quantized as nn.Linear."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def cosine(model):
        assert model is linear or experts_of(model).down_proj.quant_state
        with torch.no_grad():
            found = experts_of(model)(*routed(200)).flatten().double()
        return torch.cosine_similarity(found, expected, 0).item()

    with torch.no_grad():
        expected = experts_of(load(folder, None))(*routed(200)).flatten().double()
    linear = load(folder, llm_int8_skip_modules=[*support.NOT_PACKED, "experts"])
    for layer in linear.model.layers:
        for name in FUSED:
            parameter = getattr(layer.experts, name)
            for matrix in parameter.data:
                packed, state = quantize_4bit(matrix, quant_type="nf4", compress_statistics=True)
                matrix.copy_(dequantize_4bit(packed, state))
    assert cosine(load(folder)) == pytest.approx(cosine(linear), abs=1e-3)
    assert cosine(linear) > 0.97


# -- training -----------------------------------------------------------------------------------


def gradients(experts, tokens, dtype=torch.bfloat16):
    states, indices, weights = routed(tokens, dtype)
    states, weights = states.requires_grad_(), weights.requires_grad_()
    experts(states, indices, weights).float().pow(2).sum().backward()
    return states.grad, weights.grad


@IMPLEMENTATIONS
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_gradients(folder, implementation, tokens):
    experts = experts_of(load(folder))
    plain = dequantized(experts)
    implement(implementation, experts, plain)
    if implementation == "batched_mm":
        implement("grouped_mm", plain)
    for found, expected in zip(gradients(experts, tokens), gradients(plain, tokens), strict=True):
        assert torch.equal(found, expected)


@IMPLEMENTATIONS
def test_autograd_keeps_no_dequantized_weights(folder, implementation):
    experts = experts_of(load(folder))
    implement(implementation, experts)
    states, *rest = routed(20)
    kept = []

    def pack(tensor):
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(states.requires_grad_(), *rest)
    assert kept, "the hooks outside the experts were not called"
    assert max(kept) < 128 * 64 * 2, "autograd keeps a dequantized expert"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(folder, reentrant):
    model = load(folder)

    def losses_and_gradients():
        model.zero_grad()
        model.train()
        embeddings = model.model.embed_tokens
        embeddings.weight.requires_grad_()
        ids = torch.arange(3, 15)[None]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach(), embeddings.weight.grad

    expected = losses_and_gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for found, before in zip(losses_and_gradients(), expected, strict=True):
        assert torch.equal(found, before)


# -- functions of users -------------------------------------------------------------------------


def gated(self, gates):
    gate, up = gates.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def loop(self, states, chosen, weights, gate_up=None, down=None):
    """The plain loop over the experts; the two functions read the matrices of one expert."""
    linear = torch.nn.functional.linear
    gate_up = gate_up or (lambda e: self.gate_up_proj[e])
    down = down or (lambda e: self.down_proj[e])
    out = torch.zeros_like(states)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        inner = gated(self, linear(states[tokens], gate_up(expert)))
        found = linear(inner, down(expert)) * weights[tokens, places, None]
        out = out.index_add(0, tokens, found.to(out.dtype))
    return out


def of_one_tensor(self, states, chosen, weights):
    """The fused tensors are read once."""
    matrices = self.gate_up_proj.__getitem__, self.down_proj.__getitem__
    return loop(self, states, chosen, weights, *matrices)


def of_slices(self, states, chosen, weights):
    """Two slices of each matrix, one of which begins inside it."""

    def gate_up(expert):
        half = self.intermediate_dim
        slices = self.gate_up_proj[expert, :half], self.gate_up_proj[expert, half:]
        return torch.cat(slices)

    return loop(self, states, chosen, weights, gate_up)


def of_halves(self, states, chosen, weights):
    """gate and up as two chunks of the fused tensor."""
    linear = torch.nn.functional.linear
    gates, ups = self.gate_up_proj.chunk(2, dim=1)
    out = torch.zeros_like(states)
    for token, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            state = states[token]
            inner = self.act_fn(linear(state, gates[expert])) * linear(state, ups[expert])
            found = linear(inner, self.down_proj[expert]) * weights[token, place]
            out = out.index_add(0, torch.tensor([token]), found[None].to(out.dtype))
    return out


def of_products(self, states, chosen, weights):
    """Transposed matrices, of the fused tensor and of an expert."""
    turned = self.gate_up_proj.transpose(1, 2)
    out = torch.zeros_like(states)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        inner = gated(self, states[tokens] @ turned[expert])
        found = inner @ self.down_proj[expert].t() * weights[tokens, places, None]
        out = out.index_add(0, tokens, found.to(out.dtype))
    return out


def of_all(self, states, chosen, weights):
    """Every expert for every token."""
    factors = torch.zeros(len(states), self.num_experts, dtype=weights.dtype)
    factors = factors.scatter(1, chosen, weights)
    inner = gated(self, torch.einsum("th,eih->tei", states, self.gate_up_proj))
    out = torch.einsum("tei,ehi->teh", inner, self.down_proj)
    return (out * factors[..., None]).sum(1).to(states.dtype)


def of_float32(self, states, chosen, weights):
    gate_up, down = self.gate_up_proj.to(torch.float32), self.down_proj.to(torch.float32)
    found = loop(
        self, states.float(), chosen, weights.float(), lambda e: gate_up[e], lambda e: down[e]
    )
    return found.to(states.dtype)


def in_bytes(self, states, chosen, weights):
    """A view of another dtype, saved by a function of the user's."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight.view(torch.uint8))
            return x @ weight.t()

        @staticmethod
        def backward(ctx, gradient):
            (weight,) = ctx.saved_tensors
            return gradient @ weight.view(torch.bfloat16), None

    out = torch.zeros_like(states)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        inner = gated(self, Product.apply(states[tokens], self.gate_up_proj[expert]))
        found = Product.apply(inner, self.down_proj[expert]) * weights[tokens, places, None]
        out = out.index_add(0, tokens, found.to(out.dtype))
    return out


def changed_in_place(self, states, chosen, weights):
    """A weight that is changed after it was read."""
    gate_up = self.gate_up_proj.detach()
    gate_up[:, 0].mul_(2)
    return loop(self, states, chosen, weights, lambda expert: gate_up[expert])


def of_parameters(self, states, chosen, weights):
    """The fused tensors as PyTorch lists them."""
    gate_up, down = self.parameters()
    assert [name for name, _ in self.named_parameters()] == ["gate_up_proj", "down_proj"]
    assert self._parameters["down_proj"] is down
    return loop(self, states, chosen, weights, lambda e: gate_up[e], lambda e: down[e])


def checkpointed(reentrant):
    def function(self, states, chosen, weights):
        from torch.utils.checkpoint import checkpoint

        def run(*inputs):
            return loop(self, *inputs)

        return checkpoint(run, states, chosen, weights, use_reentrant=reentrant)

    return function


FUNCTIONS = {
    "loop": loop,
    "read once": of_one_tensor,
    "slices": of_slices,
    "chunks": of_halves,
    "transposed": of_products,
    "einsum": of_all,
    "float32": of_float32,
    "bytes": in_bytes,
    "in place": changed_in_place,
    "parameters": of_parameters,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
}


@pytest.fixture
def register(monkeypatch):
    """Registers a function of a user's during the test."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def register(name, function):
        monkeypatch.setitem(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, name, function)

    return register


def trained(model, tokens=12):
    """Loss and gradients of the embeddings and of all norms."""
    parameters = {
        n: p
        for n, p in model.named_parameters()
        if "norm" in n or n.endswith("embed_tokens.weight")
    }
    assert len(parameters) > LAYERS
    model.train()
    model.zero_grad()
    for parameter in parameters.values():
        parameter.requires_grad_()
    ids = torch.arange(3, 3 + tokens)[None]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in parameters.items()}}


@pytest.mark.regression("fused_experts_4bit", "the experts are not in 4 bits")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_a_registered_function(folder, register, name):
    register("mine", FUNCTIONS[name])
    model = load(folder)
    assert is_packed(experts_of(model).down_proj), "the experts are not in 4 bits"
    plain = copy.deepcopy(model)
    for layer in plain.model.layers:
        layer.experts = dequantized(layer.experts)
        layer.experts.config = plain.config
    for each in (model, plain):
        each.config._experts_implementation = "mine"
    expected = trained(plain)
    found = trained(model)
    different = [n for n, value in expected.items() if not torch.equal(found[n], value)]
    assert not different
    assert all(value.abs().max() > 0 for value in expected.values())


@pytest.mark.parametrize("name", ["mine", "eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.regression("fused_experts_4bit", "the experts are not in 4 bits")
def test_a_registered_function_is_called(folder, register, name, tokens, trains):
    """Also under a name of transformers'; no other function is called, and the state is kept."""
    calls = []

    def mine(self, *inputs):
        calls.append(inputs)
        self.calls = getattr(self, "calls", 0) + 1
        return 2 * loop(self, *inputs)

    def not_mine(self, *inputs):
        raise AssertionError("another function was called")

    experts = experts_of(load(folder))
    assert is_packed(experts.down_proj), "the experts are not in 4 bits"
    plain = dequantized(experts)
    states, *rest = routed(tokens)
    for each in ["eager", "grouped_mm", "batched_mm"]:
        register(each, not_mine)
    register(name, mine)
    implement(name, experts)
    with torch.set_grad_enabled(trains):
        found = experts(states.requires_grad_(trains), *rest)
    assert torch.equal(found, 2 * loop(plain, states, *rest))
    (inputs,) = calls
    assert all(torch.equal(a, b) for a, b in zip(inputs, (states, *rest), strict=True))
    assert experts.calls == 1


@pytest.mark.parametrize("other", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@IMPLEMENTATIONS
def test_other_registered_functions_are_not_called(folder, register, implementation, other, tokens):
    """A user's function replaces the one of that name only."""
    if other == implementation:
        pytest.skip("this is the function to call")
    experts = experts_of(load(folder))
    implement(implementation, experts)
    with torch.no_grad():
        expected = experts(*routed(tokens))
        register(other, lambda *_: pytest.fail("another function was called"))
        assert torch.equal(experts(*routed(tokens)), expected)


def test_an_unknown_name(folder):
    experts = experts_of(load(folder))
    implement("unknown", experts)
    for tokens in (1, 3, 40):
        with torch.no_grad(), pytest.raises(KeyError, match="unknown"):
            experts(*routed(tokens))


@IMPLEMENTATIONS
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("what", ["gate of the class", "gate", "activation", "forward of it"])
def test_gates_of_a_user(folder, monkeypatch, implementation, tokens, what):
    """The loop of transformers does not use ``_apply_gate``; the other functions do."""
    experts = experts_of(load(folder))
    plain = dequantized(experts)
    few = 2 * tokens * TOP_K <= EXPERTS
    implement(implementation, experts, plain)
    if implementation != "eager":
        implement("batched_mm" if few else "grouped_mm", plain)

    def own(self, gates):
        return gated(self, gates).tanh()

    before = experts(*routed(tokens))
    if what == "gate of the class":
        monkeypatch.setattr(type(experts), "_apply_gate", own)
    for each in (experts, plain):
        if what == "gate":
            each._apply_gate = own.__get__(each)
        elif what == "activation":
            each.act_fn = torch.nn.ReLU()
        elif what == "forward of it":
            each.act_fn = copy.copy(each.act_fn)
            each.act_fn.forward = torch.nn.functional.relu
    with torch.no_grad():
        found = experts(*routed(tokens))
        assert_near(found, plain(*routed(tokens)), ROUNDINGS if tokens == 1 else 0)
    is_used = implementation != "eager" or "gate" not in what
    off = (found.float() - before.float()).norm() / before.float().norm()
    assert (off > 4 * ROUNDINGS) == is_used


def test_a_class_with_another_forward(folder, monkeypatch, caplog):
    """Its experts stay unquantized, as without us."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

    monkeypatch.setattr(Gemma4TextExperts, "forward", loop)
    model, said = messages(caplog, load, folder)
    assert {p.dtype for p in experts_of(model).parameters()} == {torch.bfloat16}
    assert "another program replaced Gemma4TextExperts.forward" in "".join(said)
    assert logits(model).isfinite().all()


# -- files and copies ---------------------------------------------------------------------------


@pytest.mark.regression("fused_experts_4bit", "no statistics of the experts in the file")
@KINDS
def test_save_and_load(folder, kind, tmp_path, caplog):
    from safetensors.torch import load_file

    model = load(folder, kind)
    model.save_pretrained(tmp_path / "first")
    tensors = load_file(tmp_path / "first" / "model.safetensors")
    prefix = "model.layers.0.experts.down_proj."
    endings = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    assert endings, "no statistics of the experts in the file"
    linear = "model.layers.0.mlp.down_proj.weight."
    assert endings == {name.removeprefix(linear) for name in tensors if name.startswith(linear)}
    again, said = messages(caplog, load_saved, tmp_path / "first")
    assert said == []
    assert is_packed(experts_of(again).down_proj)
    assert experts_of(again).compute_dtype == torch.bfloat16
    for tokens in (1, 7, 40):
        assert torch.equal(logits(again, tokens), logits(model, tokens))
    again.save_pretrained(tmp_path / "second")
    second = load_file(tmp_path / "second" / "model.safetensors")
    assert tensors.keys() == second.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in tensors.items())


def test_names_are_those_of_bitsandbytes(folder):
    """bitsandbytes' parametrisation of a parameter in 4 bits has the same state dict."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    from torch import nn

    other = nn.Module()
    other.down_proj = nn.Parameter(experts_of(load(folder, None)).down_proj.detach().clone())
    parametrize.replace_parameter_4bit(
        other, "down_proj", compress_statistics=True, quant_type="nf4"
    )
    expected = other.state_dict()
    own = experts_of(load(folder)).state_dict()
    found = {name: tensor for name, tensor in own.items() if name.startswith("down_proj")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_files_with_unquantized_experts(folder, tmp_path, caplog):
    """The file decides, not the flag: a checkpoint that was written without this patch."""
    with gemma4_compat.disabled("fused_experts_4bit"):
        model = load(folder)
        model.save_pretrained(tmp_path)
    assert not is_packed(experts_of(model).down_proj)
    again, said = messages(caplog, load_saved, tmp_path)
    assert {p.dtype for p in experts_of(again).parameters()} == {torch.bfloat16}
    assert torch.equal(logits(again), logits(model))
    (message,) = said
    assert "because the checkpoint has them unquantized" in message


def test_switching_the_patch_off_is_said(folder, caplog):
    model = load(folder)
    caplog.clear()
    with gemma4_compat.disabled("fused_experts_4bit"):
        [said] = [r.getMessage() for r in caplog.records if r.name.endswith("fused_experts_4bit")]
    assert "a saved file cannot be loaded" in said
    assert logits(model).isfinite().all()
    del model
    gc.collect()
    caplog.clear()
    with gemma4_compat.disabled("fused_experts_4bit"):
        assert not [r for r in caplog.records if r.name.endswith("fused_experts_4bit")]


def test_files_without_the_patch(folder, tmp_path):
    """Files with experts in 4 bits never become random experts: a forward without us raises."""
    load(folder).save_pretrained(tmp_path)
    error = r"(?i)shape|size|mismatch|Byte"
    with gemma4_compat.disabled("fused_experts_4bit"), pytest.raises(Exception, match=error):
        logits(load_saved(tmp_path))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(folder, how):
    import pickle

    model = load(folder)
    expected = logits(model), logits(model, 1)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    model.model.layers[0].experts.down_proj.data.zero_()
    assert type(experts_of(other)) is type(experts_of(model))
    assert torch.equal(logits(other), expected[0])
    assert torch.equal(logits(other, 1), expected[1])


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_dequantize(folder, dtype):
    model = load(folder)
    expected = [dequantized(layer.experts, dtype or torch.bfloat16) for layer in model.model.layers]
    model = model.dequantize(dtype=dtype)
    for layer, plain in enumerate(expected):
        experts = experts_of(model, layer)
        for name in FUSED:
            assert torch.equal(getattr(experts, name), getattr(plain, name))
    assert logits(model.to(dtype or torch.bfloat16)).isfinite().all()


# -- split models -------------------------------------------------------------------------------


def offloaded(model, folder, *, disk):
    from accelerate import dispatch_model

    where = "disk" if disk else "cpu"
    device_map = {"": "cpu", **{f"model.layers.{i}.experts": "disk" for i in range(LAYERS) if disk}}
    if disk:
        return dispatch_model(
            model, device_map, main_device="cpu", offload_dir=str(folder), force_hooks=True
        )
    from accelerate import cpu_offload

    assert where == "cpu"
    for layer in model.model.layers:
        cpu_offload(layer.experts, execution_device="cpu")
    return model


@pytest.mark.parametrize("disk", [False, True], ids=["cpu", "disk"])
@KINDS
def test_offloaded(folder, tmp_path, kind, disk):
    model = load(folder, kind)
    expected = {tokens: logits(model, tokens) for tokens in (1, 7, 40)}
    model.save_pretrained(tmp_path / "whole")
    model = offloaded(model, tmp_path / "offload", disk=disk)
    assert experts_of(model).down_proj.is_meta
    for _ in range(2):
        for tokens, logits_before in expected.items():
            assert torch.equal(logits(model, tokens), logits_before)
    assert experts_of(model).down_proj.is_meta


@pytest.mark.parametrize("disk", [False, True], ids=["cpu", "disk"])
def test_offloaded_models_are_saved(folder, tmp_path, disk):
    from safetensors.torch import load_file

    model = load(folder)
    model.save_pretrained(tmp_path / "whole")
    offloaded(model, tmp_path / "offload", disk=disk).save_pretrained(tmp_path / "split")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    split = load_file(tmp_path / "split" / "model.safetensors")
    assert whole.keys() == split.keys()
    assert all(torch.equal(split[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("disk", [False, True], ids=["cpu", "disk"])
def test_offloaded_models_are_dequantized(folder, tmp_path, disk):
    model = load(folder)
    expected = dequantized(experts_of(model))
    split = offloaded(model, tmp_path, disk=disk).dequantize()
    experts = experts_of(split)
    with torch.no_grad():
        assert torch.equal(experts(*routed(7)), expected(*routed(7)))


def parts_of(model):
    hooks = (layer.experts._hf_hook for layer in model.model.layers)
    return [next(filter(None, map(blocks.part_of, hooks_of_one(hook)))) for hook in hooks]


def hooks_of_one(hook):
    return getattr(hook, "hooks", [hook])


@KINDS
def test_chosen_experts(folder, kind):
    """Experts that are copied have the same values, in 4 bits."""
    experts = experts_of(load(folder, kind))
    numbers = torch.tensor([5, 0, 31, 5])
    for name in FUSED:
        packed = Packed(getattr(experts, name))
        copied = packed.chosen(numbers, packed.chosen_state(numbers))
        assert torch.equal(copied.whole(), packed.whole()[numbers])


@pytest.mark.parametrize("in_place", [False, True])
def test_offloaded_experts_are_read_in_place(folder, monkeypatch, in_place):
    """The CPU stands in for the GPU; without page-locked memory, a block is copied."""
    from accelerate import cpu_offload

    monkeypatch.setattr(blocks, "STREAMED_TO", ("cpu", "cuda"))
    if in_place:
        monkeypatch.setattr(blocks, "page_lock", lambda host, device=None: True)
        monkeypatch.setattr(blocks, "on_gpu", lambda host, device: host)
    model = load(folder)
    expected = {tokens: logits(model, tokens) for tokens in (1, 7, 40)}
    model = cpu_offload(model, execution_device=torch.device("cpu"))
    experts, seen = experts_of(model), []
    experts.act_fn.register_forward_pre_hook(
        lambda *_: seen.append(experts.down_proj.untyped_storage().data_ptr())
    )
    for _ in range(2):
        for tokens, before in expected.items():
            assert torch.equal(logits(model, tokens), before)
            assert all(parameter.is_meta for parameter in model.parameters())
    layers = [part.layer for part in parts_of(model)]
    assert all(isinstance(layer, blocks.Experts) for layer in layers)
    assert {bool(layer.on_device) for layer in layers} == {in_place}
    assert (set(seen) == {layers[0].host.data_ptr()}) is in_place


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_training_with_offloaded_experts(folder, implementation):
    from accelerate import cpu_offload

    model = load(folder)
    experts = experts_of(model)
    implement(implementation, experts)
    expected = gradients(experts, 20)
    cpu_offload(experts, execution_device="cpu")
    for found, before in zip(gradients(experts, 20), expected, strict=True):
        assert torch.equal(found, before)


# -- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.cuda
@IMPLEMENTATIONS
@KINDS
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_on_cuda(folder, kind, implementation, tokens):
    experts = experts_of(load(folder, kind, device=0))
    plain = dequantized(experts)
    implement(implementation, experts, plain)
    with torch.no_grad():
        inputs = routed(tokens, device="cuda")
        assert_near(experts(*inputs), plain(*inputs), GPU_ROUNDINGS)


def wide(kind, blocksize=64, dtype=torch.bfloat16):
    """The experts of one layer of 26B-A4B, but 16 instead of 128."""
    import transformers.integrations.bitsandbytes
    import transformers.quantizers.quantizer_bnb_4bit  # noqa: F401  (the patch waits for both)
    from bitsandbytes.nn import Params4bit
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

    sizes = {"hidden_size": 2816, "moe_intermediate_size": 704, "num_experts": 16}
    config = Gemma4TextConfig(enable_moe_block=True, top_k_experts=8, **sizes)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.device("cuda"):
        experts = Gemma4TextExperts(config).to(dtype)
    for name in FUSED:
        value = torch.empty(experts._parameters[name].shape, dtype=dtype, device="cuda")
        like = Params4bit(
            torch.empty(0),
            requires_grad=False,
            blocksize=blocksize,
            compress_statistics=kind == "nf4-nested",
            quant_type="nf4",
        )
        value.normal_(0, 0.02, generator=generator)
        experts._parameters[name] = quantized(value, like)
    return experts


def routed_wide(tokens, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, 2816, generator=generator).to(dtype)
    chosen = [torch.randperm(16, generator=generator)[:8] for _ in range(tokens)]
    weights = torch.rand(tokens, 8, generator=generator)
    return states.cuda(), torch.stack(chosen).cuda(), weights.cuda()


def in_kernels(experts, states, chosen, weights):
    packed = {name: Packed(getattr(experts, name), states.dtype) for name in FUSED}
    with torch.no_grad():
        found = experts_kernel.routed(experts, packed, states, chosen, weights)
    assert found is not None, "the kernels were not used"
    return found


def in_float32(experts, states, chosen, weights):
    """The same computation without any rounding to the compute dtype."""
    gate_up, down = (values_of(getattr(experts, name), torch.float32) for name in FUSED)
    outputs = []
    for state, numbers, factors in zip(states.float(), chosen, weights.float(), strict=True):
        inner = experts._apply_gate(gate_up[numbers] @ state)
        outputs.append(factors @ (down[numbers] @ inner[..., None])[..., 0])
    return torch.stack(outputs)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_kernels(kind, dtype, tokens):
    """The values of the code and the inner vector are rounded to the compute dtype, each once."""
    experts = wide(kind, dtype=dtype)
    inputs = routed_wide(tokens, dtype)
    found = in_kernels(experts, *inputs)
    assert found.dtype == dtype
    assert_near(found, in_float32(experts, *inputs), 2**-7 if dtype == torch.bfloat16 else 2**-10)
    assert torch.equal(found, in_kernels(experts, *inputs))
    one_by_one = [in_kernels(experts, *(each[i : i + 1] for each in inputs)) for i in range(tokens)]
    assert torch.equal(found, torch.cat(one_by_one))


@pytest.mark.cuda
def test_kernels_skip_absent_experts():
    """With expert parallelism, the number of experts means an expert of another process."""
    experts = wide("nf4-nested")
    states, chosen, weights = routed_wide(2)
    absent, without = chosen.clone(), weights.clone()
    absent[0, 3], without[0, 3] = 16, 0
    found = in_kernels(experts, states, absent, weights)
    assert torch.equal(found, in_kernels(experts, states, chosen, without))


@pytest.mark.cuda
@KINDS
def test_kernels_of_copied_experts(kind):
    """Experts in host memory are copied first; their maxima are dequantized then."""
    experts = wide(kind)
    inputs = routed_wide(2)
    expected = in_kernels(experts, *inputs)
    for name in FUSED:
        setattr(getattr(experts, name), IN_HOST_MEMORY, True)
    assert torch.equal(in_kernels(experts, *inputs), expected)


@pytest.mark.cuda
def test_hooks_of_the_activation_run():
    experts = wide("nf4")
    expected = in_float32(experts, *routed_wide(1))
    seen = []
    experts.act_fn.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        found = experts(*routed_wide(1))
    assert seen
    assert_near(found, expected, GPU_ROUNDINGS)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("tokens", [1, 4])
def test_without_synchronization(folder, kind, tokens):
    """Few tokens need nothing from the GPU, so that a CUDA graph can hold the forward."""
    experts = experts_of(load(folder, kind, device=0))
    implement("grouped_mm", experts)
    inputs = routed(tokens, device="cuda")
    with torch.no_grad():
        expected = experts(*inputs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = experts(*inputs)
        for seed in range(3):
            new = routed(tokens, device="cuda", seed=seed)
            for old, value in zip(inputs, new, strict=True):
                old.copy_(value)
            graph.replay()
            assert torch.equal(captured, experts(*new))
    assert expected.isfinite().all()


@pytest.mark.cuda
def test_loading_peak(tmp_path):
    """The device never holds more than one fused tensor unquantized."""
    support.save_random(
        "Gemma4 experts", tmp_path, **SIZES | {"num_experts": 128, "moe_intermediate_size": 704}
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = load(tmp_path, device=0)
    peak, resident = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    one = 128 * 2 * 704 * 128 * 2
    assert peak - resident <= 1.2 * one
    assert is_packed(experts_of(model).down_proj)


def captured_and_eager(model, tokens=24):
    ids = torch.arange(5, 17, device=model.device)[None]

    def generate(**options):
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            cache_implementation="static",
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        return torch.stack(output.logits).cpu()

    eager = generate(disable_compile=True)
    generate()
    return generate(), eager


def captures(model):
    return sum(len(memory.steps) for memory in model._decoding.memories)


@pytest.mark.cuda
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@KINDS
def test_captured_decoding(folder, kind, implementation):
    model = load(folder, kind, device=0)
    model.set_experts_implementation(implementation)
    found, expected = captured_and_eager(model)
    assert captures(model), "nothing was captured"
    assert_near(found, expected, 0 if deterministic() else ROUNDINGS)


@pytest.mark.cuda
@KINDS
def test_captured_decoding_with_experts_on_the_cpu(folder, kind):
    from accelerate import dispatch_model

    model = load(folder, kind, device=0)
    expected, _ = captured_and_eager(model)
    packed = sum(p.nbytes for layer in model.model.layers for p in layer.experts.parameters())
    gc.collect()  # models of other tests
    before, locked = torch.cuda.memory_allocated(), page_locked.locked()
    names = {f"model.layers.{i}.experts": "cpu" for i in range(LAYERS)}
    model = dispatch_model(
        model, {"": 0, **names}, main_device=0, skip_keys=model._skip_keys_device_placement
    )
    found, eager = captured_and_eager(model)
    assert captures(model), "nothing was captured"
    near = 0 if deterministic() else ROUNDINGS
    assert_near(found, eager, near)
    assert_near(found, expected, near)
    assert torch.cuda.memory_allocated() < before - packed // 2
    assert all(part.layer.in_place for part in parts_of(model))
    del model
    gc.collect()
    assert page_locked.locked() == locked


@pytest.mark.cuda
def test_page_locked_memory_lives_as_long_as_its_views():
    gc.collect()  # models of other tests
    before = page_locked.locked()
    memory = page_locked.page_locked_memory(2**20, torch.device("cuda:0"))
    assert memory.is_pinned()
    view = memory[512:].view(torch.int64)
    del memory
    gc.collect()
    assert page_locked.locked() == before + 2**20
    on_gpu = page_locked.on_gpu(view, torch.device("cuda:0")).view(torch.int64)
    view.fill_(7)
    assert torch.equal(on_gpu.sum().cpu(), view.sum())
    del view
    gc.collect()
    assert page_locked.locked() == before + 2**20
    del on_gpu
    gc.collect()
    assert page_locked.locked() == before


def deterministic():
    """Before bitsandbytes 0.50, the 4-bit kernel for one row is not deterministic."""
    import bitsandbytes

    return Version(bitsandbytes.__version__) >= Version("0.50")
