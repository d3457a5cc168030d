"""The next captured step begins before the answer to whether the sequences have ended.

What is generated, and what a user sees of it, is compared with the same steps without the patch.
The CPU stands in for a GPU, unless a test is marked ``cuda``.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from packaging.version import Version

import gemma4_compat
from gemma4_compat.model.caches import cache_name
from gemma4_compat.runtime.capture import decoding
from tests.pretended_gpu import pretend
from tests.support import load_model, new_model

transformers = pytest.importorskip("transformers")
if Version(transformers.__version__) < Version("5.17"):
    pytest.skip("stop checks are deferred since transformers 5.17", allow_module_level=True)

TOKENS = 14  # the sliding window has 8
PLACES = ["pretended", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=PLACES)
def model(request, model_dir, monkeypatch):
    if request.param == "cuda":
        return load_model(model_dir, "nf4", {"": 0})
    pretend(monkeypatch)
    return new_model(model_dir)


class Tokens:
    """A streamer's tokenizer: notes the tokens, and how many steps have begun when each arrives."""

    def __init__(self, begun=()):
        self.begun, self.tokens, self.moments = begun, [], []

    def decode(self, tokens, **options):
        if len(tokens) > len(self.tokens):  # the last call of a streamer has no new ones
            self.moments.append(len(self.begun))
        self.tokens = list(tokens)
        return ""


def streamer_to(tokens):
    return transformers.TextStreamer(tokens, skip_prompt=True)


@pytest.fixture
def begun(monkeypatch):
    """A list that gets an entry when a step of one token begins."""
    steps, original = [], decoding.Decoder.__call__

    def call(self, **inputs):
        steps.append(inputs["input_ids"])
        return original(self, **inputs)

    monkeypatch.setattr(decoding.Decoder, "__call__", call)
    return steps


def generate(model, batch=1, tokens=TOKENS, **options):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 400, (batch, 5), generator=generator).to(model.device)
    given = {"do_sample": False, "cache_implementation": "static", "pad_token_id": 0, **options}
    given["repetition_penalty"] = 5.0  # else random weights repeat one token
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **given)


def warm(model, **options):
    """Capture the steps that the next call replays."""
    generate(model, **options)


def late_token(tokens):
    """The token whose first place is the last one, but the end: one that a text can end with."""
    generated = tokens[5:-2].tolist()
    return max(generated, key=generated.index)


def without():
    return gemma4_compat.disabled("deferred_stop_check")


def random_state(model):
    """The state of the generator that samples."""
    return torch.cuda.get_rng_state(model.device)


@pytest.mark.regression("deferred_stop_check", r"it waits for Python between two")
def test_the_next_step_has_begun_when_a_token_arrives(model, begun):
    warm(model)
    begun.clear()
    arrived = Tokens(begun)
    generate(model, streamer=streamer_to(arrived), eos_token_id=None)
    ahead = [steps - token for token, steps in enumerate(arrived.moments)]
    # The first step follows the prompt, and the last one is known to be the last.
    assert ahead[2:-1] == [1] * (TOKENS - 3), "it waits for Python between two steps"
    assert len(begun) == TOKENS - 1  # max_new_tokens ends the text: no step too many


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_text_that_ends(model, begun, batch, sampled):
    """The same tokens, streamed and returned, and the same random numbers afterwards."""
    options = {"batch": batch, "do_sample": sampled, "top_k": 50}
    torch.manual_seed(1)
    all_tokens = generate(model, **options, eos_token_id=None)
    ends = [late_token(row) for row in all_tokens]

    def run(streamed):
        torch.manual_seed(1)
        arrived = Tokens()
        streamer = streamer_to(arrived) if streamed else None
        tokens = generate(model, **options, eos_token_id=ends, streamer=streamer)
        return tokens, random_state(model), arrived.tokens

    for streamed in (False, True) if batch == 1 else (False,):
        with without():
            expected = run(streamed)
        warm(model, **options)
        begun.clear()
        found = run(streamed)
        steps = found[0].shape[1] - 5
        assert 4 < steps < TOKENS
        assert len(begun) == steps, "the last of them is one too many"
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert found[2] == expected[2]


def test_random_numbers_that_others_draw_are_not_drawn_again(model):
    torch.manual_seed(1)
    options = {"do_sample": True, "top_k": 50}
    end = late_token(generate(model, **options, eos_token_id=None)[0])
    warm(model, **options)

    class Drawing(Tokens):
        def decode(self, tokens, **options):
            torch.rand(3, device=model.device)
            self.state = random_state(model)
            return ""

    torch.manual_seed(1)
    drawing = Drawing()
    generate(model, **options, eos_token_id=end, streamer=streamer_to(drawing))
    assert torch.equal(random_state(model), drawing.state)


class Counting(transformers.StoppingCriteria):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class CountingProcessor(transformers.LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


class CountingEnd(transformers.generation.stopping_criteria.EosTokenCriteria):
    """A subclass that only adds state to what transformers has."""


def counting_tokens(model):
    calls = []

    def allowed(batch, ids):
        calls.append(ids)
        return range(model.config.get_text_config().vocab_size)

    return {"prefix_allowed_tokens_fn": allowed}, lambda: len(calls)


def counting_criterion(model):
    criterion = Counting()
    return {"stopping_criteria": [criterion]}, lambda: criterion.calls


def counting_processor(model):
    processor = CountingProcessor()
    return {"logits_processor": [processor]}, lambda: processor.calls


def own_subclass(model):
    criterion = CountingEnd(torch.tensor([1], device=model.device))
    return {"stopping_criteria": [criterion]}, lambda: 0


def own_method(name):
    def case(model):
        calls, original = [], getattr(model, name)

        def method(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        setattr(model, name, method)
        return {}, lambda: len(calls)

    return case


def streamer(model):
    """It may change the model between two steps, such as its adapter."""

    class Streamer(transformers.TextStreamer):
        def put(self, tokens):
            moments.append(len(model.begun))

    moments = []
    return {"streamer": Streamer(None)}, lambda: tuple(moments)


def hook(model):
    calls = []
    model.register_forward_hook(lambda *args: calls.append(args))
    return {}, lambda: len(calls)


def a_returned_cache(model):
    return {"return_dict_in_generate": True}, lambda: 0


def a_cache_of_the_user(model):
    cache = transformers.StaticCache(config=model.config.get_text_config(), max_cache_len=40)

    def written():
        layers = [each for each in cache.layers if isinstance(each.keys, torch.Tensor)]
        return (layers[-1].keys != 0).any(-1).any(1).sum().item()

    return {cache_name(): cache, "cache_implementation": None}, written


CASES = {
    "criterion": counting_criterion,
    "processor": counting_processor,
    "allowed tokens": counting_tokens,
    "subclass": own_subclass,
    "inputs": own_method("prepare_inputs_for_generation"),
    "arguments": own_method("_update_model_kwargs_for_generation"),
    "streamer": streamer,
    "hook": hook,
    "returned cache": a_returned_cache,
    "own cache": a_cache_of_the_user,
}


@pytest.mark.parametrize("case", CASES)
def test_no_step_is_too_many_where_it_could_be_noticed(model, begun, case):
    end = late_token(generate(model, eos_token_id=None)[0])
    seen, model.begun = [], begun
    for context in (without(), contextlib.nullcontext()):
        with context:
            options, count = CASES[case](model)
            begun.clear()
            found = generate(model, **options, eos_token_id=end)
            tokens = getattr(found, "sequences", found)
            seen.append((tokens.tolist(), len(begun), count()))
    assert seen[0] == seen[1]
    assert 4 < seen[1][1] == len(seen[1][0][0]) - 6  # the prompt, and the prompt's own token


def test_a_generation_inside_of_a_streamer(model):
    """Another call of ``generate`` in between keeps its own answers."""
    expected = generate(model), generate(model, tokens=4)
    inner = []

    class Nested(Tokens):
        def decode(self, tokens, **options):
            if len(tokens) == 4:
                inner.append(generate(model, tokens=4))
            return super().decode(tokens)

    assert torch.equal(generate(model, streamer=streamer_to(Nested())), expected[0])
    assert torch.equal(inner[0], expected[1])


def test_a_streamer_that_raises(model):
    """Nothing of the call that ended is used in the next one."""
    expected = generate(model)

    class Full(Tokens):
        def decode(self, tokens, **options):
            if len(tokens) == 6:
                raise ValueError("full")
            return ""

    with pytest.raises(ValueError, match="full"):
        generate(model, streamer=streamer_to(Full()))
    assert torch.equal(generate(model), expected)
