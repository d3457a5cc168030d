"""Rounds of drafts and their check run as CUDA graphs.

The references are transformers' own drafting with its dynamic cache, in float32 on the CPU, and on
the GPU the same rounds without capture, which run the same kernels.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import threading
from itertools import cycle

import pytest
import torch
from packaging.version import Version

from gemma4_compat.errors import ModelError
from gemma4_compat.model.caches import cache_name
from gemma4_compat.runtime.capture import conditions, decoding, drafting, drafts
from gemma4_compat.runtime.kernels import watch
from gemma4_compat.tiny import image_inputs
from tests.patches.test_captured_decoding import load_in
from tests.pretended_gpu import pretend
from tests.pretended_streams import pretend_side_stream
from tests.runtime import test_between_tokens as between
from tests.support import load_model, new_model

transformers = pytest.importorskip("transformers")
if Version(transformers.__version__) < Version("5.8"):
    pytest.skip("gemma4_assistant is new in transformers 5.8", allow_module_level=True)

NEW_TOKENS = 16  # the sliding window has 8
DRAFTS = 3


def drafter_of(model, ordered=True):
    """A drafter with random weights for the tiny model."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    text = model.config.get_text_config()
    own = Gemma4TextConfig(
        vocab_size=text.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=64,
        global_head_dim=128,
        sliding_window=text.sliding_window,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    config = Gemma4AssistantConfig(
        text_config=own,
        backbone_hidden_size=text.hidden_size,
        use_ordered_embeddings=ordered,
        num_centroids=text.vocab_size // 8,
        centroid_intermediate_top_k=4,
    )
    torch.manual_seed(0)
    drafter = Gemma4AssistantForCausalLM(config).eval().to(model.device, model.dtype)
    if ordered:
        drafter.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    drafter.generation_config.num_assistant_tokens = DRAFTS
    return drafter


def prompt(model, length=12):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 400, (1, length), generator=generator).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generated(model, inputs=None, static=True, tokens=NEW_TOKENS, **options):
    """The tokens and logits of one call, on the CPU."""
    output = model.generate(
        **(prompt(model) if inputs is None else inputs),
        cache_implementation="static" if static else None,
        max_new_tokens=tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **{"do_sample": False, "eos_token_id": None, **options},
    )
    return output.sequences.cpu(), torch.cat(output.logits).cpu()


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def assert_near(found, expected):
    """The same tokens, and logits that other kernels have rounded, in float32."""
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def steps_of(model):
    """The number of captured steps."""
    decoding = vars(model).get("_decoding")
    return 0 if decoding is None else sum(len(memory.steps) for memory in decoding.memories)


@pytest.fixture
def forced(monkeypatch):
    """A function that lets so many drafts of each round be right, after the drafter ran."""
    from gemma4_compat.runtime.capture.drafts import Drafts

    original = Drafts.get_candidates

    def force(expected, numbers):
        turns = cycle(numbers)

        def candidates(self, input_ids, **kwargs):
            ids, logits = original(self, input_ids, **kwargs)
            known = input_ids.shape[1]
            drafts = ids.shape[1] - known
            if drafts:
                right = expected[:, known : known + drafts].to(ids.device)
                ids = torch.cat([ids[:, :known], right], dim=1)
                ids[:, known + next(turns) :] += 1
            return ids, logits

        monkeypatch.setattr(Drafts, "get_candidates", candidates)

    return force


@pytest.fixture
def right(monkeypatch):
    """A function that lets the steps of a drafter themselves make so many right drafts in turn."""
    original, size, tables = drafts.Drafts._draft, 1024, {}
    code = """
def draft(self, size, start, **inputs):
    made, places = original(self, size=size, start=start, **inputs), start + 1 + offsets[:size]
    own = tokens.index_select(0, places)
    is_right = offsets[:size] < number.index_select(0, start)
    return {**made, "tokens": where(is_right, own, own + 1)[None]}
"""

    def let(expected, numbers):
        if not tables:  # a graph reads them in place
            for name in ("tokens", "number", "offsets"):
                tables[name] = torch.arange(size, device=expected.device)
            names = {**tables, "original": original, "where": torch.where}
            # the name of a file of the package: no code of a user
            exec(compile(code, drafts.__file__, "exec"), names)
            monkeypatch.setattr(drafts.Drafts, "_draft", names["draft"])
        tables["tokens"][: expected.shape[1]] = expected[0]
        tables["number"].copy_(torch.tensor(numbers).repeat(size)[:size])  # by a round's place

    return let


@pytest.fixture
def model(model_dir, monkeypatch):
    pretend(monkeypatch)
    return new_model(model_dir).float()


@pytest.fixture
def uncaptured(monkeypatch):
    """A context in which the same rounds run without capture."""

    @contextlib.contextmanager
    def context():
        with monkeypatch.context() as patch:
            run = lambda self, forward, inputs: forward.function(**inputs)  # noqa: E731
            patch.setattr(decoding.Decoder, "run", run)
            yield

    return context


LOOKUP = {"prompt_lookup_num_tokens": DRAFTS}
#: the drafts, the check of all rows, and that of one row
STEPS = 3


def options_of(way, model):
    return {"assistant_model": drafter_of(model)} if way == "drafter" else LOOKUP


def check(model, inputs=None, **options):
    """The same as transformers' drafting with a dynamic cache, in float32."""
    expected = generated(model, inputs, static=False, **options)
    for _ in range(2):
        found = generated(model, inputs, **options)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    assert steps_of(model), "nothing was captured"


def warned(caplog):
    said = [record.getMessage() for record in caplog.records]
    return [text for text in said if "Its rounds are not captured" in text]


# -- equal ----------------------------------------------------------------------------------------


@pytest.mark.regression("captured_drafting", r"not supported with Static|that can be cropped")
@pytest.mark.parametrize("way", ["drafter", "lookup"])
def test_static_cache(model, way):
    check(model, **options_of(way, model))
    assert steps_of(model) <= STEPS


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("numbers", [(0,), (1,), (2,), (3,), (3, 0, 2, 1)], ids=str)
def test_accepted(model, forced, numbers, ordered):
    """As many tokens a round as are right, over many rounds beyond the window."""
    drafter = drafter_of(model, ordered)
    expected = generated(model, static=False, assistant_model=drafter, tokens=40)
    forced(expected[0], numbers)
    found = generated(model, assistant_model=drafter, tokens=40)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    assert steps_of(model) <= STEPS


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
def test_lengths_of_prompts(model, length):
    check(model, prompt(model, length), assistant_model=drafter_of(model))


@pytest.mark.parametrize("way", ["drafter", "lookup"])
def test_the_bits_of_the_same_rounds_without_capture(model_dir, monkeypatch, uncaptured, way):
    pretend(monkeypatch)
    model = new_model(model_dir, "nf4")
    options = options_of(way, model)
    with uncaptured():
        expected = generated(model, **options)
    assert not steps_of(model)
    for _ in range(2):
        assert_same(generated(model, **options), expected)
    assert 2 <= steps_of(model) <= STEPS


def test_an_image(model):
    check(model, image_inputs(model.config), assistant_model=drafter_of(model))


def test_adapters(model, adapter_dir):
    """Another adapter gets other steps."""
    from peft import PeftModel

    drafter = drafter_of(model)
    model = PeftModel.from_pretrained(model, adapter_dir)
    found = []
    for enabled in (True, False, True):
        with contextlib.nullcontext() if enabled else model.disable_adapter():
            expected = generated(model, static=False, assistant_model=drafter)
            found.append(generated(model, assistant_model=drafter))
        assert torch.equal(found[-1][0], expected[0])
    assert_same(found[0], found[2])
    assert not torch.equal(found[0][1], found[1][1])
    assert steps_of(model.get_base_model())


def test_what_a_replaced_drafter_drafts(model, forced):
    """A second drafter is not replayed from the steps of the first."""
    first, second = drafter_of(model), drafter_of(model, ordered=False)
    for drafter in (first, second, first):
        check(model, assistant_model=drafter)


def test_two_threads(model):
    """The hook that a thread's prompt needs for a moment keeps no round of the other one eager."""
    drafter, found = drafter_of(model), {6: [], 12: []}

    def run(length):
        found[length].append(generated(model, prompt(model, length), assistant_model=drafter))

    for length in 2 * tuple(found):
        run(length)
    threads = [threading.Thread(target=run, args=(length,)) for length in 2 * tuple(found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, expected, *others in found.values():
        for each in others:
            assert_same(each, expected)  # eager rounds round differently
    assert len(found[6]) == len(found[12]) == 4


def test_a_copy_during_a_prompt(model):
    with drafting._last_hidden_state(model) as states:
        copied, pickled = copy.deepcopy(model), pickle.dumps(model.get_output_embeddings())
        copied(**prompt(model))
        assert not states
        assert b"gemma4_compat" not in pickled
        model(**prompt(model))
        assert len(states) == 1
    conditions._check_repeatable(copied, conditions.modules_of_a_step(copied))
    assert torch.equal(copied.lm_head.weight, pickle.loads(pickled).weight)


def test_memory_is_lent(model):
    """The second call uses the cache and the steps of the first, also after one without drafts."""
    drafter = drafter_of(model)
    for _ in range(2):
        expected = generated(model, assistant_model=drafter)
    memories = vars(model)["_decoding"].memories
    before = [step for memory in memories for step in memory.steps.values()]
    assert_same(generated(model, assistant_model=drafter), expected)
    after = [step for m in vars(model)["_decoding"].memories for step in m.steps.values()]
    assert len(before) == len(after)
    assert all(any(step is other for other in before) for step in after)


def test_sampling(model):
    """With the same numbers, sampling gives the tokens of the same rounds without capture."""
    options = {"assistant_model": drafter_of(model), "do_sample": True}
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        found.append(generated(model, **options)[0])
    assert torch.equal(found[1], found[2])
    assert steps_of(model)


def test_experts_are_switched_once(model, monkeypatch):
    """For all checks of a call, however it ends; not for its prompt."""
    from transformers import StoppingCriteriaList

    events = []

    @contextlib.contextmanager
    def switched():
        events.append("switched")
        model.config.experts = "for decoding"
        try:
            yield
        finally:
            del model.config.experts
            events.append("back")

    def fails(ids, scores, **kwargs):
        if len(events) == 1:
            raise ZeroDivisionError
        return torch.zeros(1, dtype=torch.bool)

    names = type(model)._assisted_decoding.__wrapped__.__code__.co_names
    usual = ["switched", "back"] if "_optimize_model_for_decode" in names else []
    drafter = drafter_of(model)
    expected = generated(model, static=False, assistant_model=drafter)
    monkeypatch.setattr(model, "_optimize_model_for_decode", switched, raising=False)
    for _ in range(3):
        assert torch.equal(generated(model, assistant_model=drafter)[0], expected[0])
    assert events == 3 * usual
    assert 2 <= steps_of(model) <= STEPS  # of all calls
    events.clear()
    with pytest.raises(ZeroDivisionError) if usual else contextlib.nullcontext():
        criteria = StoppingCriteriaList([fails])
        generated(model, assistant_model=drafter, stopping_criteria=criteria)
    assert events == usual


def test_stopping_and_streaming(model):
    """Criteria and streamers see the tokens that they see without us."""
    from transformers import StoppingCriteria, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append("end")

    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] > 25])

    said = []
    for static in (False, True, True):
        streamer = Streamer()
        options = {"streamer": streamer, "stopping_criteria": StoppingCriteriaList([Stop()])}
        ids, _ = generated(model, static=static, assistant_model=drafter_of(model), **options)
        said.append((ids.tolist(), streamer.tokens))
    assert said[0] == said[1] == said[2]


def test_several_sequences_raise_as_upstream(model):
    ids = prompt(model)["input_ids"].repeat(2, 1)
    errors = []
    for static in (False, True):
        with pytest.raises(ValueError, match="batch_size = 1") as error:
            generated(model, {"input_ids": ids}, static, assistant_model=drafter_of(model))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(("ends", "number"), [((), 3), ([9], 3), ([5], 2), ([4, 7], 1)])
def test_drafts_after_an_end(ends, number):
    from gemma4_compat.runtime.capture.drafts import until_end

    assert until_end(torch.tensor([4, 5, 5]), ends) == number


def test_the_end_of_the_text(model, forced):
    """A text ends with the first token that ends it, also among accepted drafts."""
    drafter = drafter_of(model)
    expected = generated(model, static=False)[0]
    end = int(expected[0, 20])
    options = {"eos_token_id": end, "min_new_tokens": 1}
    alone = generated(model, static=False, **options)[0]
    assert 13 < alone.shape[1] < expected.shape[1]
    padded = torch.cat([alone, alone.new_zeros(1, DRAFTS)], dim=1)
    forced(padded, (DRAFTS,))
    assert torch.equal(generated(model, assistant_model=drafter, **options)[0], alone)


# -- drafts begin before transformers asks for them ------------------------------------------------


@pytest.fixture
def order(monkeypatch):
    """A list that gets what runs: checks and drafts, and those of them that begin ahead."""
    ran, run = [], drafting.Drafting.run

    def noted(self, function, has_layers, usual, *start, **inputs):
        kind = "check" if has_layers else "drafts"
        ran.append(f"{kind} ahead" if usual is None else kind)
        return run(self, function, has_layers, usual, *start, **inputs)

    monkeypatch.setattr(drafting.Drafting, "run", noted)
    return ran


class Tokens:
    """A streamer that notes when tokens arrive."""

    def __init__(self, ran):
        self.ran = ran

    def put(self, tokens):
        self.ran.append("tokens")

    def end(self): ...


def test_a_round_begins_during_the_check_before(model, order):
    """Transformers reads which drafts are accepted while the next ones are computed."""
    drafter = drafter_of(model)
    generated(model, assistant_model=drafter)
    order.clear()
    expected = generated(model, assistant_model=drafter)
    rounds = order[order.index("check") + 1 :]  # one token may be left for the last check
    assert rounds[:20] == ["drafts ahead", "check ahead"] * 10
    assert_same(generated(model, assistant_model=drafter, streamer=Tokens(order)), expected)


def test_accepted_by_a_check_that_has_begun(model, right, order):
    drafter = drafter_of(model)
    expected = generated(model, static=False, tokens=30)
    for numbers in ((1,), (3, 0, 2, 1), (3,)):
        right(expected[0], numbers)
        order.clear()
        found = generated(model, assistant_model=drafter, tokens=30)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    assert order.count("check ahead") > 6
    assert order.count("check") <= 2, "a check that had begun was not used"


def test_a_tie_in_float32(model_dir, monkeypatch, right):
    """Which transformers chooses tokens in: a check that began too early would write over keys."""
    pretend(monkeypatch)
    model = new_model(model_dir).double()
    found = generated(model, static=False)[0]
    common = found[0, 12:].mode().values
    other = max(set(range(int(common) + 1, 512)) - set(found[0].tolist()))
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight[other] = weight[common] * (1 + 1e-13)
    expected = generated(model, static=False)
    right(expected[0], (3,))
    drafter = drafter_of(model)
    for _ in range(3):
        found = generated(model, assistant_model=drafter)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])


def test_another_number_of_drafts(model, right, caplog):
    """In memory of the same size, with the steps of the first number."""
    text = model.config.get_text_config()
    text.sliding_window = 200
    for layer in model.model.language_model.layers:
        if getattr(layer.self_attn, "sliding_window", None):
            layer.self_attn.sliding_window = 200
    drafter = drafter_of(model)
    expected = generated(model, static=False, tokens=40)
    right(expected[0], (15,))
    for number, tokens in ((15, 16), (15, 16), (DRAFTS, 40), (DRAFTS, 40)):
        drafter.generation_config.num_assistant_tokens = number
        found = generated(model, assistant_model=drafter, tokens=tokens)[0]
        assert torch.equal(found, expected[0][:, : 12 + tokens])
    assert not warned(caplog)


def test_drafts_that_began_elsewhere(model, right, monkeypatch):
    """As after an accepted end that does not end this text."""
    from transformers import EosTokenCriteria, StoppingCriteriaList

    drafter, candidates = drafter_of(model), drafts.Drafts.get_candidates
    expected = generated(model, static=False, tokens=24)[0]
    right(expected, (2,))

    def rounds(ahead):
        found = []

        def noted(self, input_ids, **kwargs):
            ids, logits = candidates(self, input_ids, **kwargs)
            found.append(ids.tolist())
            return ids, logits

        monkeypatch.setattr(drafts.Drafts, "get_candidates", noted)
        monkeypatch.setattr(drafts.Drafts, "begin", ahead)
        own = StoppingCriteriaList([EosTokenCriteria(eos_token_id=511)])
        options = {"eos_token_id": sorted({*expected[0, 12:].tolist()}), "stopping_criteria": own}
        for _ in range(2):
            found.clear()
            generated(model, assistant_model=drafter, tokens=16, **options)
        return found

    assert rounds(drafts.Drafts.begin) == rounds(lambda self, *args: None)


def test_drafts_begin_during_the_check(model, order):
    """Where a user's streamer could change the model: drafts do not decide which tokens follow."""
    drafter = drafter_of(model)
    generated(model, assistant_model=drafter)
    order.clear()
    generated(model, assistant_model=drafter, streamer=Tokens(order))
    rounds = order[order.index("check") :]
    assert rounds[:30] == ["check", "drafts ahead", "tokens"] * 10


@pytest.mark.parametrize("options", [{"do_sample": True}, {"repetition_penalty": 2.0}], ids=str)
def test_drafts_wait_where_other_tokens_are_chosen(model, order, options):
    drafter = drafter_of(model)
    for _ in range(2):
        generated(model, assistant_model=drafter, **options)
    assert order.count("drafts") > 4
    assert not {"drafts ahead", "check ahead"} & set(order)


@pytest.mark.parametrize("place", ["pretended", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_drafts_are_the_same(model_dir, monkeypatch, forced, place):
    """Those that began ahead, and those that transformers asked for."""
    from gemma4_compat.runtime.capture.drafts import Drafts

    if place == "pretended":
        pretend(monkeypatch)
    model = new_model(model_dir).float() if place == "pretended" else load_in("whole", model_dir)
    drafter = drafter_of(model)
    expected = generated(model, tokens=24)[0]

    def logits_of_drafts():
        forced(expected, (3, 0, 2, 1))
        candidates, drafts = Drafts.get_candidates, []

        def noted(self, *args, **kwargs):
            ids, logits = candidates(self, *args, **kwargs)
            drafts.append(logits)
            return ids, logits

        monkeypatch.setattr(Drafts, "get_candidates", noted)
        generated(model, assistant_model=drafter, tokens=24)
        return [each.cpu() for each in drafts if each is not None]

    logits_of_drafts()
    ahead = logits_of_drafts()
    monkeypatch.setattr(Drafts, "begin", lambda self, *args: None)
    asked = logits_of_drafts()
    assert len(ahead) == len(asked) > 4
    assert all(map(torch.equal, ahead, asked))


@pytest.mark.parametrize("streamer", [False, True])
def test_streams_wait_for_each_other(model, monkeypatch, right, forced, order, streamer):
    """Each call runs the same steps as if there were one stream."""
    drafter = drafter_of(model)
    expected = generated(model)
    options = {"streamer": Tokens([])} if streamer else {}

    def steps(way):
        way(expected[0], (3, 0, 2, 1))
        order.clear()
        found = generated(model, assistant_model=drafter, **options)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
        return list(order)

    for way in (right, forced):
        steps(way)
        alone = steps(way)
        assert ("check ahead" in alone) == (not streamer)
        with monkeypatch.context() as patch:
            side = pretend_side_stream(patch)
            steps(way)  # captured again: functions of streams were replaced
            assert steps(way) == alone
            assert side.waits > 8
            assert not side.written, "the call ended before its last check"


@pytest.mark.parametrize("moment", [1, 4, 9])
def test_drafts_that_find_no_memory(model, monkeypatch, caplog, moment):
    """They are made when transformers asks for them."""
    drafter, begin, empty = drafter_of(model), drafts.Drafts.begin, torch.empty_like
    for _ in range(2):
        expected = generated(model, assistant_model=drafter)
    failures = []

    def without_memory(self, *args):
        calls = []

        def empty_like(*args, **kwargs):
            calls.append("a tensor")
            if len(calls) == moment:
                failures.append("no memory")
                raise torch.OutOfMemoryError("CUDA out of memory")
            return empty(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", empty_like)
            begin(self, *args)

    monkeypatch.setattr(drafts.Drafts, "begin", without_memory)
    assert_same(generated(model, assistant_model=drafter), expected)
    assert not warned(caplog)
    assert bool(failures) == (moment < 5)  # a round has four tensors


def test_an_error_of_a_signal_while_drafts_begin(model, monkeypatch):
    """As of a handler that limits the time: it reaches the user."""
    drafter, begin = drafter_of(model), drafts.Drafts.begin
    for _ in range(2):
        generated(model, assistant_model=drafter)

    class TooLate(RuntimeError): ...

    def empty_like(*args, **kwargs):
        raise TooLate

    def interrupted(self, *args):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", empty_like)
            begin(self, *args)

    monkeypatch.setattr(drafts.Drafts, "begin", interrupted)
    with pytest.raises(TooLate):
        generated(model, assistant_model=drafter)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_ends_with_an_error(model, order, error):
    """Nothing of it keeps its cache."""

    class Interrupted(Tokens):
        def put(self, tokens):
            if order.count("drafts ahead") > 3:
                raise error

    drafter = drafter_of(model)
    expected = generated(model, assistant_model=drafter)
    with pytest.raises(error):
        generated(model, assistant_model=drafter, streamer=Interrupted(order))
    before = steps_of(model)
    assert_same(generated(model, assistant_model=drafter), expected)
    assert steps_of(model) <= max(before, STEPS)


# -- what keeps the rounds eager ------------------------------------------------------------------


def hook(model, drafter):
    model.model.language_model.layers[0].register_forward_hook(lambda *_: None)


def hook_of_the_drafter(model, drafter):
    drafter.model.layers[0].register_forward_hook(lambda *_: None)


def replaced_forward(model, drafter):
    layer = model.model.language_model.layers[0].mlp
    original = layer.forward
    layer.forward = lambda x: original(x) * 1.0


def replaced_draft(model, drafter):
    original = drafter.post_projection.forward
    drafter.post_projection.forward = lambda x: original(x) * 1.0


def training(model, drafter):
    model.model.language_model.layers[0].train()


@pytest.mark.parametrize(
    "change", [hook, hook_of_the_drafter, replaced_forward, replaced_draft, training]
)
def test_rounds_stay_eager(model, caplog, change):
    """The result is right, and the reason is said once."""
    drafter = drafter_of(model)
    change(model, drafter)
    expected = generated(model, static=False, assistant_model=drafter)
    for _ in range(2):
        assert torch.equal(generated(model, assistant_model=drafter)[0], expected[0])
    assert len(warned(caplog)) == 1
    # what has no code of the user is captured
    assert steps_of(model) <= (change in (replaced_forward, replaced_draft))


@pytest.mark.parametrize("owner", ["model", "drafter"])
def test_code_of_a_user_gets_the_usual_inputs(model, owner):
    """Also in the first rounds: neither more tokens nor other masks, and each call once."""
    drafter, shapes = drafter_of(model), []
    layer = model.model.language_model.layers[0].mlp
    module = layer if owner == "model" else drafter.masked_embedding
    original = module.forward

    def forward(x, *args, **kwargs):
        shapes.append(x.shape)
        return original(x, *args, **kwargs)

    for later in (False, True):
        module.__dict__.pop("forward", None)
        if later:  # after rounds without it were captured
            generated(model, assistant_model=drafter)
        module.forward = forward
        expected = generated(model, static=False, assistant_model=drafter)
        usual, shapes[:] = list(shapes), []
        assert torch.equal(generated(model, assistant_model=drafter)[0], expected[0])
        assert shapes == usual
        shapes.clear()


@pytest.mark.parametrize("name", ["masks", "rows_of"])
def test_a_check_that_computes_something_else(model, monkeypatch, caplog, name):
    """As with a release whose layers read a cache in another way: the call stays eager."""
    expected = generated(model, static=False, prompt_lookup_num_tokens=DRAFTS)
    original, calls = getattr(drafting, name), []

    def other(*args, **kwargs):
        calls.append(name)
        made = original(*args, **kwargs)
        if name == "rows_of":
            return tuple(rows.roll(1) for rows in made)  # each token's keys at another's place
        return {kind: mask & (mask.cumsum(-1) > 2) for kind, mask in made.items()}

    monkeypatch.setattr(watch, "_ASIDE", (*watch._ASIDE, __name__))
    monkeypatch.setattr(drafting, name, other)
    found = generated(model, prompt_lookup_num_tokens=DRAFTS)
    assert calls
    assert_near(found, expected)
    assert "because its outputs are not those of transformers" in caplog.text
    assert not steps_of(model)


@pytest.mark.parametrize("way", ["drafter", "lookup"])
@pytest.mark.parametrize("change", ["soft_cap", "forward_of_an_instance", "weight"])
def test_a_change_between_two_rounds(model, way, change):
    """A logits processor changes the model: that counts from the next round on."""
    way = (
        {"prompt_lookup_num_tokens": DRAFTS}
        if way == "lookup"
        else {"assistant_model": drafter_of(model)}
    )

    def played(static):
        patch = between.Patch()
        act = functools.partial(between.CHANGES[change], model, patch)
        try:
            return generated(model, static=static, **between.WAYS["processor"](act), **way)
        finally:
            patch.undo()

    usual = generated(model, **way)
    assert steps_of(model)
    expected = played(False)
    assert not torch.equal(expected[1], usual[1])
    assert_near(played(True), expected)
    assert_same(generated(model, **way), usual)


def test_a_masked_prompt(model, caplog):
    inputs = prompt(model)
    inputs["attention_mask"][:, :3] = 0
    drafter = drafter_of(model)
    expected = generated(model, inputs, static=False, assistant_model=drafter)
    assert torch.equal(generated(model, inputs, assistant_model=drafter)[0], expected[0])
    assert "masked" in warned(caplog)[0]


@pytest.mark.parametrize(
    "way", ["attention", "class", "drafter", "generator", "instance", "arguments"]
)
def test_functions_of_a_user(model, way):
    """Where a user's functions take part, transformers answers as without us."""
    drafter = drafter_of(model)
    if way == "attention":
        model.set_attn_implementation("eager")
    elif way == "class":
        original = type(model).forward

        @functools.wraps(original)
        def forward(*args, **kwargs):
            return original(*args, **kwargs)

        model.__class__ = type("Gemma4Own", (type(model),), {"forward": forward})
    elif way == "drafter":
        drafter.create_attention_masks = lambda *args: type(drafter).create_attention_masks(
            drafter, *args
        )
    elif way == "generator":
        generator = model._get_candidate_generator
        model._get_candidate_generator = lambda *args, **kwargs: generator(*args, **kwargs)
    elif way == "arguments":  # it may mask or move tokens

        def update(self, *args, **kwargs):
            return super(own, self)._update_model_kwargs_for_generation(*args, **kwargs)

        own = type("Gemma4Own", (type(model),), {"_update_model_kwargs_for_generation": update})
        model.__class__ = own
    else:
        original = model.prepare_inputs_for_generation

        @functools.wraps(original)
        def prepare(*args, **kwargs):
            return original(*args, **kwargs)

        model.prepare_inputs_for_generation = prepare
    with pytest.raises(ValueError, match=r"static|Static|cropped"):
        generated(model, assistant_model=drafter)
    expected = generated(model, static=False, assistant_model=drafter)
    assert len(expected[0][0]) == 12 + NEW_TOKENS


# -- the cache ------------------------------------------------------------------------------------


def test_the_cache_of_a_call(model):
    """It can be copied, pickled, and continued without drafts."""
    output = model.generate(
        **prompt(model),
        cache_implementation="static",
        assistant_model=drafter_of(model),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    cache = output[cache_name()]
    more = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(output.sequences, **more)
    for each in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert each.get_seq_length() == output.sequences.shape[1] - 1
        found = model.generate(output.sequences, **{cache_name(): each}, **more)
        assert torch.equal(found, expected)


def test_a_cache_goes_on_with_drafts_as_in_transformers(model):
    """Whose own drafts after a cache are not those of the whole prompt in each release."""
    drafter, tokens = drafter_of(model), []
    for static in (False, True):
        options = {"max_new_tokens": 4, "eos_token_id": None, "do_sample": False}
        first = {"cache_implementation": "static", "max_cache_len": 100} if static else {}
        output = model.generate(
            **prompt(model),
            **options,
            **first,
            assistant_model=drafter,
            return_dict_in_generate=True,
        )
        cache = {cache_name(): output[cache_name()]}
        tokens.append(model.generate(output.sequences, **cache, **options, assistant_model=drafter))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("right", [0, 3])
def test_a_cache_goes_on_after_the_end_of_a_text(model, forced, right):
    """The check that had begun wrote to it, after tokens that the text does not have."""
    drafter = drafter_of(model)
    expected = generated(model, static=False)[0]
    ids = torch.cat([expected, expected.new_zeros(1, 2 * DRAFTS)], dim=1)
    ends = [int(expected[0, 19 + place]) for place in range(4)]
    generated(model, assistant_model=drafter, max_cache_len=100)
    forced(ids, (right,))
    for end in ends:
        output = model.generate(
            **prompt(model),
            assistant_model=drafter,
            cache_implementation="static",
            max_cache_len=100,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=end,
            return_dict_in_generate=True,
        )
        cache, ids = output[cache_name()], output.sequences
        assert ids.shape[1] < expected.shape[1]
        whole = torch.cat([ids, expected[:, -5:]], dim=1)
        with torch.no_grad():
            alone = model(whole).logits
        refused = 0
        for removed in range(9):  # as often as the rows of old tokens last
            rest = copy.deepcopy(cache)
            try:
                rest.crop(-removed)
            except ModelError:
                refused += 1
                continue
            kept = rest.get_seq_length()
            with torch.no_grad():
                found = model(whole[:, kept:], **{cache_name(): rest}).logits
            torch.testing.assert_close(found, alone[:, kept:], rtol=1e-4, atol=1e-4)
        assert refused < 7


def test_more_than_there_is_room_for(model):
    from gemma4_compat.runtime.capture.rollback import RollbackCache

    cache = RollbackCache(model.config.get_text_config(), 20)
    with torch.no_grad(), pytest.raises(ModelError, match="room for 36 tokens, and 40 are needed"):
        model(**prompt(model, 40), **{cache_name(): cache})
    cache = RollbackCache(model.config.get_text_config(), 100)
    cache.make_room(4)
    with torch.no_grad():
        model(**prompt(model, 30), **{cache_name(): cache})
    cache.crop(-4)
    assert cache.get_seq_length() == 26
    with pytest.raises(ModelError, match="4 tokens cannot be removed: this cache no longer"):
        cache.crop(-4)


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("way", ["drafter", "lookup"])
@pytest.mark.parametrize("place", ["whole", "PLE on the CPU", "layers on the CPU"])
def test_on_a_gpu(model_dir, uncaptured, place, way):
    """The same rounds without capture, bit for bit."""
    model = load_in(place, model_dir)
    options = options_of(way, model)
    with uncaptured():
        expected = generated(model, **options)
    for _ in range(3):
        assert_same(generated(model, **options), expected)
    assert 2 <= steps_of(model) <= STEPS


@pytest.mark.cuda
def test_accepted_on_a_gpu(model_dir, right, forced):
    """The tokens of a call without drafts, as float32 rounds little."""
    model = load_model(model_dir).float().cuda()
    drafter = drafter_of(model)
    expected = generated(model, tokens=40)
    for way in (right, forced):
        for numbers in ((0,), (1,), (2,), (3,), (3, 0, 2, 1)):
            way(expected[0].cuda(), numbers)
            for _ in range(3):
                found = generated(model, assistant_model=drafter, tokens=40)
                assert torch.equal(found[0], expected[0])
                torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-3)
    assert 2 <= steps_of(model) <= STEPS


@pytest.mark.cuda
def test_two_streams_on_a_gpu(model_dir):
    """The second call of each thread may get the memory of the other one's first."""
    model = load_in("whole", model_dir)
    drafter, lengths, wrong = drafter_of(model), (6, 12, 30), []

    def call(length):
        return generated(model, prompt(model, length), tokens=40, assistant_model=drafter)

    expected = {length: call(length) for length in lengths for _ in range(2)}

    def run():
        with torch.cuda.stream(torch.cuda.Stream()):
            for length in 6 * lengths:
                if not all(map(torch.equal, call(length), expected[length])):
                    wrong.append(length)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.cuda
def test_an_adapter_on_a_gpu(model_dir, adapter_dir, uncaptured):
    from peft import PeftModel

    model = load_in("PLE on the CPU", model_dir)
    drafter = drafter_of(model)
    model = PeftModel.from_pretrained(model, adapter_dir)
    with uncaptured():
        expected = generated(model, assistant_model=drafter)
    for _ in range(2):
        assert_same(generated(model, assistant_model=drafter), expected)
    assert steps_of(model.get_base_model())
