"""A failure at any point of a small model's life spoils nothing.

A ``Scene`` is one step of that life, from loading to unloading.  It runs again and again, each time
with one failure: a ``KeyboardInterrupt`` before a line of our code, or the error of a call that
allocates, copies, captures, reads a file or takes a lock.  Then either the scene went through or it
raised that error; the next run equals that of an undisturbed model bit for bit and calls the same
functions; and no hook, thread, lock, page-locked memory or replaced attribute is left over.

By default the CPU stands in for a GPU, and a sample of the points is tried.  ``python -m
tests.test_faults`` tries all of them and prints the numbers; with ``--device cuda``, on a GPU.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import inspect
import logging
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gemma4_compat
from gemma4_compat import objects
from gemma4_compat.model.hooks import offload_hooks
from gemma4_compat.patches.offloading import quant_state_offload
from gemma4_compat.runtime.host import blocks, page_locked
from gemma4_compat.runtime.host import onloading as _offload
from tests import support
from tests.pretended_gpu import pretend, registered, tensors_in

PACKAGE = Path(gemma4_compat.__file__).parent
FILES = {str(file): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
#: Interrupts come in the runtime and in the code that calls it; other failures in all files.
INTERRUPTED = {
    file
    for file, source in FILES.items()
    if file.startswith(str(PACKAGE / "runtime")) or "...runtime." in source
} | {objects.__file__, _offload.__file__, quant_state_offload.__file__}
#: So many of the points of a scene are tried by default.
SAMPLE = 2

#: What a call raises if it fails -> the names of the functions and methods.
ERRORS = {
    torch.OutOfMemoryError("CUDA out of memory"): (
        "empty empty_like zeros new_empty clone copy_ to cpu cat index_select as_tensor "
        "float contiguous reshape embedding matmul_4bit dequantize_4bit dequantize_blockwise Step "
        "from_prequantized CUDAGraph capture_begin capture_end replay graph_pool_handle Stream"
    ),
    MemoryError(): "page_lock page_locked_memory allocate deepcopy cudaHostRegister frombuffer",
    OSError("Input/output error"): "open safe_open from_file read_header CDLL",
}
ERROR_OF = {name: error for error, names in ERRORS.items() for name in names.split()}
NO_LOCK = MemoryError("no lock")
LOCKS = ("lock", ".now", "_one_", "_counting")
#: Code that computes what nothing else could: its errors are the user's.
MAY_RAISE = (
    "patches",
    "model/hooks.py",
    "runtime/experts",
    "runtime/host/table.py",
    "runtime/host/forward_lock.py",
)

#: Levels that may be lower after a failure.
MAY_SHRINK = ("on GPUs", "copies")

#: Functions whose calls need no memory, so that they do not fail.
CANNOT_FAIL = ("runtime/capture/graph.py:_copy",)


# -- where to fail --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """Before this line runs for the ``nth`` time, this error is raised."""

    file: str
    line: int
    nth: int
    error: Any = field(default_factory=KeyboardInterrupt)

    @property
    def function(self):
        """The file and the name of the function that the line is in."""
        inside = Path(self.file).relative_to(PACKAGE).as_posix()
        return f"{inside}:{Source.of(self.file).functions.get(self.line)}"

    @property
    def interrupts(self):
        return isinstance(self.error, KeyboardInterrupt)

    def __str__(self):
        return f"{type(self.error).__name__} in {self.function}, line {self.line}, time {self.nth}"


class Source:
    """What the lines of one of our files contain."""

    def __init__(self, file):
        self.calls = {}  # line -> what a call in it raises if it fails
        self.blocks = {}  # line of the head of a ``with`` block -> its last line
        self.tries = set()  # at the word ``try``, Python runs nothing
        self.functions = {}  # line -> the name of its function
        for node in ast.walk(ast.parse(FILES[file])):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                if name in ERROR_OF:
                    self.calls[node.func.end_lineno] = ERROR_OF[name]
            elif isinstance(node, ast.With):
                for item in node.items:
                    line = item.context_expr.lineno
                    self.blocks[line] = node.end_lineno
                    if any(word in ast.unparse(item) for word in LOCKS):
                        self.calls.setdefault(line, NO_LOCK)
            elif isinstance(node, ast.Try):
                self.tries.add(node.lineno)
            elif isinstance(node, ast.FunctionDef):
                lines = range(node.lineno, node.end_lineno + 1)
                self.functions.update(dict.fromkeys(lines, node.name))

    of = cache(lambda file: Source(file))


class Trace:
    """Notes the lines and functions of our code that a block runs, and fails at a point."""

    def __init__(self, point=None, lines=True):
        self.point, self.with_lines, self.raised = point, lines, False
        self.lines, self.functions = Counter(), set()

    def called(self, frame, event, arg):
        file, last = frame.f_code.co_filename, frame.f_lineno
        if file not in FILES:
            return None
        if file in INTERRUPTED:
            self.functions.add((file, frame.f_code.co_name))
        if not self.with_lines or (self.point is not None and file != self.point.file):
            return None
        ends = Source.of(file).blocks

        def line(frame, event, arg):
            nonlocal last
            if event == "line":
                number = frame.f_lineno
                # Python itself lets no interrupt come between a block and its ``__exit__``.
                leaves = number < last <= ends.get(number, 0)
                last = number
                if not leaves:
                    self.reach(file, number)
            return line

        return line

    def reach(self, *line):
        self.lines[line] += 1
        at = self.point
        if at is not None and (at.file, at.line, at.nth) == (*line, self.lines[line]):
            self.raised = True
            support.fails(at.error)()

    def points(self):
        """The first and last time of each line, and the first, second and last of each call."""
        for (file, line), count in self.lines.items():
            source = Source.of(file)
            if file in INTERRUPTED and line not in source.tries:
                yield from (Point(file, line, nth) for nth in sorted({1, count}))
            if error := source.calls.get(line):
                failures = [Point(file, line, n, error) for n in sorted({1, min(2, count), count})]
                yield from (each for each in failures if each.function not in CANNOT_FAIL)

    def __enter__(self):
        sys.settrace(self.called)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


# -- scenes ---------------------------------------------------------------------------------------


class Stage:
    """Small models, and the folders that scenes write to."""

    def __init__(self, folder, device="cpu"):
        import tqdm
        from peft import LoraConfig, get_peft_model

        tqdm.tqdm.monitor_interval = 0  # or it starts a thread
        self.folder, self.device = Path(folder), torch.device(device)
        self.ids = torch.arange(3, 9, device=self.device)[None]
        sizes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
        support.save_random("Gemma4 experts", self.folder / "model", num_experts=8, **sizes)
        self.whole = {kind: self.load(kind) for kind in ("nf4-nested", "int8")}
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        get_peft_model(self.model(), lora).save_pretrained(self.folder / "adapter")

    def load(self, kind, device_map=None, **options):
        from transformers import AutoModelForCausalLM

        config = support.quantization(kind, llm_int8_skip_modules=support.NOT_PACKED, **options)
        return AutoModelForCausalLM.from_pretrained(
            self.folder / "model",
            dtype=torch.bfloat16,
            device_map={"": str(self.device), **(device_map or {})},
            quantization_config=config,
            offload_folder=self.folder / "offload",
        ).eval()

    def model(self, kind="nf4-nested"):
        return copy.deepcopy(self.whole[kind])

    def split(self, **places):
        """A model with parts on the CPU and the disk; it reads the values in an old folder."""
        from accelerate import dispatch_model

        places = places or {"embed_tokens": "cpu", "layers.0": "cpu", "layers.1": "disk"}
        return dispatch_model(
            self.model(),
            {"": self.device, **{f"model.{name}": place for name, place in places.items()}},
            main_device=self.device,
            offload_dir=self.folder / "-".join(places),
            skip_keys=self.whole["nf4-nested"]._skip_keys_device_placement,
        )

    def offloaded(self, kind="nf4-nested"):
        from accelerate import cpu_offload

        model = self.model(kind)
        cpu_offload(model, execution_device=self.device)
        return model

    def with_adapter(self, model=None, **options):
        from peft import PeftModel

        return PeftModel.from_pretrained(model or self.split(), self.folder / "adapter", **options)

    def trainable(self):
        from peft import prepare_model_for_kbit_training

        options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
        model = prepare_model_for_kbit_training(self.split(), **options)
        return self.with_adapter(model, is_trainable=True)


# What happens to a subject: a model, or a box for a model that the scene makes.


def forward(stage, model):
    with torch.no_grad():
        return model(input_ids=stage.ids).logits


def made(make, stage, box):
    box.model = make(stage)
    return forward(stage, box.model)


def adapted(stage, model):
    return forward(stage, stage.with_adapter(model))


def onloaded(stage, model):
    modules = [module for module in model.modules() if module._parameters]
    with _offload.onloaded(*modules):
        inside = forward(stage, model)
    with _offload.onloaded(*modules, keep_changes=True):
        pass
    return [inside, forward(stage, model)]


def decoded(stage, model):
    kept = vars(model).get("_cache")  # of transformers < 5.7
    if kept is not None and not all(layer.is_initialized for layer in kept.layers):
        del model._cache  # after an interrupt in its first forward, ``generate`` cannot use it
    output = model.generate(
        input_ids=stage.ids[:, :4],
        attention_mask=torch.ones_like(stage.ids[:, :4]),
        cache_implementation="static",
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return [output.sequences, *output.logits]


def trained(stage, model):
    model.train()
    model.zero_grad()
    model(input_ids=stage.ids, labels=stage.ids, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def keeps_abandoned_graphs(stage, model):
    """Whether the tensors of a training step without its backward stay; without us, too.

    Gradient checkpointing keeps the arguments of a layer.  In older releases of transformers, the
    layer writes its keys and values to one of them, so that they keep each other.
    """
    before = graphs()
    model(input_ids=stage.ids, use_cache=False)
    return graphs() > before


def graphs():
    gc.collect()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return sum(tensor.grad_fn is not None for tensor in tensors)


def saved(stage, model):
    from safetensors.torch import load_file

    model.save_pretrained(stage.folder / "saved")
    files = sorted((stage.folder / "saved").glob("*.safetensors"))
    return [*map(load_file, files), forward(stage, model)]


def unloaded(stage, model):
    from accelerate.hooks import remove_hook_from_submodules

    model.unload()
    remove_hook_from_submodules(model.get_base_model())
    return forward(stage, model.get_base_model())


@dataclass
class Scene:
    start: Any  # stage -> subject
    act: Any = forward  # stage, subject -> tensors
    again: bool = False  # fail in a later run; one subject then serves for many points
    streamed: bool = True
    in_place: bool = False

    def subject(self, stage):
        subject = self.start(stage)
        if self.again:
            self.act(stage, subject)
        return subject


def box(stage):
    return SimpleNamespace(model=None)


SPLIT = {"model.embed_tokens": "cpu", "model.layers.0": "cpu"}
ON_DISK = {"model.layers.1": "disk"}
FP32 = {"llm_int8_enable_fp32_cpu_offload": True}
STREAMED_LAYERS = partial(Stage.split, layers="cpu")
TWICE = {
    "streamed": Scene(Stage.offloaded),
    "experts in place": Scene(Stage.offloaded, in_place=True),
    "8 bit": Scene(partial(Stage.offloaded, kind="int8")),
    "by accelerate": Scene(Stage.offloaded, streamed=False),
    "on the disk": Scene(partial(Stage.split, layers="disk")),
    "split, with an adapter": Scene(Stage.with_adapter),
    "captured": Scene(STREAMED_LAYERS, decoded),
    "training": Scene(Stage.trainable, trained),
}
SCENES = {
    **TWICE,
    **{f"{name}, again": replace(scene, again=True) for name, scene in TWICE.items()},
    "load in 4 bits": Scene(
        box, partial(made, lambda stage: stage.load("nf4-nested", SPLIT, **FP32))
    ),
    "load from the disk": Scene(box, partial(made, lambda stage: stage.load(None, ON_DISK))),
    "dispatch": Scene(box, partial(made, Stage.split)),
    "adapter": Scene(Stage.split, adapted),
    "onloaded": Scene(Stage.split, onloaded, again=True, streamed=False),
    "save": Scene(Stage.split, saved, again=True),
    "save an adapter": Scene(Stage.with_adapter, saved, again=True),
    "unload": Scene(Stage.with_adapter, unloaded),
}


# -- the check ------------------------------------------------------------------------------------


def allocated():
    """Bytes on the GPU, without those that wait until a stream no longer needs them."""
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def held_locks():
    """The names of the locks that are held; this thread runs no forward."""
    held = [f"lock {id(lock)}" for lock in objects._locks if lock.now._is_owned()]
    for name, module in list(sys.modules.items()):
        for key, value in vars(module).items() if name.startswith("gemma4_compat.runtime") else ():
            if hasattr(value, "acquire"):
                if (value.locked if hasattr(value, "locked") else value._is_owned)():
                    held.append(f"{name}.{key}")
    return held


def levels(subject=None):
    """What must not grow."""
    model = subject.model if isinstance(subject, SimpleNamespace) else subject
    modules = [] if model is None else list(model.modules())
    weights = (weight for module in modules for weight in module._parameters.values())
    layers = blocks.streamed_layers(modules)
    maps = (getattr(hook, "tied_params_map", None) or {} for hook in offload_hooks(modules))
    tied = {address: shared for each in maps for address, shared in each.items()}
    return {
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules),
        "attributes": sum(len(vars(module)) for module in modules),
        "weights on meta": sum(weight is not None and weight.is_meta for weight in weights),
        "tied weights": sum(map(len, tied.values())),
        "threads": threading.active_count(),
        "locks": held_locks(),
        "page-locked": page_locked.locked(),
        "on GPUs": allocated(),
        "copies": sum(layer.copy is not None for layer in layers),
        "registered": len(registered),
        "replaced": len(objects._replaced),
        "garbage collection": gc.isenabled(),
        "captures": torch._C._len_torch_dispatch_stack(),
    }


def changed(expected, subject=None, ignored=()):
    """Which levels are others, also without the objects that nothing refers to."""
    if levels(subject) == expected:
        return None
    gc.collect()
    found = levels(subject)
    wrong = [key for key in expected if found[key] != expected[key] and key not in ignored]
    wrong = [key for key in wrong if key not in MAY_SHRINK or found[key] > expected[key]]
    return "; ".join(f"{key}: {found[key]} instead of {expected[key]}" for key in wrong) or None


def is_same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def difference(found, expected):
    """Which tensors differ, for a reader."""
    if len(found) != len(expected):
        return f"{len(found)} instead of {len(expected)} tensors"
    pairs = enumerate(zip(found, expected, strict=True))
    return [(i, one.dtype, one.shape) for i, (one, other) in pairs if not torch.equal(one, other)]


def forget_what_is_left():
    for counted in (page_locked._counted, registered, objects._replaced):
        counted.clear()


class Check:
    """Runs a scene undisturbed, then with failures."""

    def __init__(self, scene, stage):
        self.scene, self.stage, self.kept, self.slower = scene, stage, None, False
        subject = scene.subject(stage)
        with Trace() as self.trace:
            self.expected = self.act(subject)
        (self.then, _), (_, self.functions) = self.later(subject), self.later(subject)
        gc.collect()
        self.after, self.ignored = levels(subject), set()
        if scene.act is trained and keeps_abandoned_graphs(stage, subject):
            self.ignored = {"on GPUs", "page-locked", "registered"}
        del subject
        gc.collect()
        self.idle = levels()

    def act(self, subject):
        return [each.detach().clone() for each in tensors_in(self.scene.act(self.stage, subject))]

    def later(self, subject):
        """The result of an undisturbed run, and the functions that it calls."""
        with Trace(lines=False) as trace:
            result = self.act(subject)
        return result, trace.functions

    def problem(self, point):
        """What a failure at this point spoils; ``None`` if nothing."""
        subject = self.kept or self.scene.subject(self.stage)
        self.kept = None
        problem = self.spoilt(subject, point)
        if problem is None and self.scene.again and not self.slower:
            self.kept = subject
            return None
        del subject
        problem = problem or changed(self.idle, ignored=self.ignored)
        if problem is not None:  # the next points begin without what is left over
            forget_what_is_left()
            gc.collect()
            self.idle = levels()
        return problem

    def spoilt(self, subject, point):
        problems = [self.disturbed(subject, point)]
        try:
            then, functions = self.later(subject)
            for _ in range(3):  # a first run may lock memory, for example
                if functions != self.functions:
                    functions = self.later(subject)[1]
        except Exception as error:
            return f"the next run raises {type(error).__name__}: {str(error)[:150]}"
        if not is_same(then, self.then):
            problems.append(f"the next run differs: {difference(then, self.then)}")
        problems.append(changed(self.after, subject, self.ignored))
        other = {name for _, name in functions ^ self.functions}
        self.slower = bool(other)
        if not point.interrupts:  # without memory, layers are copied alone from then on ...
            other -= {"with_following"}
            if self.scene.act is decoded:  # ... and a model whose capture failed has no graphs
                other = set()
        if other:
            problems.append(f"other functions run: {sorted(other)[:4]}")
        return "; ".join(filter(None, problems)) or None

    def disturbed(self, subject, point):
        """What is wrong in the disturbed run itself."""
        trace, ignored = Trace(point), []
        before, sys.unraisablehook = sys.unraisablehook, lambda seen: ignored.append(1)
        try:
            with trace:
                result = self.act(subject)
        except (Exception, KeyboardInterrupt) as raised:
            error = raised
            while error is not None and error is not point.error:
                error = error.__cause__ or error.__context__
            if error is None and "automatic conversion of the weights" not in str(raised):
                return f"another error: {raised!r:.150}"  # transformers has logged that one
            file = point.function
            allowed = point.interrupts or point.error is NO_LOCK or file.startswith(MAY_RAISE)
            return None if allowed else "it raises"
        finally:
            point.error.__traceback__ = point.error.__context__ = None
            sys.unraisablehook = before
        if trace.raised and point.interrupts and not ignored:
            return "the interrupt is lost"
        return None if is_same(result, self.expected) else "it has another result"


def place_as(patch, streamed, in_place):
    """As ``pretend``, on a GPU."""
    if not streamed:
        patch.setattr(blocks, "STREAMED_TO", ())
    if not in_place:
        patch.setattr(blocks, "on_gpu", lambda host, device: None)


def check(name, stage, sample=None, only=lambda point: True, part=slice(None)):
    """The lines of a scene, the points that were tried, and what is wrong at which of them."""
    scene = SCENES[name]
    with pytest.MonkeyPatch.context() as patch:
        if stage.device.type == "cpu":
            pretend(patch, scene.streamed, scene.in_place)
        else:
            place_as(patch, scene.streamed, scene.in_place)
        gc.unfreeze()
        gc.collect()
        if stage.device.type == "cpu":
            forget_what_is_left()  # of other tests' models, which may be freed at any time
        gc.freeze()  # what exists by now need not be looked at again
        checked = Check(scene, stage)
        points = [point for point in checked.trace.points() if only(point)]
        points = points[:: max(len(points) // sample, 1)][:sample] if sample else points[part]
        tried = [(point, checked.problem(point)) for point in points]
    return checked.trace.lines, points, [(point, why) for point, why in tried if why]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def stage(tmp_path_factory, request):
    return Stage(tmp_path_factory.mktemp("stage"), request.param)


def assert_none(problems):
    assert not problems, "\n".join(f"{point}: {why}" for point, why in problems[:20])


@pytest.fixture(params=SCENES)
def scene(request):
    if request.param.startswith("8 bit"):
        request.getfixturevalue("offloaded_eight_bit")
    return request.param


def test_a_sample_of_the_points(scene, stage):
    _, points, problems = check(scene, stage, SAMPLE)
    assert len(points) == SAMPLE
    assert_none(problems)


@pytest.mark.slow
def test_every_point(scene, stage):
    assert_none(check(scene, stage)[2])


def test_a_planted_bug_is_found(tmp_path, monkeypatch):
    """A layout that is visible before it is complete: a layer would compute without values."""
    lines, first = inspect.getsourcelines(blocks.OffloadedLayer.new_layout)
    planted = "".join(lines).replace("layout = Layout(c", "layout = self.layout = Layout(c")
    assert planted != "".join(lines)
    source = "\n" * (first - 1) + textwrap.dedent(planted)
    code = compile("from __future__ import annotations\n" + source[1:], blocks.__file__, "exec")
    exec(code, vars(blocks), found := {})
    monkeypatch.setattr(blocks.OffloadedLayer, "new_layout", found["new_layout"])
    copies = {first + number for number, line in enumerate(lines) if "piece" in line}
    *_, problems = check("streamed", Stage(tmp_path, "cpu"), 6, lambda point: point.line in copies)
    assert any("the next run" in why for _, why in problems)


def main():
    from transformers.utils.logging import disable_progress_bar

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=", ".join(SCENES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="every Nth point from the Kth")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    disable_progress_bar()
    logging.disable(logging.WARNING)
    names, begun, total = options.scenes or list(SCENES), time.monotonic(), Counter()
    all_lines, sites = set(), set()
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(folder, options.device)
        for name in names:
            lines, points, problems = check(name, stage, part=slice(first, None, step))
            all_lines |= set(lines)
            sites |= {(each.file, each.line) for each in points if not each.interrupts}
            total += Counter(points=len(points), differences=len(problems))
            spent = f"{time.monotonic() - begun:.0f} s"
            print(f"{name}: {len(points)} points, {len(problems)} differences; {spent}", flush=True)
            for point, why in problems:
                print(f"    {point}: {why}", flush=True)
    print(f"{len(names)} scenes, {len(all_lines)} lines, {len(sites)} call sites, {dict(total)}")


if __name__ == "__main__":
    main()
