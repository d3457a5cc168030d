"""A KeyboardInterrupt at any line, or an allocation that fails, does not spoil a model.

The interrupt comes in the first or in the second forward.  The next forwards must equal those of an
undisturbed model bit for bit, and nothing must stay slow: the same functions run as without it.
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile

import pytest
import torch

from gemma4_compat.patches import _offload
from gemma4_compat.runtime.host import blocks, page_locked, parts, read_ahead, table
from tests import support

PACKAGE = "gemma4_compat"
HOST = "runtime.host"
STREAMING = [
    f"{HOST}.blocks", f"{HOST}.parts", f"{HOST}.page_locked", "objects",
    f"{HOST}.hooked",
]  # fmt: skip
#: what is offloaded how -> the modules in which the interrupt comes
PLACES = {
    "streamed": STREAMING,
    "experts in place": STREAMING,
    "8 bit": [*STREAMING, f"{HOST}.int8_state"],
    "by accelerate": ["patches.offloading.quant_state_offload"],
    "embeddings": [f"{HOST}.table", f"{HOST}.hooked", "objects"],
    "on the disk": [f"{HOST}.read_ahead"],
    "onloaded": ["patches._offload"],
}
#: So many of the points are tried by default.
SAMPLE = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Small models, by kind."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("model")
    support.save_random(
        "Gemma4 experts",
        path,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    )

    def load(kind):
        config = support.quantization(kind, llm_int8_skip_modules=support.NOT_PACKED)
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=config
        ).eval()

    return {kind: load(kind) for kind in ("nf4-nested", "int8")}


class Interrupt:
    """Notes the lines of these files that a block runs; raises before the one of number ``at``."""

    def __init__(self, names, at=None):
        modules = [importlib.import_module(f"{PACKAGE}.{name}") for name in names]
        self.files, self.at = {each.__file__ for each in modules}, at
        self.lines = []

    def called(self, frame, event, arg):
        return self.line if frame.f_code.co_filename in self.files else None

    def line(self, frame, event, arg):
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) - 1 == self.at:
                raise KeyboardInterrupt
        return self.line

    def points(self):
        """The first and the last time of each line, in the order of time."""
        first = {line: number for number, line in reversed(list(enumerate(self.lines)))}
        last = {line: number for number, line in enumerate(self.lines)}
        return sorted({*first.values(), *last.values()})

    def __enter__(self):
        sys.settrace(self.called)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(None)
        return kind is KeyboardInterrupt


class Case:
    """A model that is offloaded in one of these ways, and its forward."""

    def __init__(self, place, whole, folder, monkeypatch):
        self.place, self.folder = place, folder
        self.whole = whole["int8" if place == "8 bit" else "nf4-nested"]
        if place in ("streamed", "experts in place", "8 bit"):
            monkeypatch.setattr(blocks, "STREAMED_TO", ("cpu", "cuda"))
        if place == "experts in place":
            monkeypatch.setattr(blocks, "page_lock", lambda host, device=None: True)
            monkeypatch.setattr(blocks, "on_gpu", lambda host, device: host)
        self.fast = []  # the calls that show that a patch is at work
        module, name = {
            "embeddings": (table, "_table_to_look_up"),
            "on the disk": (read_ahead, "_is_cached"),
        }.get(place, (parts, "_like"))
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: self.fast.append(1) or original(*args))

    def model(self):
        from accelerate import cpu_offload, disk_offload

        model = copy.deepcopy(self.whole)
        if self.place == "on the disk":
            # An index that is in the folder would be used: without it, the values are of now.
            folder = tempfile.mkdtemp(dir=self.folder)
            return disk_offload(model, folder, execution_device=torch.device("cpu"))
        if self.place == "embeddings":
            cpu_offload(model.model.embed_tokens, execution_device=torch.device("cpu"))
            return model
        return cpu_offload(model, execution_device=torch.device("cpu"))

    def forward(self, model):
        if self.place == "onloaded":
            modules = [m for m in model.modules() if m._parameters]
            with _offload.onloaded(*modules), torch.no_grad():
                model(input_ids=torch.arange(3, 15)[None])
            with _offload.onloaded(*modules, keep_changes=True):
                pass
        with torch.no_grad():
            return model(input_ids=torch.arange(3, 15)[None]).logits

    def forwards(self, model, count=2):
        """The logits, and how often a patch was at work in the last forward."""
        for _ in range(count):
            self.fast.clear()
            logits = self.forward(model)
            yield logits
        yield len(self.fast)


@pytest.fixture
def case(request, whole, tmp_path, monkeypatch):
    if request.param == "on the disk" and not sys.platform.startswith("linux"):
        pytest.skip("Linux only")
    return Case(request.param, whole, tmp_path, monkeypatch)


def check(case, first, sample):
    """Interrupt fresh models at a sample of the lines, in the first or in the second forward."""
    names = PLACES[case.place]
    with torch.no_grad():
        expected = case.whole(input_ids=torch.arange(3, 15)[None]).logits
    model = case.model()
    if not first:
        case.forward(model)
    with Interrupt(names) as lines:
        assert torch.equal(case.forward(model), expected)
    *_, fast = case.forwards(model)
    wrong = []
    points = lines.points()
    assert len(points) >= 10
    for at in points[:: max(len(points) // sample, 1)] if sample else points:
        model = case.model()
        if not first:
            case.forward(model)
        with Interrupt(names, at):
            case.forward(model)
        try:
            *found, still = case.forwards(model)
        except Exception as error:
            wrong.append((lines.lines[at], repr(error)[:80]))
            continue
        if not all(torch.equal(each, expected) for each in found):
            wrong.append((lines.lines[at], "other logits"))
        elif still != fast:
            wrong.append((lines.lines[at], f"{still} instead of {fast} calls"))
    assert not wrong, f"{len(wrong)} of {len(points)}: {wrong[:12]}"


@pytest.mark.parametrize("first", [True, False], ids=["first forward", "second forward"])
@pytest.mark.parametrize("case", PLACES, indirect=True)
def test_an_interrupt_at_some_lines(case, first):
    check(case, first, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["first forward", "second forward"])
@pytest.mark.parametrize("case", PLACES, indirect=True)
def test_an_interrupt_at_every_line(case, first):
    check(case, first, None)


FAILURES = [MemoryError(), RuntimeError("can't allocate memory"), torch.cuda.OutOfMemoryError()]


@pytest.mark.parametrize("error", FAILURES, ids=repr)
@pytest.mark.parametrize("where", ["allocate", "page_lock", "_empty_like"])
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("case", ["streamed"], indirect=True)
def test_an_allocation_that_fails_once(case, monkeypatch, where, call, error):
    """No forward raises, since accelerate needs no such memory; later ones use the block again."""
    with torch.no_grad():
        expected = case.whole(input_ids=torch.arange(3, 15)[None]).logits
    *_, fast = case.forwards(case.model())
    owner = blocks.Layer if where == "allocate" else blocks
    original, calls = getattr(owner, where), []

    def failing(*args):
        calls.append(1)
        if len(calls) == call:
            raise error
        return original(*args)

    monkeypatch.setattr(owner, where, failing)
    *found, still = case.forwards(case.model(), 3)
    assert all(torch.equal(each, expected) for each in found)
    assert still == fast
    assert page_locked.locked() == 0
