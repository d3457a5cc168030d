"""Changes upstream: every target is renamed, removed, given another signature or another type.

Whatever changes in a target, its patch either steps aside with one warning or still works, and it
leaves the changed libraries as they are.  The first worker changes the imported libraries, one
target at a time.  The others import changed sources, with all patches armed before.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import importlib.machinery
import inspect
import itertools
import json
import linecache
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# Its results of other processes are cached in a worker.
pytestmark = pytest.mark.xdist_group("drift")

ROOT = Path(__file__).parents[1]
LIBRARIES = ("transformers", "accelerate", "peft", "bitsandbytes")
NAMES = sorted(p.stem for p in (ROOT / "gemma4_compat" / "patches").glob("*/[a-z]*.py"))
#: The states of a patch that steps aside because its target has changed.
ASIDE = ("drifted", "fixed upstream")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NEW = "added_upstream"


# -- changes to the syntax tree of a function ------------------------------------------------------


def own_calls(function):
    """The function's calls to itself; their keywords change with its parameters."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            if getattr(node.func, "id", getattr(node.func, "attr", "")) == function.name:
                yield node


def rename_parameter(function, name):
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.arg == name:
            node.arg = f"{name}_renamed"
        elif isinstance(node, ast.Name) and node.id == name:
            node.id = f"{name}_renamed"
    for keyword in itertools.chain(*(call.keywords for call in own_calls(function))):
        if keyword.arg == name:
            keyword.arg = f"{name}_renamed"


def remove_parameter(function, name):
    """Remove a parameter; the body gets its default, or None."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    everything = dict(zip([p.arg for p in positional], defaults, strict=True))
    only = [p.arg for p in arguments.kwonlyargs]
    everything |= dict(zip(only, arguments.kw_defaults, strict=True))
    default = everything.pop(name) or ast.Constant(None)
    for each in (arguments.posonlyargs, arguments.args, arguments.kwonlyargs):
        each[:] = [p for p in each if p.arg != name]
    names = [p.arg for p in (*arguments.posonlyargs, *arguments.args)]
    arguments.defaults = [everything[n] for n in names if everything[n] is not None]
    arguments.kw_defaults = [everything[p.arg] for p in arguments.kwonlyargs]
    for call in own_calls(function):
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != name]
    function.body.insert(0, ast.Assign([ast.Name(name, ast.Store())], default, lineno=0))


def add_parameter(function, at):
    """Add a required parameter at this position."""
    function.args.args.insert(at, ast.arg(NEW))


def add_keyword(function):
    """Add a required keyword-only parameter."""
    function.args.kwonlyargs.append(ast.arg(NEW))
    function.args.kw_defaults.append(None)


# -- the worker that changes one thing at a time ---------------------------------------------------


class Other:
    """A class in place of a function."""

    def __init__(self, *args, **kwargs):
        raise TypeError("not a function any more")


_numbers = itertools.count()


@functools.cache
def source_of(function):
    return textwrap.dedent(inspect.getsource(function))


def changed(function, change, *arguments):
    """The function, compiled again from its changed source."""
    tree = ast.parse("def make(__class__):\n    pass")
    definition = ast.parse(source_of(function)).body[0]
    context = [d for d in definition.decorator_list if ast.unparse(d) == "contextmanager"]
    definition.decorator_list = context
    change(definition, *arguments)
    tree.body[0].body = [definition, ast.Return(ast.Name(definition.name, ast.Load()))]
    file = f"<changed {next(_numbers)}>"
    source = ast.unparse(ast.fix_missing_locations(tree))
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    found = {}
    exec(compile(source, file, "exec", flags, dont_inherit=True), function.__globals__, found)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cell = cells.get("__class__")
    new = found["make"](cell and cell.cell_contents)
    new.__module__, new.__qualname__ = function.__module__, function.__qualname__
    return new


def changes_of(raw, method):
    """(kind, name, new value of the attribute) for all changes of a function's definition."""
    plain = inspect.unwrap(raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw))
    wrapped = isinstance(raw, (staticmethod, classmethod, property))
    wrap = type(raw) if wrapped else lambda function: function
    parameters = inspect.signature(plain).parameters.values()
    names = [p.name for p in parameters if p.kind not in VARIADIC][method:]
    for name in names:
        yield "parameter renamed", name, wrap(changed(plain, rename_parameter, name))
        yield "parameter removed", name, wrap(changed(plain, remove_parameter, name))
    yield "parameter added", "first", wrap(changed(plain, add_parameter, method))
    yield "parameter added", "by keyword", wrap(changed(plain, add_keyword))
    yield "no function", "class", Other
    yield "no function", "partial", functools.partial(plain)
    yield "no function", "None", None


def one_at_a_time():
    """The state of each patch, and of the changed attribute, after each change."""
    import gc

    import gemma4_compat
    from gemma4_compat.engine import slots

    engine, messages, results = gemma4_compat._engine, listen(), []
    for record in engine._records:
        record.patch.requires = ()  # as if the other bugs were fixed upstream
    for name in LIBRARIES:
        importlib.import_module(name)
    start = {s.name: [s.state.value, s.reason] for s in gemma4_compat.status(import_targets=True)}
    replaced = [(r.patch.name, [e.place for e in r.layer.entries]) for r in engine._records]
    misfits = [str(e) for r in engine._records for e in r.layer.entries if not fits(e)]
    gemma4_compat.uninstall()
    gc.freeze()  # the search for references then skips all present objects

    def try_patch(name, replacement, kind, what, owner, attribute, value=slots._ABSENT):
        messages.clear()
        engine._warned.clear()
        status = gemma4_compat.install(name)[name]
        layers = [each.layer for each in engine._parts[name]]
        entries = [entry for layer in layers for entry in layer.entries]
        units = [layer.unit for layer in layers if not layer.entries]
        units += [] if entries else [layers[0].patch]
        ours = (slots.resolve(r) for unit in units for r in unit.replacements)
        try:
            left = [str(target) for target in ours if is_ours(target.function)]
        except slots.Mismatch:
            left = []
        results.append(
            {
                "patch": name,
                "kind": kind,
                "change": f"{replacement}: {kind} ({what})",
                "state": status.state.value,
                "reason": status.reason,
                "warnings": list(messages),
                "untouched": vars(owner).get(attribute, slots._ABSENT) is value,
                "left": left,
                "misfits": [str(entry) for entry in entries if not fits(entry)],
                "call": outcome(name),
            }
        )
        gemma4_compat.uninstall(name)
        results[-1]["plain call"] = outcome(name)
        if value is not slots._ABSENT:
            assert vars(owner)[attribute] is value, f"not taken back: {results[-1]}"

    for name, replacements in replaced:
        for replacement in replacements:
            module = sys.modules[replacement.module]
            owner, attribute, raw = slots.resolve(replacement)
            is_class = isinstance(owner, type)
            home = owner
            if is_class:
                home = next(cls for cls in owner.__mro__ if attribute in vars(cls))
            for kind, what, value in changes_of(raw, is_class and type(raw) is not staticmethod):
                setattr(home, attribute, value)
                try_patch(name, replacement, kind, what, home, attribute, value)
            delattr(home, attribute)
            try_patch(name, replacement, "removed", "alone", home, attribute)
            setattr(home, f"{attribute}_renamed", raw)
            try_patch(name, replacement, "renamed", "alone", home, attribute)
            delattr(home, f"{attribute}_renamed")
            setattr(home, attribute, raw)
            if is_class:
                cls = replacement.attribute.partition(".")[0]  # or a module: nn.Module
                kept = getattr(module, cls)
                delattr(module, cls)
                try_patch(name, replacement, "removed class", cls, module, cls)
                factory = functools.partial(owner)
                setattr(module, cls, factory)
                try_patch(name, replacement, "no class", cls, module, cls, factory)
                setattr(module, cls, kept)
    return {"start": start, "results": results, "misfits": misfits}


def attach_hooks():
    """A positional call of a function whose patch reads its arguments by name."""
    import torch
    from accelerate.hooks import attach_align_device_hook_on_blocks

    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    attach_align_device_hook_on_blocks(model, {"": "cpu"}, {"": False})
    return model(torch.ones(1, 1)).shape


CALLS = {"root_device_map": attach_hooks}


def outcome(name):
    try:
        return str(CALLS[name]()) if name in CALLS else ""
    except Exception as error:
        return repr(error)


def is_ours(function):
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(str(ROOT / "gemma4_compat"))


def fits(entry):
    """Whether the replacement has the original's signature, and accepts its calls."""
    from gemma4_compat.engine.signatures import own_signature

    shown = inspect.signature(entry.replacement)
    taken = own_signature(entry.replacement)
    expected = inspect.signature(entry.original)
    if shown != expected:
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p for p in expected.parameters.values() if p.kind not in VARIADIC]
    # The *args of a wrapper or a base class may contain anything.
    unknown = VARIADIC[0] in [p.kind for p in expected.parameters.values()]
    take = taken.bind_partial if unknown else taken.bind
    everything = {p.name: object() for p in named}
    for given in (everything, {p.name: everything[p.name] for p in named if p.default is p.empty}):
        for by_position in range(len(given) + 1):
            args = [p for p in named if p.name in given][:by_position]
            if any(p.kind not in positional for p in args):
                break
            kwargs = {n: v for n, v in given.items() if n not in [p.name for p in args]}
            try:
                expected.bind(*(given[p.name] for p in args), **kwargs)
                call = take(*(given[p.name] for p in args), **kwargs)
            except TypeError:
                return False
            for name, value in call.arguments.items():
                if taken.parameters[name].kind not in VARIADIC and value is not given.get(name):
                    return False
    return True


# -- the worker that changes the bodies of functions that patches copy -----------------------------


def segment(source, node):
    """Where the text of a node begins and ends."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    return starts[node.lineno - 1] + node.col_offset, starts[
        node.end_lineno - 1
    ] + node.end_col_offset


def swapped(source, first, second):
    """The source with two parts in each other's place; ``None`` if that is the same."""
    (a, b), (c, d) = sorted((segment(source, first), segment(source, second)))
    new = source[:a] + source[c:d] + source[b:c] + source[a:b] + source[d:]
    return None if b > c or new == source else new


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def bodies_of(source, name):
    """(change, source) of a function with another body."""
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
    function = next(node for node in functions if node.name == name)
    yield "the same", source
    body = [each for each in function.body if not is_text(each)]
    nodes = [node for each in body for node in ast.walk(each)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    pairs = (swapped(source, *pair) for pair in itertools.combinations(calls, 2))
    yield "swapped calls", next(filter(None, pairs), None)
    for node in nodes:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            start, end = segment(source, node)
            yield "another constant", f"{source[:start]}{node.value + 1}{source[end:]}"
            break
    simple = (ast.Assign, ast.AugAssign, ast.Expr)
    for node in [function, *nodes]:
        block = getattr(node, "body", ())
        block = [each for each in block if not is_text(each)] if isinstance(block, list) else ()
        for first, second in itertools.pairwise(block):
            if isinstance(first, simple) and isinstance(second, simple):
                yield "another order", swapped(source, first, second)
    tests = [node for node in nodes if isinstance(node, (ast.If, ast.IfExp))]
    for node in tests[:1]:
        start, end = segment(source, node.test)
        yield "another condition", f"{source[:start]}not ({source[start:end]}){source[end:]}"


def with_body(function, source):
    """The function, compiled from a source; a method is in the function ``make``."""
    file = f"<body {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    found = {}
    exec(compile(source, file, "exec", flags, dont_inherit=True), function.__globals__, found)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cell = cells.get("__class__")
    return (
        found["make"](cell and cell.cell_contents) if "make" in found else found[function.__name__]
    )


def other_bodies():
    """Whether each changed body of what a patch copies is known; its state with one of them."""
    import gc

    import gemma4_compat
    from gemma4_compat.engine import fingerprint, slots

    engine, results = gemma4_compat._engine, []
    for record in engine._records:
        record.patch.requires = ()
    for name in LIBRARIES:
        importlib.import_module(name)
    gemma4_compat.install("fast")
    gemma4_compat.status(import_targets=True)
    applied = [record for record in engine._records if record.state.value == "applied"]
    copied = {(r.patch.name, each) for r in applied for each in r.layer.copied}
    gemma4_compat.uninstall()
    gc.freeze()
    for name, place in sorted(copied, key=str):
        owner, attribute, raw = slots.resolve(place)
        if isinstance(owner, type):
            owner = next(cls for cls in owner.__mro__ if attribute in vars(cls))
        function = inspect.unwrap(raw)
        source = inspect.getsource(function)
        if source.startswith(" "):
            space = source[: -len(source.lstrip())]
            source = f"def make(__class__):\n{source}{space}return {function.__name__}\n"
        for change, new in bodies_of(source, function.__name__):
            if new is not None:
                setattr(owner, attribute, with_body(function, new))
                results.append([name, str(place), change, fingerprint.is_measured(place)])
        if results[-1][2] != "the same":
            found = gemma4_compat.install(name)[name]
            results.append([name, str(place), "", found.state.value, found.reason])
            gemma4_compat.uninstall(name)
        setattr(owner, attribute, raw)
    return results


# -- the worker that imports changed libraries -----------------------------------------------------


CHANGES = ("signature", "renamed", "partial", None)


class Changing:
    """Imports modules as usual, and changes targets right after their module is executed.

    Import hooks then see the changed module.
    """

    def __init__(self, targets):
        self.targets = targets  # module: {attribute: change}
        self.left = {}  # the value after the change, by owner and name

    def find_spec(self, name, path=None, target=None):
        if name not in self.targets:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for attribute, change in self.targets[name].items():
                self.apply(module, attribute, change)

        spec.loader.exec_module = exec_module
        return spec

    def apply(self, module, attribute, change):
        *path, name = attribute.split(".")
        owner = functools.reduce(getattr, path, module)
        raw = inspect.getattr_static(owner, name)
        if change == "renamed" and path:
            home = next(cls for cls in owner.__mro__ if name in vars(cls))
            setattr(home, f"{name}_renamed", raw)
            delattr(home, name)
            self.left[home, name] = None
            return
        # Other modules import functions by name, so a function becomes None; a method is deleted.
        wanted = {"signature": "first", "partial": "partial", "renamed": "None"}[change]
        method = bool(path) and not isinstance(raw, staticmethod)
        value = next(value for _, what, value in changes_of(raw, method) if what == wanted)
        setattr(owner, name, value)
        self.left[owner, name] = value


def changed_targets(targets, turn):
    """{module: {attribute: change}} of a turn, in which one patch in four keeps its targets."""
    changed = {}
    for index, replacements in enumerate(targets.values()):
        change = CHANGES[(index + turn) % len(CHANGES)]
        for module, attribute in replacements if change else ():
            changed.setdefault(module, {}).setdefault(attribute, change)
    return changed


def all_at_once(turn):
    """Import the libraries while the targets of three patches in four change."""
    targets = changed_targets(json.loads(os.environ["DRIFT_TARGETS"]), turn)
    finder = Changing(targets)
    sys.meta_path.insert(0, finder)

    import gemma4_compat

    messages = listen()
    for name in LIBRARIES:
        importlib.import_module(name)
    status = gemma4_compat.status(import_targets=True)
    entries = [e for r in gemma4_compat._engine._records for e in r.layer.entries]
    slots = {(entry.target.owner, entry.target.name) for entry in entries}
    return {
        "targets": targets,
        "states": {s.name: [s.state.value, s.reason] for s in status},
        "warnings": messages,
        "not as left": [
            f"{owner.__name__}.{name}"
            for (owner, name), value in finder.left.items()
            if (owner, name) not in slots and vars(owner).get(name) is not value
        ],
        "misfits": [str(entry) for entry in entries if not fits(entry)],
    }


def listen():
    """A list that collects the package's warnings from now on."""
    import logging

    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("gemma4_compat").addHandler(handler)
    return messages


# -- tests -----------------------------------------------------------------------------------------


@functools.cache
def worker(name, *arguments):
    """The results of a worker."""
    for library in LIBRARIES:
        pytest.importorskip(library)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GEMMA4_COMPAT")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    environ["DRIFT_TARGETS"] = json.dumps(targets())
    code = f"import json, tests.test_drift as drift\nprint(json.dumps(drift.{name}(*{arguments})))"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True,
        timeout=600, cwd=ROOT, env=environ, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@functools.cache
def targets():
    """The replacements of each patch in the installed releases, if they have its bug."""
    from gemma4_compat.engine.gate import Outcome, holds
    from gemma4_compat.patches import gate, load

    return {
        patch.name: [
            (r.module, r.attribute) for r in patch.targets if r.when is None or holds(r.when)
        ]
        for patch in load()
        if gate(patch).outcome is Outcome.INSIDE
    }


@pytest.fixture(params=NAMES)
def changes(request):
    """The results of a patch, one for each change."""
    found = worker("one_at_a_time")
    state, reason = found["start"][request.param]
    if state != "applied":
        pytest.skip(f"{state}: {reason}")
    results = [result for result in found["results"] if result["patch"] == request.param]
    assert len(results) >= 8
    return results


@pytest.mark.slow
def test_replacements_take_the_calls_of_the_originals():
    assert worker("one_at_a_time")["misfits"] == []


@pytest.mark.slow
def test_patches_step_aside_or_go_on_to_work(changes):
    for found in changes:
        assert found["state"] in (*ASIDE, "applied"), found
        if found["state"] == "applied":
            assert found["misfits"] == [], found
            assert found["call"] == found["plain call"], found
        else:
            assert found["reason"], found


@pytest.mark.slow
def test_what_is_gone_or_no_function_is_not_patched(changes):
    for found in changes:
        if found["kind"] in ("no function", "no class", "removed class"):
            assert found["state"] in ASIDE, found


@pytest.mark.slow
def test_drift_is_said_once(changes):
    for found in changes:
        assert len(found["warnings"]) == (found["state"] == "drifted"), found
        assert all(
            f"{found['reason']}; the patch is not applied" in text for text in found["warnings"]
        )


@pytest.mark.slow
def test_patches_that_step_aside_leave_nothing(changes):
    for found in changes:
        if found["state"] != "applied":
            assert found["untouched"], found
        assert found["left"] == [], found


@pytest.mark.slow
def test_other_bodies_of_what_is_copied():
    """A patch is for the code that it copies, also if only the order or a number differs."""
    results = worker("other_bodies")
    assert {change for _, _, change, *_ in results if change} == {
        "the same", "swapped calls", "another constant", "another order", "another condition",
    }  # fmt: skip
    for name, place, change, *found in results:
        if change:
            assert found == [change == "the same"], (name, place, change)
        else:
            state, reason = found
            assert state == "fixed upstream" or "has other code" in reason, (name, place, found)


def patches_without(changed):
    """The patches whose source and helpers name none of the changed classes and functions."""
    owners = {attribute.partition(".")[0] for each in changed.values() for attribute in each}
    names = []
    for name in targets():
        [file] = (ROOT / "gemma4_compat" / "patches").glob(f"*/{name}.py")
        source = file.read_text()
        for helper in re.findall(r"^from \.\.(_\w+) import", source, re.MULTILINE):
            source += (file.parents[1] / f"{helper}.py").read_text()
        if not re.search(rf"\b({'|'.join(owners)})\b", source):
            names.append(name)
    return names


def test_some_changes_leave_some_patches_out():
    """So that the next test compares states.  One turn alone may change something of each patch."""
    for library in LIBRARIES:
        pytest.importorskip(library)
    assert any(patches_without(changed_targets(targets(), i)) for i in range(len(CHANGES)))


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(len(CHANGES)))
def test_import_of_changed_libraries(turn):
    found = worker("all_at_once", turn)
    assert found["misfits"] == found["not as left"] == []
    changed = found["targets"]
    untouched = patches_without(changed)
    drifted = []
    for name, replacements in targets().items():
        state, reason = found["states"][name]
        assert state in (*ASIDE, "applied", "blocked"), f"{name}: {reason}"
        drifted += [name] * (state == "drifted")
        if state == "blocked":
            assert reason.startswith("needs "), reason
            assert reason.rpartition(" ")[2] in ("drifted", "blocked"), reason
            continue
        if "partial" in [changed.get(module, {}).get(target) for module, target in replacements]:
            assert state in ASIDE, name
        if name in untouched:
            assert found["states"][name] == worker("one_at_a_time")["start"][name]
    assert sorted(text.partition(":")[0] for text in found["warnings"]) == drifted
    assert drifted
