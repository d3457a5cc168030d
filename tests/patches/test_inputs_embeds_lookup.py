"""``inputs_embeds`` give the same logits as their token ids, also in an offloaded model."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemma4_compat.tiny import image_inputs, text_inputs
from tests.support import config_of, load_model, split

NOT_EXACT = r"do not exactly match the embedding weights"
#: If embed_tokens is offloaded, the search reads a weight on meta.
META = r"on device meta is not on the expected device|exactly match the embedding weights"
EMBEDDINGS = "model.language_model.embed_tokens"
MAPS = {
    "embeddings": {EMBEDDINGS: "disk", "": "cpu"},
    "both": {EMBEDDINGS: "disk", f"{EMBEDDINGS}_per_layer": "disk", "": "cpu"},
}


class Largest(TorchDispatchMode):
    """Measures the size of the largest tensor that is created, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [t.untyped_storage().nbytes() for t in tree_leaves(result) if torch.is_tensor(t)]
        self.nbytes = max([self.nbytes, *made])
        return result


def text_model(dtype=torch.float32, **options):
    """A model with per-layer embeddings that differ between tokens."""
    torch.manual_seed(0)
    model_class, config = config_of("Gemma4", **options)
    return model_class(config).to(dtype).eval()


def embeds(model, inputs):
    """The inputs with ``inputs_embeds`` in place of ``input_ids``."""
    found = model.get_input_embeddings()(inputs["input_ids"]).detach()
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    return {**rest, "inputs_embeds": found}


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.regression("inputs_embeds_lookup", NOT_EXACT)
@pytest.mark.parametrize("make", [text_inputs, image_inputs])
def test_same_as_from_ids(model_dir, make):
    model = load_model(model_dir)
    inputs = make(model.config)
    assert torch.equal(logits(model, embeds(model, inputs)), logits(model, inputs))


@pytest.mark.regression("inputs_embeds_lookup", META)
@pytest.mark.parametrize("offloaded", MAPS)
def test_offloaded(model_dir, tmp_path, offloaded):
    whole = load_model(model_dir)
    model = split(load_model(model_dir), tmp_path, MAPS[offloaded])
    inputs = text_inputs(model.config)
    for _ in range(2):
        assert torch.equal(logits(model, embeds(model, inputs)), logits(whole, inputs))
    assert model.model.language_model.embed_tokens.weight.is_meta


@pytest.mark.regression("inputs_embeds_lookup", NOT_EXACT)
def test_generate():
    model = text_model(torch.bfloat16)
    inputs = {"input_ids": torch.arange(1, 13)[None], "attention_mask": torch.ones(1, 12).long()}
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, **options)[:, 12:]
    assert torch.equal(model.generate(**embeds(model, inputs), **options), expected)


@pytest.mark.regression("inputs_embeds_lookup", r"a tensor of \d+ bytes")
def test_memory():
    """In float32 the search of transformers succeeds, but it needs much memory."""
    model = text_model()
    ids = torch.arange(1, 101).repeat(1, 20)
    inputs = embeds(model, {"input_ids": ids})
    expected = model.model.get_per_layer_inputs(ids, None)
    with Largest() as largest:
        found = model.model.get_per_layer_inputs(None, inputs["inputs_embeds"])
    assert torch.equal(found, expected)
    assert largest.nbytes < 2 * expected.nbytes, f"a tensor of {largest.nbytes} bytes"


@pytest.mark.regression("inputs_embeds_lookup", NOT_EXACT)
@pytest.mark.parametrize("hidden_size", [128, 96, 54])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_tokens(dtype, hidden_size):
    """Every token is found, even if the size of a row is not a multiple of eight bytes."""
    model = text_model(dtype, hidden_size=hidden_size).model
    ids = torch.randperm(128, generator=torch.Generator().manual_seed(1)).view(2, 64)
    found = model.get_per_layer_inputs(None, model.embed_tokens(ids))
    assert torch.equal(found, model.get_per_layer_inputs(ids, None))


@pytest.mark.regression("inputs_embeds_lookup", NOT_EXACT)
def test_gradients():
    """The embeddings and the per-layer embeddings get the same gradients as with token ids."""
    model = text_model(torch.bfloat16)
    ids = torch.arange(1, 13)[None]
    found = []
    for name in ("input_ids", "inputs_embeds"):
        model.zero_grad()
        given = embeds(model, {"input_ids": ids})["inputs_embeds"].requires_grad_()
        if name == "input_ids":
            hook = model.model.embed_tokens.register_forward_hook(lambda *_, given=given: given)
            model(input_ids=ids).logits.float().square().mean().backward()
            hook.remove()
        else:
            model(inputs_embeds=given).logits.float().square().mean().backward()
        found.append((given.grad, model.model.embed_tokens_per_layer.weight.grad))
    for one, other in zip(*found, strict=True):
        assert one.abs().sum() > 0
        assert torch.equal(one, other)


def test_factor_of_transformers():
    """Rows times the unrounded factor are found as well, as they are without the patch."""
    model = text_model(torch.bfloat16).model
    ids = torch.arange(1, 13)[None]
    given = model.embed_tokens.weight[ids] * model.config.hidden_size**0.5
    found = model.get_per_layer_inputs(None, given)
    assert torch.equal(found, model.get_per_layer_inputs(ids, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_token(dtype):
    model = text_model(dtype).model
    given = model.embed_tokens(torch.arange(1, 13)[None]).detach().clone()
    given[0, 3, 5] *= 1.5
    with pytest.raises(RuntimeError, match=NOT_EXACT):
        model.get_per_layer_inputs(None, given)


@pytest.mark.regression("inputs_embeds_lookup", r"DID NOT RAISE")
def test_two_tokens_and_none():
    """The lookup rejects a token with two matches together with a token without a match."""
    model = text_model().model
    with torch.no_grad():
        model.embed_tokens.weight[9] = model.embed_tokens.weight[5]
    given = model.embed_tokens(torch.tensor([[4, 5, 6]])).detach().clone()
    given[0, 2] *= 1.5
    with pytest.raises(RuntimeError, match=r"tokens 5 and 9 share|exactly match"):
        model.get_per_layer_inputs(None, given)


@pytest.mark.regression("inputs_embeds_lookup", NOT_EXACT)
def test_two_tokens_that_are_alike():
    model = text_model().model
    with torch.no_grad():
        for table in (model.embed_tokens.weight, model.embed_tokens_per_layer.weight):
            table[9] = table[5]
    ids = torch.tensor([[4, 9, 6, 5]])
    found = model.get_per_layer_inputs(None, model.embed_tokens(ids))
    assert torch.equal(found, model.get_per_layer_inputs(ids, None))


def test_two_tokens_that_are_not():
    model = text_model().model
    with torch.no_grad():
        model.embed_tokens.weight[9] = model.embed_tokens.weight[5]
    with pytest.raises(RuntimeError, match=r"tokens 5 and 9 share|exactly match"):
        model.get_per_layer_inputs(None, model.embed_tokens(torch.tensor([[4, 5, 6]])))


def test_models_without_per_layer_embeddings():
    model = text_model(hidden_size_per_layer_input=0)
    given = embeds(model, {"input_ids": torch.arange(1, 13)[None]})["inputs_embeds"]
    with pytest.raises(RuntimeError, match="does not support per-layer embeddings"):
        model.model.get_per_layer_inputs(None, given)


@pytest.mark.cuda
@pytest.mark.regression("inputs_embeds_lookup", META)
def test_on_a_gpu(model_dir):
    whole = load_model(model_dir, device_map={"": 0})
    device_map = {"": 0, EMBEDDINGS: "cpu", f"{EMBEDDINGS}_per_layer": "cpu"}
    model = load_model(model_dir, device_map=device_map)
    inputs = {name: value.to(0) for name, value in text_inputs(model.config).items()}
    assert torch.equal(logits(model, embeds(model, inputs)), logits(whole, inputs))


def test_hooks_of_a_user_do_not_run(model_dir):
    """transformers reads the weight of the embedding, without its hooks."""
    model = load_model(model_dir).model.language_model
    embeds = model.embed_tokens(torch.tensor([[3, 4, 5]]))
    calls = []
    model.embed_tokens.register_forward_hook(lambda *_: calls.append(torch.rand(1)))
    model.embed_tokens.register_forward_pre_hook(lambda *_: calls.append(torch.rand(1)))
    state = torch.get_rng_state()
    model.get_per_layer_inputs(None, embeds)
    assert not calls
    assert torch.equal(torch.get_rng_state(), state)
