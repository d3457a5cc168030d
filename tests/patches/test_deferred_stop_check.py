"""The next captured step begins before the answer to whether the sequences have ended.

What is generated, and what a user sees of it, is compared with the same steps without the patch.
The CPU stands in for a GPU, unless a test is marked ``cuda``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import inspect
import queue
import sys
import threading
import time
import types
import weakref
from typing import ClassVar

import pytest
import torch
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

import gemma4_compat
from gemma4_compat.model.caches import cache_name
from gemma4_compat.runtime.capture import decoding, stop_checks
from tests.pretended_gpu import pretend
from tests.support import load_model, new_model

transformers = pytest.importorskip("transformers")
if Version(transformers.__version__) < Version("5.17"):
    pytest.skip("DeferredStopCheck is new in transformers 5.17", allow_module_level=True)

from transformers import masking_utils  # noqa: E402
from transformers.generation import logits_process, stopping_criteria  # noqa: E402
from transformers.generation import utils as generation  # noqa: E402
from transformers.models.gemma4 import modeling_gemma4  # noqa: E402

PROMPT, TOKENS = 5, 14  # the sliding window has 8
#: A text ends after six tokens or a few more.
ENDS = {"min_new_tokens": 6, "eos_token_id": [*range(400)]}
PLACES = ["pretended", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=PLACES)
def model(request, model_dir, monkeypatch):
    if request.param == "cuda":
        return load_model(model_dir, "nf4", {"": 0})
    pretend(monkeypatch)
    return new_model(model_dir)


@pytest.fixture
def begun(monkeypatch):
    """A list that gets an entry when a step of one token begins."""
    steps, original = [], decoding.Decoder.__call__

    def call(self, **inputs):
        if inputs["input_ids"].shape[1] == 1:
            steps.append("a step")
        return original(self, **inputs)

    monkeypatch.setattr(decoding.Decoder, "__call__", call)
    return steps


@functools.cache
def tokenizer():
    """One of transformers' own, whose tokens are numbers."""
    from tokenizers import Tokenizer, models

    words = {str(number): number for number in range(600)}
    own = Tokenizer(models.WordLevel(words, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own)


class Arrivals(collections.deque):
    """What the queue of a streamer puts texts into: notes how many steps have begun at each."""

    def __init__(self, begun=()):
        super().__init__()
        self.begun, self.texts, self.moments = begun, [], []

    def append(self, text):
        self.texts.append(text)
        self.moments.append(len(self.begun))


def streamer_to(arrivals):
    streamer = transformers.TextIteratorStreamer(tokenizer(), skip_prompt=True)
    streamer.text_queue.queue = arrivals
    return streamer


def generate(model, batch=1, tokens=TOKENS, **options):
    generator = torch.Generator("cpu").manual_seed(3)
    ids = torch.randint(5, 400, (batch, PROMPT), generator=generator, device="cpu")
    ids = ids.to(model.device)
    given = {"do_sample": False, "cache_implementation": "static", "pad_token_id": 0, **options}
    given["repetition_penalty"] = 5.0  # else random weights repeat one token
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **given)


def warm(model, **options):
    """Capture the steps that the next call replays."""
    generate(model, **options)


def as_of_pytorch(function):
    """The same function, as if its code were in a file of PyTorch."""
    function.__code__ = function.__code__.replace(co_filename=torch.__file__)
    return function


def late_token(tokens):
    """The token whose first place is the last one, but the end: one that a text can end with."""
    generated = tokens[PROMPT:-2].tolist()
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
    arrivals = Arrivals(begun)
    generate(model, streamer=streamer_to(arrivals), eos_token_id=None)
    ahead = [steps - token for token, steps in enumerate(arrivals.moments[:TOKENS])]
    # The first step follows the prompt, and the last one is known to be the last.
    assert ahead[2:-1] == [1] * (TOKENS - 3), "it waits for Python between two steps"
    assert len(begun) == TOKENS - 1  # max_new_tokens ends the text: no step too many


def test_after_a_prompt_in_chunks(model, begun):
    """Their forwards are called in another way than the steps."""
    options = {**ENDS, "prefill_chunk_size": 3}
    warm(model, **options)
    begun.clear()
    tokens = generate(model, **options)[0, PROMPT:]
    assert 5 < len(tokens) < TOKENS
    assert len(begun) == len(tokens), "the last of them is one too many"


def test_a_call_waits_for_the_step_too_many(model_dir, begun, monkeypatch):
    """Its memory may be freed afterwards, or lent to a call on another stream."""
    pretend(monkeypatch)
    model, waited = new_model(model_dir), []
    monkeypatch.setattr(torch.cuda.current_stream(), "synchronize", lambda: waited.append("waited"))
    warm(model, **ENDS)
    begun.clear()
    waited.clear()
    tokens = generate(model, **ENDS)[0, PROMPT:]
    assert len(begun) == len(tokens)
    assert waited


def test_tokens_are_not_late_where_steps_stay_eager(model, begun):
    """Nor in the first call, which finds it out."""
    model.register_forward_hook(lambda *args: None)
    for _ in range(2):
        begun.clear()
        arrivals = Arrivals(begun)
        generate(model, streamer=streamer_to(arrivals), eos_token_id=None)
        assert arrivals.moments[:TOKENS] == [*range(TOKENS)]


def test_nothing_to_sample_after_the_end(model):
    """All other tokens are banned or used by then."""
    size, items = model.config.get_text_config().vocab_size, [*range(300, 306)]
    banned = [each for each in range(size) if each not in (1, *items)]
    options = {"do_sample": True, "suppress_tokens": banned, "no_repeat_ngram_size": 1}
    options |= {"min_new_tokens": len(items), "eos_token_id": 1}
    warm(model, do_sample=True)
    tokens = generate(model, **options)[0, PROMPT:].tolist()
    assert sorted(tokens) == [1, *items]
    assert tokens[-1] == 1


def test_random_numbers_of_another_width(model):
    """The head may have fewer rows than the config says."""
    rows = 450  # which include tokens that do not end a text
    head = torch.nn.Linear(model.lm_head.in_features, rows, bias=False).eval()
    head.to(model.device, model.dtype).weight.data.copy_(model.lm_head.weight[:rows])
    model.lm_head = head
    options = {"do_sample": True, **ENDS}
    warm(model, **options)
    states = []
    for context in (without(), contextlib.nullcontext()):
        torch.manual_seed(1)
        with context:
            tokens = generate(model, **options)
        states.append((tokens, random_state(model)))
    assert len(tokens[0]) < PROMPT + TOKENS
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


def test_switched_off_by_a_queue(model):
    """While it is not known yet whether the text has ended."""
    end = late_token(generate(model, eos_token_id=None)[0])
    with without():
        expected = generate(model, eos_token_id=end)
    for moment in range(2, expected.shape[1] - PROMPT + 1):
        with contextlib.ExitStack() as stack:
            arrivals = Arrivals()

            def append(text, own=arrivals, stack=stack, moment=moment):
                own.texts.append(text)
                if len(own.texts) == moment:
                    stack.enter_context(without())

            arrivals.append = append
            tokens = generate(model, eos_token_id=end, streamer=streamer_to(arrivals))
        streamed = "".join(arrivals.texts[:-1]).split()
        assert tokens.tolist() == expected.tolist(), moment
        assert [int(each) for each in streamed] == expected[0, PROMPT:].tolist()


def test_without_memory_at_the_end(model, monkeypatch):
    """The text is complete by then."""
    options = {**ENDS, "do_sample": True}
    warm(model, **options)
    torch.manual_seed(1)
    expected = generate(model, **options)
    original = torch.ones

    def ones(*args, **kwargs):
        if args and isinstance(args[0], tuple):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "ones", as_of_pytorch(ones))
    torch.manual_seed(1)
    assert torch.equal(generate(model, **options), expected)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_text_that_ends(model, begun, batch, sampled):
    """The same tokens, streamed and returned, and the same random numbers afterwards."""
    options = {"batch": batch, "do_sample": sampled, "top_k": 50}
    torch.manual_seed(1)
    ends = [late_token(row) for row in generate(model, **options, eos_token_id=None)]

    def run(streamed):
        torch.manual_seed(1)
        arrivals = Arrivals()
        streamer = streamer_to(arrivals) if streamed else None
        tokens = generate(model, **options, eos_token_id=ends, streamer=streamer)
        return tokens, random_state(model), arrivals.texts

    for streamed in (False, True) if batch == 1 else (False,):
        with without():
            expected = run(streamed)
        warm(model, **options)
        begun.clear()
        found = run(streamed)
        steps = found[0].shape[1] - PROMPT
        assert 4 < steps < TOKENS
        assert len(begun) == steps, "the last of them is one too many"
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert found[2] == expected[2]


def test_random_numbers_that_others_draw_are_not_drawn_again(model, monkeypatch):
    options = {"do_sample": True, "top_k": 50}
    torch.manual_seed(1)
    end = late_token(generate(model, **options, eos_token_id=None)[0])
    drawn, original = [], decoding.Decoder.__call__

    def call(self, **inputs):
        drawn.append(torch.rand(1, device=model.device).item())  # as another thread may
        return original(self, **inputs)

    monkeypatch.setattr(decoding.Decoder, "__call__", call)
    for seed in range(1, 6):
        torch.manual_seed(seed)
        drawn.clear()
        generate(model, **options, eos_token_id=[end, *range(100)])
        assert torch.rand(1, device=model.device).item() not in drawn


def test_on_the_cpu(model_dir):
    """Where no step is captured."""
    model = new_model(model_dir)
    with without():
        expected = generate(model, **ENDS)
    arrivals = Arrivals()
    assert torch.equal(generate(model, **ENDS, streamer=streamer_to(arrivals)), expected)
    assert "".join(arrivals.texts[:-1]).split() == [
        str(each) for each in expected[0, PROMPT:].tolist()
    ]


def test_nothing_of_a_call_stays(model):
    """Else its cache would, whose memory and steps the next call uses."""
    warm(model)
    gc.collect()
    gc.disable()
    try:
        streamer = streamer_to(Arrivals())
        generate(model, streamer=streamer)
        left = weakref.ref(streamer)
        del streamer
        assert left() is None
    finally:
        gc.enable()


def test_random_numbers_after_a_full_queue(model):
    """The token of the step that has begun is drawn by the next call."""
    options = {"do_sample": True, "top_k": 50}
    warm(model, **options)
    seen = []
    for context in (without(), contextlib.nullcontext()):
        streamer = transformers.TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=0.01)
        streamer.text_queue = queue.Queue(6)
        torch.manual_seed(1)
        with context, pytest.raises(queue.Full):
            generate(model, **options, streamer=streamer, eos_token_id=None)
        seen.append((list(streamer.text_queue.queue), random_state(model)))
    assert seen[0][0] == seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1])


# -- where the step could be noticed --------------------------------------------------------------


class Calls(list):
    """What the user's functions note; ``begun`` has an entry for each step so far."""


class Counting:
    """What the user gives; ``calls`` has an entry for each call."""

    def __init__(self, calls):
        self.calls = calls


class CountingCriterion(Counting, transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append("criterion")
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class CountingProcessor(Counting, transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.calls.append("processor")
        return scores


class CountingModule(Counting, torch.nn.Module):
    def __init__(self, calls):
        torch.nn.Module.__init__(self)
        self.calls = calls

    def forward(self, input_ids, scores):
        self.calls.append("module")
        return scores


class OwnEnd(stopping_criteria.EosTokenCriteria):
    """It may have a state."""


def nested(model, calls, patch):
    criteria = transformers.StoppingCriteriaList([CountingCriterion(calls)])
    return {"stopping_criteria": [criteria]}


def subclass(model, calls, patch):
    return {"stopping_criteria": [OwnEnd(torch.tensor([1], device=model.device))]}


def allowed(model, calls, patch):
    size = model.config.get_text_config().vocab_size
    return {"prefix_allowed_tokens_fn": lambda batch, ids: calls.append(batch) or range(size)}


def replaced(owner, name):
    """A case in which the user's function is around one of transformers."""

    def case(model, calls, patch):
        at = model if owner is None else owner
        original = getattr(at, name)

        def own(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        patch.setattr(at, name, own)
        return {"streamer": streamer_to(Arrivals())} if "text" in name else {}

    return case


def streamer(model, calls, patch):
    """It may change the model between two steps, such as its adapter."""

    class Streamer(transformers.TextIteratorStreamer):
        def put(self, tokens):
            calls.append(len(calls.begun))

    return {"streamer": Streamer(tokenizer())}


def streamer_with_its_own(name, of_tokenizer=False):
    def case(model, calls, patch):
        own = streamer_to(Arrivals())
        at = own.tokenizer if of_tokenizer else own
        original = getattr(at, name)

        def noting(*args, **kwargs):
            calls.append(len(calls.begun))
            return original(*args, **kwargs)

        patch.setattr(at, name, noting, raising=False)
        return {"streamer": own}

    return case


def tokenizer_of_the_user(model, calls, patch):
    class Tokenizer:
        def decode(self, tokens, **options):
            calls.append(len(calls.begun))
            return ""

    return {"streamer": transformers.TextStreamer(Tokenizer(), skip_prompt=True)}


def queue_of_the_user(name, of_the_class=True):
    """It may change the model, or draw random numbers."""

    def case(model, calls, patch):
        def put(*args, **options):
            calls.append(len(calls.begun))

        streamer = streamer_to(Arrivals())
        base = queue.Queue if name == "_put" else types.SimpleNamespace
        if of_the_class:
            streamer.text_queue = type("Queue", (base,), {name: put})()
        else:
            streamer.text_queue = base()
            setattr(streamer.text_queue, name, put)
        return {"streamer": streamer}

    return case


def keeps_the_cache(model, calls, patch):
    """And goes on with it after the call."""
    name = "_prepare_cache_for_generation"

    def keep(self, *args, **options):
        found = getattr(type(model).__mro__[1], name)(self, *args, **options)
        cache = args[1].get(cache_name())
        calls.append(cache)
        return found

    patch.setattr(model, "__class__", type("Gemma4Own", (type(model),), {name: keep}))
    return {}


def longer(model, sample, ids, options):
    """Go on after the end, with the same cache."""
    ids = sample(input_ids=ids, **options)
    more = torch.full_like(ids[:, :2], 77)
    ids = torch.cat([ids[:, :-1], more], dim=1)
    options = {**options, "attention_mask": torch.ones_like(ids)}
    options.pop("position_ids", None)
    return sample(input_ids=ids, **options)


def custom_generate(model, calls, patch):
    def own(model, input_ids, **options):
        return longer(model, model._sample, input_ids, options)

    return {"custom_generate": own}


def own_sample(model, calls, patch):
    class Gemma4Own(type(model)):
        def _sample(self, input_ids, **options):
            return longer(self, super()._sample, input_ids, options)

    patch.setattr(model, "__class__", Gemma4Own)
    return {}


def growing_penalty(model, calls, patch):
    """It is too large for a float after the last token."""
    return {"exponential_decay_length_penalty": (6, 1e200)}


def watermark(model, calls, patch):
    options = {"keys": [654, 400, 836], "sampling_table_size": 64, "sampling_table_seed": 0}
    options |= {"ngram_len": 5, "context_history_size": 64, "device": model.device}
    own = logits_process.SynthIDTextWatermarkLogitsProcessor(**options)
    calls.append(own)
    return {"logits_processor": [own]}


def hook(model, calls, patch):
    calls.append(model.register_forward_hook(lambda *args: calls.append("hook")))
    return {}


def hook_and_chunks(model, calls, patch):
    """The last chunk has one token, like a step."""
    return {**hook(model, calls, patch), "prefill_chunk_size": 2}


def mask_function(model, calls, patch):
    # An entry of the instance would remain: monkeypatch restores what the instance shows.
    table = type(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping
    original = table["sdpa"]

    def own(*args, **kwargs):
        calls.append("mask")
        return original(*args, **kwargs)

    patch.setitem(table, "sdpa", own)
    return {}


def own_cache(model, calls, patch):
    config = model.config.get_text_config()
    calls.append(transformers.StaticCache(config=config, max_cache_len=40))
    return {cache_name(): calls[0], "cache_implementation": None}


CASES = {
    "criterion": lambda model, calls, patch: {"stopping_criteria": [CountingCriterion(calls)]},
    "processor": lambda model, calls, patch: {"logits_processor": [CountingProcessor(calls)]},
    "module": lambda model, calls, patch: {"logits_processor": [CountingModule(calls)]},
    "nested list": nested,
    "subclass": subclass,
    "allowed tokens": allowed,
    "watermark": watermark,
    "inputs": replaced(None, "prepare_inputs_for_generation"),
    "masks": replaced(None, "create_masks_for_generate"),
    "arguments": replaced(None, "_update_model_kwargs_for_generation"),
    "unfinished": replaced(None, "_has_unfinished_sequences"),
    "masks of a module": replaced(modeling_gemma4, "create_masks_for_generate"),
    "mask function": mask_function,
    "base class": replaced(generation.GenerationMixin, "prepare_inputs_for_generation"),
    "replaced argmax": replaced(torch, "argmax"),
    "replaced criterion": replaced(stopping_criteria.EosTokenCriteria, "__call__"),
    "replaced list": replaced(logits_process.LogitsProcessorList, "__call__"),
    "replaced streamer": replaced(transformers.TextIteratorStreamer, "on_finalized_text"),
    "streamer": streamer,
    "queue": queue_of_the_user("put"),
    "queue with a function": queue_of_the_user("put", of_the_class=False),
    "queue whose class has its own _put": queue_of_the_user("_put"),
    "queue with its own _put": queue_of_the_user("_put", of_the_class=False),
    "keeps the cache": keeps_the_cache,
    "custom_generate": custom_generate,
    "own _sample": own_sample,
    "growing penalty": growing_penalty,
    "streamer with its own put": streamer_with_its_own("put"),
    "tokenizer with its own decode": streamer_with_its_own("decode", of_tokenizer=True),
    "tokenizer": tokenizer_of_the_user,
    "hook": hook,
    "hook, and chunks of the prompt": hook_and_chunks,
    "returned cache": lambda model, calls, patch: {"return_dict_in_generate": True},
    "own cache": own_cache,
    "replaced check": replaced(generation.StopCheck, "__call__"),
}


def plain(call):
    """What a test can compare of an entry."""
    if isinstance(call, logits_process.SynthIDTextWatermarkLogitsProcessor):
        return call.state.num_calls
    if isinstance(call, transformers.StaticCache):
        layers = [each for each in call.layers if isinstance(each.keys, torch.Tensor)]
        return (layers[-1].keys != 0).any(-1).sum().item()
    if hasattr(call, "remove"):
        return call.remove()
    return call


@pytest.mark.parametrize("case", CASES)
def test_no_step_is_too_many_where_it_could_be_noticed(model, begun, monkeypatch, case):
    warm(model)
    begun.clear()
    tokens = generate(model, **ENDS)[0, PROMPT:]
    assert len(begun) == len(tokens), "without the case, the last step is one too many"
    seen = []
    for context in (without(), contextlib.nullcontext()):
        calls = Calls()
        calls.begun = begun
        with context, monkeypatch.context() as patch:
            options = CASES[case](model, calls, patch)
            begun.clear()
            found = generate(model, **options, **ENDS)
            tokens = getattr(found, "sequences", found).tolist()
            seen.append((tokens, len(begun), [plain(call) for call in calls]))
    assert seen[0] == seen[1]
    assert 5 < len(seen[1][0][0]) - PROMPT < TOKENS, "the text ends by a token"


# -- what runs between two steps -------------------------------------------------------------------

#: The functions of PyTorch that a user can replace, and what runs between two steps may call.
BETWEEN = {
    torch: (
        "arange", "argmax", "cat", "cumsum", "exp", "full", "full_like", "gather", "isin", "max",
        "min", "multinomial", "ones", "sort", "sqrt", "sum", "tensor", "topk", "where", "zeros",
        "zeros_like",
    ),
    torch.nn.functional: ("softmax", "log_softmax"),
    torch.Tensor: (
        "__add__", "__and__", "__bool__", "__eq__", "__ge__", "__getitem__", "__gt__", "__invert__",
        "__le__", "__lt__", "__mul__", "__neg__", "__or__", "__rsub__", "__setitem__", "__sub__",
        "__truediv__", "abs", "clone", "copy_", "cumsum", "cpu", "exp", "gather", "log",
        "all", "amax", "any", "clamp", "clamp_", "dim", "nansum", "size", "view",
        "masked_fill", "max", "new_ones", "scatter", "scatter_", "softmax", "squeeze", "sum",
        "to", "unsqueeze",
    ),
    time: ("time",),
}  # fmt: skip
#: In transformers' modules of generation, the functions that run there.
CALLERS = ("_sample", "_update_model_kwargs_for_generation", "__call__")
SAMPLED = {
    "do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.001,
    "typical_p": 0.99, "epsilon_cutoff": 1e-5, "eta_cutoff": 1e-5, "renormalize_logits": True,
    "suppress_tokens": [7], "max_time": 600.0,
}  # fmt: skip


def counted(model, calls, options):
    """Tokens of three calls, the number of calls of a user's function, and the random numbers."""
    torch.manual_seed(1)
    calls.clear()
    tokens = [generate(model, **options, **ENDS).tolist() for _ in range(3)]
    return tokens, len(calls), random_state(model).tolist()


def drawing(original, calls):
    """A user's function around another, which draws random numbers."""

    def own(*args, **kwargs):
        calls.append("a call")
        torch.rand(1)
        return original(*args, **kwargs)

    return own


class Called:
    """A user's function that is none of Python."""

    def __init__(self, original, calls):
        self.function = drawing(original, calls)

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def wrapping(original, calls):
    return functools.wraps(original)(drawing(original, calls))


def partial(original, calls):
    return functools.partial(drawing(original, calls))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.nn.functional, "softmax"), (torch, "multinomial"), (torch, "cat"), (torch, "topk"),
        (torch.Tensor, "softmax"), (torch.Tensor, "__mul__"), (torch.Tensor, "to"), (time, "time"),
    ],
)  # fmt: skip
def test_a_replaced_function_that_draws_random_numbers(model, monkeypatch, owner, name):
    warm(model, **SAMPLED)
    monkeypatch.setattr(owner, name, drawing(getattr(owner, name), calls := []))
    with without():
        expected = counted(model, calls, SAMPLED)
    assert expected[1]
    assert counted(model, calls, SAMPLED) == expected


def test_no_step_is_too_many_with_any_replaced_function(model, monkeypatch):
    """All of the list, and none that only other code calls."""
    original, allowed = stop_checks.Call.allows_another_step, {}
    listed = {(owner, name) for owner, names in BETWEEN.items() for name in names}
    others = {(torch, "save"), (torch.Tensor, "backward")}

    def allows(call):
        for owner, name in listed | others:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, drawing(getattr(owner, name), []))
                allowed[owner, name] = original(call)
        return original(call)

    monkeypatch.setattr(stop_checks.Call, "allows_another_step", allows)
    generate(model, **SAMPLED)
    assert {place for place, answer in allowed.items() if answer} == others
    assert allowed.keys() == listed | others


@pytest.mark.parametrize("form", [Called, wrapping, partial])
def test_other_forms_of_a_replaced_function(model, monkeypatch, form):
    warm(model, **SAMPLED)
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", form(softmax, calls := []))
    with without():
        expected = counted(model, calls, SAMPLED)
    assert expected[1]
    assert counted(model, calls, SAMPLED) == expected


def test_all_that_runs_between_two_steps_is_in_the_list(model_dir, monkeypatch):
    """What transformers runs there now, with each processor that keeps nothing."""
    pretend(monkeypatch)
    model, called, inside = new_model(model_dir), set(), []
    original = type(model).forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        inside.append("a forward")
        try:
            return original(*args, **kwargs)
        finally:
            inside.pop()

    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            caller = sys._getframe(1)
            module, name = caller.f_globals["__name__"], caller.f_code.co_name
            if not inside and module.startswith("transformers.generation.") and name in CALLERS:
                called.add(function)
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(type(model), "forward", forward)
    with without(), Noting():
        generate(model, **SAMPLED, **ENDS)
        generate(model, **ENDS)
    listed = {name.strip("_") for names in BETWEEN.values() for name in names}
    names = {each.__name__.strip("_") for each in called}
    assert len(names) > 20
    others = {"get", "div"}  # attributes such as the device, and the operator ``/``
    assert sorted(names - listed - others) == []


class Counter(torch.overrides.TorchFunctionMode):
    """A user's mode, which sees each function of PyTorch; counts those of transformers' loop."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        module = sys._getframe(1).f_globals["__name__"]
        self.calls[function] += module.startswith("transformers.generation.")
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    """A user's mode, which sees each operator of PyTorch."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function] += 1
        return function(*args, **(kwargs or {}))


class Inputs(torch.Tensor):
    """A user's tensors, which see each function of PyTorch that gets them."""

    calls: ClassVar = collections.Counter()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        module = sys._getframe(1).f_globals["__name__"]
        cls.calls[function] += module.startswith("transformers.generation.")
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize("mode", [Counter, Dispatched])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_mode_sees_the_same_operations(model, mode, sampled):
    options = SAMPLED if sampled else {}
    warm(model, **options)
    seen = []
    for context in (without(), contextlib.nullcontext()):
        torch.manual_seed(1)
        with context, mode() as own:
            tokens = generate(model, **options, **ENDS).tolist()
        seen.append((tokens, own.calls, random_state(model).tolist()))
    assert seen[0] == seen[1]


def test_tensors_of_a_user_see_the_same_operations(model):
    warm(model)
    ids = torch.tensor([[5, 17, 99, 23, 42]], device=model.device)
    options = {"cache_implementation": "static", "do_sample": False, "max_new_tokens": TOKENS}
    seen = []
    for context in (without(), contextlib.nullcontext()):
        with context:
            for _ in range(2):
                Inputs.calls = collections.Counter()
                tokens = model.generate(ids.as_subclass(Inputs), **options, **ENDS).tolist()
        seen.append((tokens, Inputs.calls))
    assert seen[0] == seen[1]
    assert seen[0][1].total()


def test_numbers_of_the_users_own_generator(model, begun, monkeypatch):
    """``generate`` takes no generator, so a user replaces the function that draws."""
    own, original = torch.Generator(model.device), torch.multinomial

    def multinomial(*args, **kwargs):
        return original(*args, **{**kwargs, "generator": own})

    seen, partial = [], functools.partial(original, generator=own)
    for function in (multinomial, partial):
        monkeypatch.setattr(torch, "multinomial", function)
        for context in (without(), contextlib.nullcontext()):
            own.manual_seed(1)
            with context:
                ends = {"do_sample": True, "eos_token_id": [*range(60)]}
                seen.append([generate(model, **ends).tolist() for _ in "123"])
    assert all(each == seen[0] for each in seen)


# -- another DeferredStopCheck upstream ------------------------------------------------------------

ENTRIES = """torch.zeros((), dtype=torch.bool, pin_memory=pinned),
                torch.zeros(input_ids.shape[0], dtype=torch.long, pin_memory=pinned),
                torch.Event(device=input_ids.device, blocking=True),"""
ORDERED = "should_stop{0}, tokens_cpu{0}, copy_done{0} ="
OTHERS = {
    "as it is": [],
    "a fourth entry": [
        (ENTRIES, f"{ENTRIES} None,"),
        *((ORDERED.format(e), ORDERED.format(e).replace(" =", ", _ =")) for e in ("", "_before")),
        ("for *_, copy_done in", "for *_, copy_done, _ in"),
        ("_, tokens_cpu, _ = self.slots[1]", "_, tokens_cpu, *_ = self.slots[1]"),
    ],
    "another order": [
        (ENTRIES, "\n".join(reversed(ENTRIES.splitlines()))),
        *(
            (ORDERED.format(e), f"copy_done{e}, tokens_cpu{e}, should_stop{e} =")
            for e in ("", "_before")
        ),
        ("for *_, copy_done in", "for copy_done, *_ in"),
    ],
    "another name of the entries": [("slots", "pending")],
    "another name of the first step": [("is_first_step", "begins")],
    "another name of the streamer": [("streamer", "sink")],
    "another name of the answer": [("stop_reported", "ended")],
}
DRIFTED = ("another name of the first step", "another name of the streamer")


@pytest.fixture
def other_check(request, monkeypatch):
    """transformers with another class of this name, as an import of it would find."""
    own = generation.DeferredStopCheck
    gemma4_compat.uninstall("deferred_stop_check")
    source = inspect.getsource(own)
    for old, new in OTHERS[request.param]:
        assert old in source
        source = source.replace(old, new)
    found = {}
    with monkeypatch.context() as patch:
        exec(compile(source, generation.__file__, "exec"), vars(generation), found)
        patch.setattr(generation, "DeferredStopCheck", found["DeferredStopCheck"])
        gemma4_compat.install("deferred_stop_check")
        yield request.param
        gemma4_compat.uninstall("deferred_stop_check")
    gemma4_compat.install("deferred_stop_check")
    assert gemma4_compat.status()["deferred_stop_check"].state == "applied"


@pytest.mark.parametrize("other_check", OTHERS, indirect=True)
def test_another_class_upstream(other_check, model, begun):
    """The patch is not applied, or right."""
    state = gemma4_compat.status()["deferred_stop_check"].state
    assert state == ("drifted" if other_check in DRIFTED else "applied")
    with without():
        expected = generate(model, **ENDS)[0, PROMPT:].tolist()
    for _ in range(3):  # the first one captures
        begun.clear()
        arrivals = Arrivals()
        tokens = generate(model, streamer=streamer_to(arrivals), **ENDS)[0, PROMPT:].tolist()
        assert tokens == expected
        assert [int(each) for each in "".join(arrivals.texts[:-1]).split()] == expected
    assert len(begun) == len(tokens) - (state == "drifted")


def test_without_page_locked_memory(model, begun, monkeypatch):
    """With another default device, or without memory, there is none: transformers would raise."""
    expected = generate(model)
    original = torch.zeros

    def zeros(*args, **kwargs):
        if "pin_memory" in kwargs:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", as_of_pytorch(zeros))
    assert torch.equal(generate(model), expected)


@pytest.mark.cuda
def test_another_default_device(model_dir):
    model = load_model(model_dir, "nf4", {"": 0})
    expected = generate(model)
    with torch.device("cuda"):
        assert torch.equal(generate(model), expected)


@pytest.mark.cuda
def test_a_text_that_ends_on_the_second_gpu(model_dir, begun):
    """The thread's current device is the first one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = load_model(model_dir, "nf4", {"": 1})
    end = late_token(generate(model, eos_token_id=None)[0])
    with without():
        expected = generate(model, eos_token_id=end)
    original = decoding.Decoder.run

    def late(self, *args):
        output = original(self, *args)
        with torch.cuda.device(1):
            torch.cuda._sleep(20_000_000)  # so that answers are late
        return output

    found = []

    def run():
        arrivals = Arrivals()
        tokens = generate(model, eos_token_id=end, streamer=streamer_to(arrivals))
        found.append((tokens, "".join(arrivals.texts[:-1]).split()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding.Decoder, "run", late)
        thread = threading.Thread(target=run)  # its current device is the first one
        thread.start()
        thread.join()
    assert torch.equal(found[0][0], expected)
    assert [int(each) for each in found[0][1]] == expected[0, PROMPT:].tolist()


def test_a_generation_inside_of_a_streamer(model):
    """Another call of ``generate`` in between keeps its own answers."""
    expected = generate(model), generate(model, tokens=4)
    inner = []

    class Nested(Arrivals):
        def append(self, text):
            super().append(text)
            if len(self.texts) == 4:
                inner.append(generate(model, tokens=4))

    assert torch.equal(generate(model, streamer=streamer_to(Nested())), expected[0])
    assert torch.equal(inner[0], expected[1])


def test_a_queue_that_raises(model):
    """Nothing of the call that ended is used in the next one."""
    expected = generate(model)

    class Full(Arrivals):
        def append(self, text):
            super().append(text)
            if len(self.texts) == 6:
                raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        generate(model, streamer=streamer_to(Full()))
    assert torch.equal(generate(model), expected)
