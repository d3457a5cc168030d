"""The next captured step begins before the answer to whether the sequences have ended.

What is generated, and what a user sees of it, is compared with the same steps without the patch.
The CPU stands in for a GPU, unless a test is marked ``cuda``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import queue
import threading
import types
import weakref

import pytest
import torch
from packaging.version import Version

import gemma4_compat
from gemma4_compat.model.caches import cache_name
from gemma4_compat.runtime.capture import decoding
from tests.pretended_gpu import pretend
from tests.support import load_model, new_model

transformers = pytest.importorskip("transformers")
OLD = Version(transformers.__version__) < Version("5.17")

from transformers import masking_utils  # noqa: E402
from transformers.generation import logits_process, stopping_criteria  # noqa: E402
from transformers.generation import utils as generation  # noqa: E402
from transformers.models.gemma4 import modeling_gemma4  # noqa: E402

PROMPT, TOKENS = 5, 14  # the sliding window has 8
#: A text ends after six tokens or a few more.
ENDS = {"min_new_tokens": 6, "eos_token_id": [*range(250)]}
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
    rows = 300
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

    monkeypatch.setattr(torch, "ones", ones)
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
            calls.append(len(model.begun))

    return {"streamer": Streamer(tokenizer())}


def streamer_with_its_own(name, of_tokenizer=False):
    def case(model, calls, patch):
        own = streamer_to(Arrivals())
        at = own.tokenizer if of_tokenizer else own
        original = getattr(at, name)

        def noting(*args, **kwargs):
            calls.append(len(model.begun))
            return original(*args, **kwargs)

        patch.setattr(at, name, noting, raising=False)
        return {"streamer": own}

    return case


def tokenizer_of_the_user(model, calls, patch):
    class Tokenizer:
        def decode(self, tokens, **options):
            calls.append(len(model.begun))
            return ""

    return {"streamer": transformers.TextStreamer(Tokenizer(), skip_prompt=True)}


def queue_of_the_user(name, of_the_class=True):
    """It may change the model, or draw random numbers."""

    def case(model, calls, patch):
        def put(*args, **options):
            calls.append(len(model.begun))

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
    names = ("_prepare_cache_for_generation", "_prepare_static_cache", "_prefill")
    name = next(each for each in names if hasattr(model, each))

    def keep(self, *args, **options):
        found = getattr(type(model).__mro__[1], name)(self, *args, **options)
        cache = getattr(self, "_cache", None) or args[1].get(cache_name())
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
}


if not OLD:
    CASES["replaced check"] = replaced(generation.StopCheck, "__call__")


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
    seen, model.begun = [], begun
    for context in (without(), contextlib.nullcontext()):
        calls = []
        with context, monkeypatch.context() as patch:
            options = CASES[case](model, calls, patch)
            begun.clear()
            found = generate(model, **options, **ENDS)
            tokens = getattr(found, "sequences", found).tolist()
            seen.append((tokens, len(begun), [plain(call) for call in calls]))
    assert seen[0] == seen[1]
    assert 5 < len(seen[1][0][0]) - PROMPT < TOKENS, "the text ends by a token"


def test_numbers_of_the_users_own_generator(model, begun, monkeypatch):
    """``generate`` takes no generator, so a user replaces the function that draws."""
    own, original = torch.Generator(model.device), torch.multinomial

    def multinomial(*args, **kwargs):
        return original(*args, **{**kwargs, "generator": own})

    monkeypatch.setattr(torch, "multinomial", multinomial)
    seen = []
    for context in (without(), contextlib.nullcontext()):
        own.manual_seed(1)
        with context:
            seen.append([generate(model, do_sample=True, eos_token_id=[*range(60)]) for _ in "123"])
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))


def test_without_page_locked_memory(model, begun, monkeypatch):
    """With another default device, or without memory, there is none: transformers would raise."""
    expected = generate(model)
    original = torch.zeros

    def zeros(*args, **kwargs):
        if "pin_memory" in kwargs:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", zeros)
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
    if hasattr(model, "_cache"):
        pytest.skip("in this release the inner call writes to the cache of the outer one")
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
