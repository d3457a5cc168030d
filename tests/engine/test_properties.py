"""Gates, switches and the journal under whatever hypothesis thinks of."""

from __future__ import annotations

import gc
import importlib.metadata
import inspect
import itertools
import json
import logging
import os
import sys
import types
from contextlib import contextmanager

import pytest
from packaging.requirements import Requirement

from gemma4_compat.engine import Patch, gate
from gemma4_compat.engine.core import Engine
from gemma4_compat.engine.gate import Outcome
from gemma4_compat.engine.status import About, State, Status
from gemma4_compat.engine.switches import Switches, read

from .conftest import ALWAYS, snapshot, tagging

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

#: Random examples of each property, in place of the same few in every run: ``nox -s properties``.
LONG = os.environ.get("PROPERTY_EXAMPLES")
_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """The search for references passes by all that there is before the tests."""
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as tests/conftest.py does: later collections pass by all imported modules


def examples(number):
    """A run of so many examples, the same ones every time."""
    return settings(deadline=None, max_examples=int(LONG or number), derandomize=not LONG)


@contextmanager
def installed(versions):
    """Distributions as these versions; ``None``: not installed, "": without metadata."""

    def installed_version(name):
        if versions.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name] or None

    original, gate.installed_version = gate.installed_version, installed_version
    try:
        yield
    finally:
        gate.installed_version = original


# -- gates --------------------------------------------------------------------------------------

NAMES = ["aa", "bb", "cc"]
RELEASES = st.sampled_from(["1.0", "1.9.9", "2.0", "2.0.post1", "2.0+cu121", "3.1"])
UNCERTAIN = st.sampled_from(["2.0.dev0", "2.0rc1", "3.0a1+git1", "unknown", "no version", ""])
REQUIREMENTS = st.builds(
    "{}{}2.0".format, st.sampled_from(NAMES), st.sampled_from(["<", ">=", "==", ">", "<=", "!="])
)


@examples(300)
@given(
    st.dictionaries(st.sampled_from(NAMES), st.none() | RELEASES | UNCERTAIN),
    st.lists(REQUIREMENTS, max_size=3),
)
def test_gate(versions, affects):
    """All of them, in three-valued logic; only a certain outcome goes without a probe."""

    def one(text):
        requirement = Requirement(text)
        version = versions.get(requirement.name)
        if version is None:
            return "missing"
        if any(mark in version for mark in ("dev", "rc", "a1", "no", "un")) or not version:
            return "undecided"
        return "inside" if requirement.specifier.contains(version) else "outside"

    outcomes = [one(text) for text in affects]
    worst = ("missing", "outside", "undecided")
    expected = next((outcome for outcome in worst if outcome in outcomes), "inside")
    with installed(versions):
        result = gate.evaluate(affects)
        assert result.outcome.value == expected
        for name, version in result.versions.items():
            assert versions[name] == (version or "")
        if expected == "missing":
            assert result.reason.endswith("not installed")
        else:
            for name, version in result.versions.items():
                assert f"{name} {version or '(unknown)'}" in result.reason
        for text in affects:
            assert gate.holds(text) is (one(text) in ("inside", "undecided"))


def test_development_build_far_outside_is_for_the_probe():
    with installed({"aa": "9.0.dev0", "bb": "1"}):
        assert gate.evaluate(("aa<2",)).outcome is Outcome.UNDECIDED
        assert (
            gate.evaluate(
                (
                    "aa<2",
                    "bb>=2",
                )
            ).outcome
            is Outcome.OUTSIDE
        )
        assert (
            gate.evaluate(
                (
                    "aa<2",
                    "cc>=2",
                )
            ).outcome
            is Outcome.MISSING
        )


def test_oldest_supported_versions_are_required():
    floors = {"aa": "1.5", "cc": "3"}
    with installed({"aa": "1", "bb": "1"}):
        assert gate.evaluate(("aa<2",)).outcome is Outcome.INSIDE
        old = gate.evaluate(("aa<2", "bb"), floors)
        assert (old.outcome, old.reason) == (Outcome.TOO_OLD, "aa 1 is too old (needs 1.5)")
        assert gate.evaluate(("bb",), floors).outcome is Outcome.INSIDE
    with installed({"aa": "1.5.dev0"}):
        assert gate.evaluate(("aa",), floors).outcome is Outcome.UNDECIDED
    with installed({"aa": "1.5"}):
        assert gate.evaluate(("aa<2",), floors).outcome is Outcome.INSIDE


def test_versions_of_packages_without_metadata(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "frozen_thing").mkdir()
    (tmp_path / "frozen_thing" / "__init__.py").touch()
    (tmp_path / "clone_of_thing").mkdir()  # what git clone leaves, no package
    (tmp_path / "broken_thing.py").touch()
    (tmp_path / "broken_thing-1.dist-info").mkdir()
    (tmp_path / "broken_thing-1.dist-info" / "METADATA").write_text("Name: broken-thing\n")
    monkeypatch.setitem(sys.modules, "stand_in", types.ModuleType("stand_in"))
    monkeypatch.setitem(sys.modules, "blocked", None)
    gate.installed_version.cache_clear()
    for name in ("frozen-thing", "broken-thing", "stand-in"):
        assert gate.installed_version(name) is None
    for name in ("clone-of-thing", "blocked", "no-such-thing"):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            gate.installed_version(name)


# -- switches ------------------------------------------------------------------------------------

VARIABLES = st.sampled_from(
    ["P", "P_STRICT", "P_ONE", "P_TWO_THREE", "P_TWO", "p_one", "P_STRIKT", "P_", "PX", "X_ONE"]
)
VALUES = st.sampled_from(["0", "1", "", " off ", "ON", "force", "False", "yes", "maybe", "2"])
MEANING = {"0": False, "off": False, "false": False, "1": True, "on": True, "yes": True}


@examples(300)
@given(st.dictionaries(VARIABLES, VALUES | st.text(max_size=5)))
def test_switches(environ):
    messages = []
    logger = logging.Logger("switches")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    switches = read("P", {"one": (), "two_three": ()}, logger, environ)

    expected = []
    for variable, value in environ.items():
        meaning = value.strip().lower()
        if variable not in ("P", "P_STRICT", "P_ONE", "P_TWO_THREE"):
            if variable not in ("PX", "X_ONE"):
                expected.append(variable)
        elif meaning in ("no", "true", ""):
            pass
        elif meaning not in MEANING and not (
            meaning == "force" and variable in ("P_ONE", "P_TWO_THREE")
        ):
            expected.append(variable)
    assert len(messages) == len(expected)
    for variable in expected:
        assert any(variable in message and "has no effect" in message for message in messages)

    def truth(variable, default):
        meaning = environ.get(variable, "").strip().lower()
        return {"no": False, "true": True, **MEANING}.get(meaning, default)

    assert switches.everything is truth("P", True)
    assert switches.strict is truth("P_STRICT", False)
    for name, variable in (("one", "P_ONE"), ("two_three", "P_TWO_THREE")):
        is_forced = environ.get(variable, "").strip().lower() == "force"
        assert (name in switches.forced) is is_forced
        is_on = is_forced or truth(variable, True)
        assert switches.off.get(name) == (None if is_on else f"{variable}=0")


def test_unknown_variable_names_the_near_one(caplog):
    read("P", {"quant_state": ()}, logging.getLogger("s"), {"P_QUANT_STAT": "0"})
    assert "did you mean P_QUANT_STATE?" in caplog.text


@pytest.mark.parametrize(
    ("environ", "off"),
    [
        ({}, {}),
        ({"P_FAST": "0"}, {"a": "P_FAST=0", "b": "P_FAST=0"}),
        ({"P_FAST": "0", "P_A": "1"}, {"b": "P_FAST=0"}),
        ({"P_FAST": "1", "P_A": "0"}, {"a": "P_A=0"}),
        ({"P": "only:a"}, {"b": "P=only:a", "d": "P=only:a"}),
        ({"P": "only: C, a"}, {"b": "P=only: c, a", "d": "P=only: c, a"}),
        ({"P": "only:fast"}, {"d": "P=only:fast"}),
        ({"P": "only:a", "P_D": "on", "P_C": "0"}, {"b": "P=only:a", "c": "P_C=0"}),
        ({"P": "only:"}, dict.fromkeys("abcd", "P=only:")),
    ],
)
def test_groups_and_only(environ, off):
    """``a`` requires ``c``, which comes with it; a patch's own variable takes precedence."""
    patches = {"a": ("c",), "b": (), "c": (), "d": ()}
    switches = read("P", patches, logging.getLogger("s"), environ, {"fast": ("a", "b")})
    assert switches.off == off


def test_names_that_have_no_effect(caplog):
    read("P", {"a": ()}, logging.getLogger("s"), {"P": "only:a,z"})
    assert "P=only:a,z: no patch is called z" in caplog.text


# -- the journal ----------------------------------------------------------------------------------

TARGETS = ["f", "g", "Base.m", "Base.s", "Base.c", "Sub.m", "Sub.s", "Sub.c"]
SOURCE = """
def f(): return "f"
def g(): return "g"
alias = f
class Base:
    def m(self): return "m"
    @staticmethod
    def s(): return "s"
    @classmethod
    def c(cls): return cls.__name__
class Sub(Base):
    pass
"""


@st.composite
def requirements(draw):
    """What each of four patches requires: never in a circle, and often a later one."""
    first_to_last = draw(st.permutations(range(4)))
    return {
        first_to_last[place]: draw(st.sets(st.sampled_from(first_to_last[:place])))
        for place in range(1, 4)
    }


NOTHING = st.just({})


def patches_of(module, targets, requires):
    """One patch for each list of targets."""
    patches = []
    for index, attributes in enumerate(targets):
        required = [f"p{each}" for each in requires.get(index, ()) if each < len(targets)]
        patch = Patch(f"p{index}", symptom="", affects=ALWAYS, requires=required)
        for attribute in attributes:
            patch.replaces(module, attribute)(tagging(f"p{index}"))
        patches.append(patch)
    return patches


@examples(100)
@given(
    st.lists(st.lists(st.sampled_from(TARGETS), min_size=1, max_size=4), min_size=1, max_size=4),
    NOTHING | requirements(),
    st.lists(st.tuples(st.sampled_from(["install", "uninstall"]), st.sets(st.integers(0, 3)))),
)
@example([["f"], ["f"]], {0: {1}}, [("uninstall", {1}), ("install", {1})])
def test_any_order_of_installs_and_uninstalls(targets, requires, actions):
    """What is on is a function of what is switched on; nothing is left when all is off."""
    name = f"journal{next(_numbers)}"
    module, other = types.ModuleType(name), types.ModuleType(f"{name}.other")
    sys.modules.update({name: module, other.__name__: other})
    try:
        exec(SOURCE, vars(module))
        other.captured = module.f
        owners = (module, other, module.Base, module.Sub)
        before = snapshot(*owners)
        patches = patches_of(name, targets, requires)
        engine = Engine(patches, Switches("JOURNAL"), logging.getLogger("journal"))
        on = set()
        for action, indices in actions:
            indices = {index for index in indices if index < len(patches)}
            getattr(engine, action)(*(f"p{index}" for index in indices))
            indices = indices or set(range(len(patches)))
            on = on | indices if action == "install" else on - indices
            check(engine, module, other, targets, requires, on)
        engine.uninstall()
        assert snapshot(*owners) == before
    finally:
        del sys.modules[name], sys.modules[other.__name__]


def check(engine, module, other, targets, requires, wanted):
    on = set(wanted)
    while without := {i for i in on if {r for r in requires.get(i, ()) if r < len(targets)} - on}:
        on -= without
    for entry in engine.status():
        index = int(entry.name[1:])
        expected = State.BLOCKED if index in wanted else State.DISABLED
        assert entry.state is (State.APPLIED if index in on else expected)

    def tags(*attributes):
        stack = [f"p{i}" for i in sorted(on) for each in targets[i] if each in attributes]
        return "".join(f"{tag}>" for tag in reversed(stack))

    assert module.f() == module.alias() == other.captured() == tags("f") + "f"
    assert module.g() == tags("g") + "g"
    for attribute, value in (("m", "m"), ("s", "s"), ("c", "Base")):
        found = getattr(module.Base(), attribute)()
        assert found == tags(f"Base.{attribute}") + value
        if not any(f"Sub.{attribute}" in targets[index] for index in on):
            found = getattr(module.Sub(), attribute)()
            assert found == tags(f"Base.{attribute}") + value.replace("Base", "Sub")


class Stranger:
    """Another library that wraps what it finds, and takes that back where it is still on top."""

    def __init__(self):
        self.patches = []

    def patch(self, owner, name):
        before, raw = vars(owner).get(name), inspect.getattr_static(owner, name)
        tag = f"stranger{next(_numbers)}"
        new = tagging(tag)(getattr(raw, "__func__", raw))
        if isinstance(raw, (staticmethod, classmethod)):
            new = type(raw)(new)
        setattr(owner, name, new)
        self.patches.append((owner, name, before, new, tag))

    def leave(self):
        """Whether anything was taken back."""
        for patch in reversed(self.patches):
            owner, name, before, new, _ = patch
            if vars(owner).get(name) is new:
                delattr(owner, name) if before is None else setattr(owner, name, before)
                self.patches.remove(patch)
                return True
        return False


ACTIONS = st.one_of(
    st.tuples(
        st.sampled_from(["install", "uninstall", "disabled"]),
        st.sets(st.integers(0, 3)),
    ),
    st.tuples(st.just("end of block"), st.none()),
    st.tuples(st.just("stranger comes"), st.sampled_from(TARGETS)),
    st.tuples(st.just("stranger leaves"), st.none()),
)


@examples(150)
@given(
    st.lists(st.lists(st.sampled_from(TARGETS), min_size=1, max_size=4), min_size=1, max_size=4),
    NOTHING | requirements(),
    st.lists(ACTIONS, max_size=12),
)
@example(  # the other library keeps p1, which calls p0 by inheritance
    [["Base.s"], ["f", "Sub.s"]],
    {},
    [("install", set()), ("stranger comes", "f"), ("uninstall", set())],
)
@example(  # the other library keeps p0 itself
    [["Base.s"]],
    {},
    [("install", set()), ("stranger comes", "Sub.s"), *[("uninstall", set())] * 2],
)
@example(  # p0 is applied while the other library keeps p1, and so above it
    [["f", "Sub.s"], ["g", "Base.s"]],
    {},
    [
        *[("install", {1}), ("stranger comes", "g"), ("install", {0})],
        *[("stranger leaves", None), ("uninstall", {1}), ("uninstall", {0})],
    ],
)
def test_any_order_with_another_library(targets, requires, actions):
    """What another library has put in place stays and is called once; so is what is ours."""
    name = f"neighbors{next(_numbers)}"
    module = sys.modules[name] = types.ModuleType(name)
    try:
        exec(SOURCE, vars(module))
        owners = (module, module.Base, module.Sub)
        before = snapshot(*owners)
        patches = patches_of(name, targets, requires)
        engine, stranger = Engine(patches, Switches("WITH"), logging.getLogger("with")), Stranger()
        block = []
        for action, argument in actions:
            if action == "stranger comes":
                owner, _, attribute = argument.rpartition(".")
                stranger.patch(vars(module)[owner] if owner else module, attribute)
            elif action == "stranger leaves":
                stranger.leave()
            elif action == "end of block":
                if block:
                    block.pop().__exit__(None, None, None)
            else:
                names = [f"p{index}" for index in sorted(argument) if index < len(patches)]
                if action in ("install", "uninstall"):
                    getattr(engine, action)(*names)
                else:
                    block.append(engine.disabled(names))
                    block[-1].__enter__()
            check_with_another(engine, module, targets, requires, stranger)
        while block:
            block.pop().__exit__(None, None, None)
        engine.uninstall()
        while stranger.leave():
            engine.uninstall()
        assert not stranger.patches
        assert snapshot(*owners) == before
    finally:
        del sys.modules[name]


def check_with_another(engine, module, targets, requires, stranger):
    status = engine.status()
    for target in TARGETS:
        owner, _, attribute = target.rpartition(".")
        instance = vars(module)[owner]() if owner else module
        *tags, value = getattr(instance, attribute)().split(">")
        assert value == (owner if attribute == "c" else attribute)
        mine = (vars(module)[owner] if owner else module, attribute)
        for *slot, _, _, tag in stranger.patches:
            assert tags.count(tag) == 1 if tuple(slot) == mine else tags.count(tag) <= 1
        slots = [target] + [f"Base.{attribute}"] * (owner == "Sub")
        for index, attributes in enumerate(targets):
            most = sum(attributes.count(slot) for slot in slots)
            assert tags.count(f"p{index}") <= most
            state = status[f"p{index}"]
            if state.state is not State.APPLIED:
                if f"p{index}" in tags:
                    outer = tags[: tags.index(f"p{index}")]
                    assert any(tag.startswith("stranger") for tag in outer), state.reason
                    assert "reference(s) still point to the patch" in state.reason
            elif not stranger.patches:
                assert tags.count(f"p{index}") >= attributes.count(target)
    for index, state in enumerate(status):
        required = [status[r].state for r in requires.get(index, ()) if r < len(targets)]
        if state.state is State.DISABLED:
            continue
        on = all(each is State.APPLIED for each in required)
        assert state.state is (State.APPLIED if on else State.BLOCKED), state.reason


# -- the status -----------------------------------------------------------------------------------


def test_notes_are_asked_when_they_are_read():
    """They may look for a GPU; ``install`` and ``disabled`` return a status, too."""
    asked = []
    about = About(notes=lambda: asked.append(1) or ["a note"])
    status = Engine([], Switches("NOTES"), logging.getLogger("s"), about=about).install()
    assert (status.ok, status.verdict, asked) == (True, "all well: no patches", [])
    assert str(status).endswith("a note")
    assert asked


def test_status_is_typed_printable_and_json():
    patch = Patch("a_patch", symptom="it breaks", affects=ALWAYS)
    engine = Engine([patch], Switches("STATUS", everything=False), logging.getLogger("s"))
    status = engine.install()
    assert isinstance(status, Status)
    assert status[0] is status["a_patch"] is next(iter(status))
    assert status["a_patch"].versions.keys() == {"packaging"}
    verdict = "OFF: all 1 patches are switched off by STATUS=0"
    assert str(status).startswith(verdict)
    assert "a_patch " not in str(status)
    status.every = True
    assert str(status).endswith("a_patch  disabled  STATUS=0")
    assert repr(status) == f"<Status: {verdict}>"
    assert json.loads(json.dumps(status.as_dict())) == status.as_dict()
    assert status.as_dict()["patches"]["a_patch"]["state"] == "disabled"
    assert str(Status([])) == "all well: no patches"
    assert not status.ok
    with pytest.raises(KeyError):
        status["b"]
    assert {str(state) for state in State} == {state.value for state in State}
