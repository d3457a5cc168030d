"""A user's code in a decode step runs in each step, whichever way it got there."""

from __future__ import annotations

import contextlib
import inspect
import sys

import pytest
import torch

from tests import support
from tests.doors import DOORS, Own, layers_of
from tests.pretended_gpu import pretend

TOKENS = 6


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            pretend(patch)
        yield request.param


@pytest.fixture(scope="module")
def model(device, model_dir, adapter_dir):
    from peft import PeftModel

    kind = None if device == "cpu" else "nf4"
    base = support.load_model(model_dir, kind, {"": 0 if device == "cuda" else "cpu"})
    return PeftModel.from_pretrained(base, adapter_dir).eval().get_base_model()


@pytest.fixture(scope="module")
def usual(model):
    return generated(model, eager=True)


@contextlib.contextmanager
def opened(name, model):
    """The state of the user's code, while its door is open."""
    own, door = Own(), DOORS[name]
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if inspect.isgeneratorfunction(door):
            stack.enter_context(contextlib.contextmanager(door)(model, own, patch))
        else:
            door(model, own, patch)
        try:
            yield own
        finally:
            getattr(own, "restore", lambda: None)()
    if hasattr(own, "recorder"):
        own.calls = own.recorder.call_count


def generated(model, eager=False, **options):
    ids = torch.tensor([[5, 17, 101, 33]], device=model.device)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), cache_implementation="static",
        disable_compile=eager, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return torch.stack(output.logits)


def captures(model):
    return sum(len(memory.steps) for memory in vars(model)["_decoding"].memories)


@pytest.mark.parametrize("name", DOORS)
def test_own_code_runs_in_each_step(model, usual, name, caplog):
    """With a door that is open from the beginning, and with one that opens between two calls."""
    vars(model).pop("_decoding", None)
    with opened(name, model) as reference:
        expected = generated(model, eager=True)
    assert reference.calls >= TOKENS - 1
    for _ in range(2):
        caplog.clear()
        with opened(name, model) as own:
            found = generated(model)
        assert own.calls == reference.calls
        assert torch.equal(found, expected)
        is_eager = "decodes eagerly with a static cache" in caplog.text
        assert is_eager != DOORS[name].is_captured
        # Closed again: the steps are those of before.
        caplog.clear()
        assert torch.equal(generated(model), usual)
        assert captures(model), "nothing was captured"
        vars(model)["_decoding"].warned.clear()


def test_code_that_runs_once(model, usual, monkeypatch):
    """A line in a log or an import keeps the steps eager for a token."""
    vars(model).pop("_decoding", None)
    mlp, calls = layers_of(model)[1].mlp, []

    def forward(hidden):
        calls.append(1)
        del vars(mlp)["forward"]
        return mlp.forward(hidden)

    class Streamer:
        """Puts the code there after the prompt."""

        def put(self, tokens):
            if not calls:
                vars(mlp)["forward"] = forward

        def end(self):
            pass

    assert torch.equal(generated(model, streamer=Streamer()), usual)
    assert calls == [1]
    assert captures(model)


def test_while_a_profiler_runs(model, usual, caplog):
    """What a step runs cannot be watched then; later calls are captured."""
    vars(model).pop("_decoding", None)
    seen = []
    sys.setprofile(lambda frame, event, argument: seen.append(event))
    try:
        found = generated(model)
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert torch.equal(found, usual)
    assert seen
    assert "a profiler" in caplog.text
    assert not captures(model)
    assert torch.equal(generated(model), usual)
    assert captures(model)
