"""A user's code in a decode step runs in each step, whichever way it got there.

``tests/doors.json`` has what was measured on a GPU; ``python -m tests.test_doors`` measures it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from gemma4_compat.runtime.capture import graph
from gemma4_compat.runtime.kernels import watch
from gemma4_compat.versions import FLOORS, LIBRARIES, NEWEST, USERS
from tests import doors, support
from tests.doors import DOORS, Own, layers_of
from tests.pretended_gpu import pretend

TOKENS = 4
WHEN = "open before the first capture", "opened between two calls", "opened between two tokens"
DATA = Path(__file__).with_name("doors.json")
#: bitsandbytes 0.46.1 has no library for CUDA 13
STACKS = {"newest": NEWEST, "users": USERS, "oldest": {**FLOORS, "bitsandbytes": "0.48.0"}}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            pretend(patch)
        yield request.param


@pytest.fixture(scope="module")
def model(device, model_dir, adapter_dir):
    return load(device, model_dir, adapter_dir)


def load(device, model_dir, adapter_dir):
    from peft import PeftModel

    kind = None if device == "cpu" else "nf4"
    base = support.load_model(model_dir, kind, {"": 0 if device == "cuda" else "cpu"})
    return PeftModel.from_pretrained(base, adapter_dir).eval().get_base_model()


@contextlib.contextmanager
def opened(door, model):
    """The state of the user's code, while its door is open."""
    own = Own()
    vars(model).pop("_cache", None)  # older releases keep the cache of the last call
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if inspect.isgeneratorfunction(door):
            stack.enter_context(contextlib.contextmanager(door)(model, own, patch))
        else:
            door(model, own, patch)
        try:
            yield own
        finally:
            own.restore()
            vars(model).pop("_cache", None)


def generated(model, eager=False, tokens=TOKENS, **options):
    ids = torch.tensor([[5, 17, 101, 33]], device=model.device)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), cache_implementation="static",
        disable_compile=eager, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return torch.stack(output.logits)


def captures(model):
    return sum(len(memory.steps) for memory in vars(model)["_decoding"].memories)


def fresh(model):
    vars(model).pop("_decoding", None)


@pytest.fixture(scope="module")
def usual(model):
    """The logits without anything of a user's."""
    return generated(model, eager=True)


class Opens(LogitsProcessor):
    """Opens a door after the second token."""

    def __init__(self, open_door):
        self.open_door, self.tokens = open_door, 0

    def __call__(self, input_ids, scores):
        self.tokens += 1
        if self.tokens == 2:
            self.open_door()
        return scores


def between_two_tokens(model, door, eager=False):
    """The logits of a call during which a logits processor opens the door, and the user's code."""
    owns = []
    with contextlib.ExitStack() as stack:
        opens = Opens(lambda: owns.append(stack.enter_context(opened(door, model))))
        processors = LogitsProcessorList([opens])
        return generated(model, eager, TOKENS + 2, logits_processor=processors), owns[0]


def play(model, door, usual):
    """What happens with a door that is opened before, between and within calls.

    "eager" or "captured", if tokens, logits and the number of calls are those of eager decoding.
    """
    fresh(model)
    with opened(door, model) as reference:
        expected = generated(model, eager=True)
    assert reference.calls >= TOKENS - 1
    verdicts = {}
    for when in WHEN[: 2 if door.of_a_call else 3]:
        if when == WHEN[-1]:
            expected, reference = between_two_tokens(model, door, eager=True)
            assert reference.calls >= TOKENS - 1
            found, own = between_two_tokens(model, door)
        else:
            with opened(door, model) as own:
                found = generated(model)
        decoding = vars(model)["_decoding"]
        verdict = "eager" if decoding.warned else "captured"
        if own.calls != reference.calls:
            verdict = f"WRONG: {own.calls} calls, not {reference.calls}"
        elif not torch.equal(found, expected):
            verdict = "WRONG: other logits"
        # Closed again: the steps are those of before, and captured.
        elif not torch.equal(generated(model), usual) or not captures(model):
            verdict = "WRONG: afterwards"
        verdicts[when] = verdict
        decoding.warned.clear()
    return verdicts


@pytest.mark.parametrize("name", DOORS)
def test_own_code_runs_in_each_step(model, usual, name):
    assert set(play(model, DOORS[name], usual).values()) == {DOORS[name].verdict}


@pytest.mark.parametrize("stack", STACKS)
def test_data(stack):
    """Each door was tried on a GPU, and no verdict is bad."""
    entry = json.loads(DATA.read_text(encoding="utf-8"))[stack]
    assert {name: entry["versions"][name] for name in LIBRARIES} == STACKS[stack]
    assert entry["doors"].keys() == DOORS.keys()
    for name, verdicts in entry["doors"].items():
        assert verdicts.keys() == {*WHEN[: 2 if DOORS[name].of_a_call else 3]}
        assert set(verdicts.values()) == {DOORS[name].verdict}, name


def test_torchscript(model, monkeypatch):
    """Its functions are not Python's, and may have values that change in each step."""

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    scripted = torch.jit.script(Counting())
    monkeypatch.setitem(vars(layers_of(model)[1].mlp.act_fn), "forward", scripted.forward)
    fresh(model)
    expected = generated(model, eager=True)
    scripted.calls = 0
    assert torch.equal(generated(model), expected)
    assert scripted.calls == TOKENS


def limit(*_):
    raise TimeoutError("the user's")


#: what a handler does, its error, and what that says
HANDLERS = {
    "raises": (limit, TimeoutError, "the user's"),
    "fails in a library": (lambda *_: json.loads("?"), json.JSONDecodeError, "Expecting value"),
    "fails in torch": (lambda *_: torch.save({}, "/no/such/folder/a"), RuntimeError, "no/such"),
    "a method": (SimpleNamespace(limit=limit).limit, TimeoutError, "the user's"),
}


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no SIGALRM")
@pytest.mark.parametrize("name", ["capture_begin", "capture_end", "replay"])
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_time_limit(model, usual, monkeypatch, name, handler):
    """Its handler raises as a call returns: nothing runs twice, and nothing stays open."""
    fresh(model)
    function = getattr(torch.cuda.CUDAGraph, name)

    def limited(graph, *args, **options):
        function(graph, *args, **options)
        signal.raise_signal(signal.SIGALRM)

    handle, error, text = HANDLERS[handler]
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.CUDAGraph, name, limited)
            with pytest.raises(error, match=text):
                generated(model)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not torch._C._len_torch_dispatch_stack()
    assert torch.equal(generated(model), usual)
    assert captures(model)


def test_an_error_after_the_launch(model, usual, monkeypatch):
    """Such as one that another thread sends: the step has run, so it must not run again."""
    generated(model)

    def late(*_):
        raise torch.OutOfMemoryError("late")

    with monkeypatch.context() as patch:
        patch.setattr(graph, "_copy", late)
        with pytest.raises(torch.OutOfMemoryError, match="late"):
            generated(model)
    assert torch.equal(generated(model), usual)


def test_code_that_runs_once(model, usual):
    """A line in a log or an import keeps the steps eager for a token."""
    fresh(model)
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
    fresh(model)
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


def test_a_handler_of_logs(model, usual, monkeypatch):
    """Its code does not belong to a step, also if a library logs a line in each step."""
    lines = []

    class Handler(logging.Handler):
        def emit(self, record):
            lines.append(record)

    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "handlers", [Handler()])
    doors.log_in_each_step(monkeypatch, logger)
    monkeypatch.setattr(watch, "KNOWN", (*watch.KNOWN, "tests.doors"))
    fresh(model)
    assert torch.equal(generated(model), usual)
    assert lines
    assert captures(model)


def test_inspect_model_says_why(model):
    """After a call, and no longer after the code was taken away."""
    from gemma4_compat.runtime.facts import how_it_decodes

    fresh(model)
    with opened(DOORS["forward_of_an_instance"], model):
        generated(model)
        assert "own (" in how_it_decodes(model)
    assert "own (" not in how_it_decodes(model)


#: Loads a model with functions of another library in its steps.
BESIDE = {
    "liger_kernel": """
from liger_kernel.transformers import apply_liger_kernel_to_gemma4
apply_liger_kernel_to_gemma4(rope=False, fused_linear_cross_entropy=False)
model = support.load_model(folder, "nf4", {"": 0})
assert "liger" in type(model.model.language_model.layers[0].mlp).forward.__module__
""",
    "compressed_tensors": """
from transformers import Gemma4ForConditionalGeneration
packed = support.save_w4a16(folder, pathlib.Path(folder, "w4a16"))
model = Gemma4ForConditionalGeneration.from_pretrained(packed, device_map={"": 0}).eval()
""",
}
CHECK = """
import pathlib, sys
import gemma4_compat
import torch
from tests import support, test_doors
folder = sys.argv[1]
{load}
from gemma4_compat.patches.generation import captured_decoding
compiles = model.hf_quantizer.is_compileable  # compiled steps round otherwise, and are not ours
usual = test_doors.generated(model, eager=True)
assert torch.equal(test_doors.generated(model), usual) or compiles
captured = "_decoding" in vars(model) and test_doors.captures(model) > 0
print(compiles, captured, vars(model).get("_decoding"))
assert captured is (sys.argv[2] == "compressed_tensors" and not compiles)
"""


@pytest.mark.cuda
@pytest.mark.parametrize("library", BESIDE)
def test_beside_another_library(model_dir, library):
    """compressed-tensors is captured, unless transformers compiles it.  Liger is not, since Triton
    writes Python code for it.
    """
    pytest.importorskip(library)
    code = CHECK.format(load=BESIDE[library])
    done = support.run_process([sys.executable, "-c", code, model_dir, library], [*sys.path, "."])
    assert done.returncode == 0, done.stdout + done.stderr


def main():
    """Measure all doors on the GPU of this machine: ``python -m tests.test_doors STACK``."""
    import importlib.metadata

    from gemma4_compat.tiny import build_adapter, build_checkpoint

    logging.disable(logging.WARNING)
    stack = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        model_dir = build_checkpoint(Path(folder, "model"))
        model = load("cuda", model_dir, build_adapter(Path(folder, "adapter"), model_dir))
        usual = generated(model, eager=True)
        verdicts = {name: play(model, door, usual) for name, door in DOORS.items()}
    versions = {name: importlib.metadata.version(name) for name in ("torch", *LIBRARIES)}
    entry = {"device": torch.cuda.get_device_name(), "versions": versions, "doors": verdicts}
    found = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    text = json.dumps({**found, stack: entry}, indent=1) + "\n"
    Path(os.environ.get("OUT", DATA.parent), DATA.name).write_text(text, encoding="utf-8")
    for name, each in verdicts.items():
        print(name, *each.values(), sep="; ")


if __name__ == "__main__":
    main()
