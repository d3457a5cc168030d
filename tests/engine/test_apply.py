"""Applying patches and taking them back: targets, orders, stacks, honesty."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import itertools
import logging
import pickle
import sys
import types
from contextlib import suppress
from importlib import metadata

import pytest

from gemma4_compat.engine import Engine, Kind, Patch, broken, core, drifted, fixed, read, stack
from gemma4_compat.engine.status import PatchStatus, State, Status
from gemma4_compat.errors import PatchError

from .conftest import ALWAYS, NEVER, logged, snapshot, tagging


def test_before_the_import(lib, make, caplog):
    engine = make(lib.patch("p", "m:f"))
    assert engine.status()["p"].state is State.ARMED
    assert lib.name in engine.status()["p"].reason
    assert logged(caplog, logging.INFO) == []
    assert lib.load("m").f() == "p>f"
    assert engine.status()["p"].state is State.APPLIED
    assert lib.load("n").captured() == "p>f"
    assert logged(caplog, logging.INFO) == ["p: applied"]


def test_after_the_import_with_captures(lib, make, caplog):
    m, n = lib.load("m"), lib.load("n")
    before = snapshot(m, n)
    engine = make(lib.patch("p", "m:f"))
    assert (m.f(), n.captured()) == ("p>f", "p>f")
    assert engine.status()["p"].reason == ""
    assert snapshot(m, n) != before
    engine.uninstall()
    assert snapshot(m, n) == before
    assert (m.f(), n.captured()) == ("f", "f")
    assert logged(caplog, logging.WARNING) == []


def test_captures_taken_from_the_patched_module_are_undone_too(lib, make):
    engine = make(lib.patch("p", "m:f"))
    m, n = lib.load("m"), lib.load("n")
    assert n.captured is m.f
    engine.uninstall()
    assert n.captured is m.f
    assert n.captured() == "f"


def test_waits_for_all_targets(lib, make):
    engine = make(lib.patch("p", "m:f", "n:h"))
    m = lib.load("m")
    assert m.f() == "f"
    assert engine.status()["p"].reason == f"waits for the import of {lib.name}.n"
    assert (lib.load("n").h(), lib.load("n").captured()) == ("p>h", "p>f")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("target", "call", "expected"),
    [
        ("m:Base.method", lambda m: m.Base().method(), "p>method"),
        ("m:Base.method", lambda m: m.Sub().method(), "p>method"),
        ("m:Base.static", lambda m: (m.Base.static(), m.Sub().static())[1], "p>static"),
        ("m:Base.of", lambda m: m.Sub.of(), "p>Sub"),
        ("m:Sub.method", lambda m: m.Sub().method() + m.Base().method(), "p>methodmethod"),
        ("m:Sub.static", lambda m: m.Sub.static() + m.Base.static(), "p>staticstatic"),
        ("m:Sub.of", lambda m: m.Sub.of() + m.Base.of(), "p>SubBase"),
    ],
)
def test_descriptors(lib, make, late, target, call, expected):
    m = lib.load("m") if late else None
    before = snapshot(m.Base, m.Sub) if late else None
    engine = make(lib.patch("p", target))
    m = lib.load("m")
    assert call(m) == expected
    assert engine.status()["p"].reason == ""
    engine.uninstall()
    assert call(m) == expected.replace("p>", "")
    assert before in (None, snapshot(m.Base, m.Sub))
    assert not {"method", "static", "of"} & set(vars(m.Sub))


def test_inherited_methods_pickle_by_reference(lib, make):
    m = lib.load("m")
    make(lib.patch("p", "m:Sub.method", "m:Sub.static"))
    assert pickle.loads(pickle.dumps(m.Sub.method)) is m.Sub.method
    assert pickle.loads(pickle.dumps(m.Sub.static)) is m.Sub.static


def test_plain_functions_that_look_like_the_originals(lib, make):
    m = lib.load("m")
    signature = inspect.signature(m.Base.method)
    make(lib.patch("p", "m:Base.method", "m:f", "m:Sub.of"))
    assert pickle.loads(pickle.dumps(m.Sub.of)) == m.Sub.of
    assert m.Sub.of.__qualname__ == "Sub.of"
    assert type(m.f) is type(m.Base.method) is types.FunctionType
    assert inspect.signature(m.Base.method) == signature
    assert pickle.loads(pickle.dumps(m.f)) is m.f
    assert pickle.loads(pickle.dumps(m.Base.method)) is m.Base.method


def test_install_twice(lib, make, caplog):
    m = lib.load("m")
    engine = make(lib.patch("p", "m:f"))
    function = m.f
    engine.install()
    engine.install("p")
    assert m.f is function
    assert logged(caplog, logging.INFO) == ["p: applied"]
    engine.uninstall()
    engine.uninstall()
    engine.install()
    assert m.f() == "p>f"


def test_a_wrapper_that_knows_itself_is_not_out_of_reach(lib, make):
    m = lib.load("m")

    def decorated():
        def wrapper():
            return f"known to {wrapper.__name__}"

        return wrapper

    m.f = decorated()
    engine = make(lib.patch("p", "m:f"))
    assert engine.status()["p"].reason == ""
    assert m.f() == "p>known to wrapper"


def test_what_is_out_of_reach_is_said(lib, make):
    m = lib.load("m")
    kept = [
        functools.partial(m.f),
        m.Base().method,
        {"f": m.f},
        (m.Base.method, 1),
        lambda function=m.f: function,
        types.SimpleNamespace(function=m.f),
        type("Taken", (), {"f": m.f}),
    ]
    engine = make(lib.patch("p", "m:f", "m:Base.method"), lib.patch("q", "m:g"))
    held = f"{len(kept)} reference(s) made before the patch still point to the original"
    assert engine.status()["p"].reason == held
    assert engine.status()["q"].reason == ""
    late = [functools.partial(m.f), m.Base().method]
    kept.clear()
    assert engine.uninstall()["p"].reason == "uninstall(); 2 reference(s) still point to the patch"
    late.clear()
    gc.collect()  # a class is garbage in a cycle
    assert engine.install()["p"].reason == ""
    assert engine.uninstall()["p"].reason == "uninstall()"


def test_references_older_than_an_install(lib, make):
    """The module was imported before; what was taken while the patch was off goes on without it."""
    m = lib.load("m")
    engine = make(lib.patch("p", "m:f"), lib.patch("q", "m:f"), lib.patch("r", "m:Base.method"))
    engine.uninstall("q", "r")
    kept = [m.Base().method, functools.partial(m.f)]
    status = engine.install("q", "r")
    assert m.f() == "q>p>f"
    assert [entry.held for entry in status] == [0, 1, 1]
    assert "2 reference(s) to functions of the libraries are older" in status.verdict
    kept.clear()
    engine.uninstall("q", "r")
    assert [entry.held for entry in engine.install("q", "r")] == [0, 0, 0]
    with engine.disabled(["q"]):
        assert m.f() == "p>f"
    assert [entry.reason for entry in engine.status()] == [""] * 3


def test_stacked_patches_claim_nothing_of_each_other(lib, make):
    m = lib.load("m")
    targets = ("m:f", "m:Base.method", "m:Base.static", "m:Base.of", "m:Sub.of")
    engine = make(*(lib.patch(name, *targets) for name in "abc"))
    assert m.f() == "c>b>a>f"
    assert [entry.reason for entry in engine.status()] == ["", "", ""]
    assert [entry.reason for entry in engine.uninstall()] == ["uninstall()"] * 3


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_stack_order_is_the_given_one(lib, make, order):
    """Whatever is imported, switched off and on again first."""
    lib.write("a", "")
    lib.write("b", "")
    lib.write("c", "")
    patches = []
    for name in "abc":
        patch = lib.patch(name, "m:Base.method", "m:f")
        patch.replacements[1:1] = lib.patch(name, f"{name}:f").replacements
        lib.write(name, "def f(): pass")
        patches.append(patch)
    engine = make(*patches)
    m = lib.load("m")
    for name in order:
        lib.load(name)
    assert m.Base().method() == "c>b>a>method"
    for name in order:
        engine.uninstall(name)
        rest = [other for other in "cba" if other != name]
        assert m.Base().method() == "".join(f"{other}>" for other in rest) + "method"
        engine.install(name)
        assert (m.Base().method(), m.f()) == ("c>b>a>method", "c>b>a>f")


def test_uninstall_in_a_chain_of_shared_slots(lib, make, caplog):
    """c shares a slot with b, b another with a: a comes off all the same."""
    m = lib.load("m")
    before = snapshot(m, m.Base)
    engine = make(
        lib.patch("a", "m:f"), lib.patch("b", "m:f", "m:g"), lib.patch("c", "m:g", "m:Base.method")
    )
    assert engine.uninstall("a")["a"].state is State.DISABLED
    assert (m.f(), m.g(), m.Base().method()) == ("b>f", "c>b>g", "c>method")
    assert engine.uninstall("c", "b")["b"].state is State.DISABLED
    assert snapshot(m, m.Base) == before
    assert logged(caplog, logging.WARNING) == []


def test_two_replacements_of_one_slot_in_one_patch(lib, make):
    m = lib.load("m")
    before = snapshot(m, lib.load("n"))
    engine = make(lib.patch("p", "m:f", "m:f", "n:captured"))
    assert m.f() == lib.load("n").captured() == "p>p>p>f"
    engine.uninstall()
    assert snapshot(m, lib.load("n")) == before


def test_inherited_and_own_slots_stack(lib, make):
    m = lib.load("m")
    before = snapshot(m.Base, m.Sub)
    engine = make(lib.patch("a", "m:Base.method"), lib.patch("b", "m:Sub.method"))
    assert m.Sub().method() == "b>a>method"
    engine.uninstall("a")
    assert (m.Sub().method(), m.Base().method()) == ("b>method", "method")
    engine.uninstall("b")
    assert snapshot(m.Base, m.Sub) == before


def test_somebody_patched_over(lib, make, caplog):
    m = lib.load("m")
    engine = make(lib.patch("a", "m:Base.method", "m:g"), lib.patch("b", "m:Base.method", "m:f"))
    ours = m.Base.method
    m.Base.method = tagging("foreign")(ours)
    status = engine.uninstall("a")
    engine.uninstall("a")
    assert status["a"].state is State.APPLIED
    assert m.Base().method() == "foreign>b>a>method"
    assert m.g() == "a>g", "the whole patch stays"
    assert f"other code changed {lib.name}.m.Base.method" in status["a"].reason
    assert len(logged(caplog, logging.WARNING)) == 1
    m.Base.method = ours
    assert engine.status()["a"].reason == ""
    assert [entry.state for entry in engine.uninstall()] == [State.DISABLED] * 2
    assert (m.Base().method(), m.f(), m.g()) == ("method", "f", "g")


def test_what_a_kept_patch_calls_by_inheritance_is_kept(lib, make, caplog):
    """No patch is called that is said to be disabled."""
    m = lib.load("m")
    before = snapshot(m, m.Base, m.Sub)
    engine = make(lib.patch("a", "m:Base.static"), lib.patch("b", "m:Sub.static", "m:f"))
    ours = vars(m.Sub)["static"]
    m.Sub.static = staticmethod(tagging("foreign")(m.Sub.static))
    for names in ((), ("a",), ()):
        status = engine.uninstall(*names)
        assert [entry.state for entry in status] == [State.APPLIED] * 2
        assert status["a"].reason == "b needs it and cannot be uninstalled"
        assert (m.Base.static(), m.Sub.static()) == ("a>static", "foreign>b>a>static")
    assert len(logged(caplog, logging.WARNING)) == 2
    assert engine.install()["a"].reason == "", "it is wanted again"
    engine.uninstall("a")
    m.Sub.static = ours
    assert engine.status()["a"].reason == "", "nothing is in the way any more"
    assert engine.uninstall("a")["a"].state is State.DISABLED
    assert (m.Base.static(), m.Sub.static(), m.f()) == ("static", "b>static", "b>f")
    engine.uninstall()
    assert snapshot(m, m.Base, m.Sub) == before


def test_a_kept_patch_is_built_again_around_what_it_inherits(lib, make):
    m = lib.load("m")
    engine = make(lib.patch("a", "m:Base.static"), lib.patch("b", "m:Sub.static", "m:f"))
    m.f = tagging("foreign")(m.f)
    status = engine.uninstall()
    assert [entry.state for entry in status] == [State.DISABLED, State.APPLIED]
    assert (m.Base.static(), m.Sub.static()) == ("static", "b>static")


def test_a_lower_patch_applied_above_comes_off_first(lib, make):
    """a was applied while b, above which it does not belong, could not be taken back."""
    m = lib.load("m")
    before = snapshot(m, m.Base, m.Sub)
    engine = make(lib.patch("a", "m:Sub.static"), lib.patch("b", "m:Base.static", "m:f"))
    engine.uninstall("a")
    ours = m.f
    m.f = tagging("foreign")(ours)
    engine.install("a")
    assert m.Sub.static() == "a>b>static"
    m.f = ours
    status = engine.uninstall("b")
    assert [entry.state for entry in status] == [State.APPLIED, State.DISABLED]
    assert (m.Base.static(), m.Sub.static()) == ("static", "a>static")
    engine.uninstall("a")
    assert snapshot(m, m.Base, m.Sub) == before


def test_old_references_are_said_after_every_uninstall(lib, make):
    m = lib.load("m")
    engine = make(lib.patch("a", "m:Base.static"))
    m.Sub.static = staticmethod(tagging("foreign")(m.Base.static))
    for _ in range(2):
        reason = engine.uninstall()["a"].reason
        assert "reference(s) still point to the patch" in reason
        assert m.Sub.static() == "foreign>a>static"
        engine.install()
    del m.Sub.static
    assert engine.uninstall()["a"].reason == "uninstall()"


def test_somebody_put_the_original_back(lib, make):
    m = lib.load("m")
    original = m.Base.method
    engine = make(lib.patch("p", "m:Base.method"), lib.patch("q", "m:f"))
    m.Base.method = original
    assert "other code changed" in engine.status()["p"].reason
    assert engine.uninstall("q")["q"].state is State.DISABLED
    assert m.Base.method is original


def test_a_subclass_put_in_place_of_the_class_is_not_patched_again(lib, make):
    m = lib.load("m")
    engine = make(lib.patch("p", "m:Base.method"))
    m.Base = type("Base", (m.Base,), {})
    engine.status()
    engine.install()
    assert m.Base().method() == "p>method"


def test_all_or_nothing(lib, make, caplog):
    m, n = lib.load("m"), lib.load("n")
    before = snapshot(m, m.Base, m.Sub, n)
    patch = lib.patch("p", "m:f", "m:Base.static", "m:Sub.method")

    @patch.replaces(f"{lib.name}.m", "g")
    def factory(original):
        raise RuntimeError("no")

    engine = make(patch, lib.patch("q", "n:h"))
    engine.install()
    assert engine.status()["p"].state is State.FAILED
    assert engine.status()["p"].reason == "RuntimeError: no"
    assert not engine.status().ok
    assert logged(caplog, logging.WARNING) == [
        "p: failed: RuntimeError: no; the patch is not applied"
    ]
    engine.uninstall("q")
    assert snapshot(m, m.Base, m.Sub, n) == before


def test_failure_in_the_middle_of_a_stack_leaves_the_others(lib, make):
    m = lib.load("m")
    patch = lib.patch("b", "m:f")
    patch.replaces(f"{lib.name}.m", "g")(lambda original: None)
    engine = make(lib.patch("a", "m:f"), patch, lib.patch("c", "m:f"))
    assert m.f() == "c>a>f"
    assert "returned no plain function" in engine.status()["b"].reason
    engine.install("b")
    assert m.f() == "c>a>f"


def test_interrupt_leaves_nothing_half_done(lib, make):
    m = lib.load("m")
    before = snapshot(m)
    patch = lib.patch("p", "m:f")

    @patch.replaces(f"{lib.name}.m", "g")
    def factory(original):
        if interrupts:
            raise interrupts.pop()
        return tagging("p")(original)

    interrupts = [KeyboardInterrupt()]
    engine = make(patch, install=False)
    with pytest.raises(KeyboardInterrupt):
        engine.install()
    assert snapshot(m) == before
    assert engine.status()["p"].state is State.APPLIED
    assert (m.f(), m.g()) == ("p>f", "p>g")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("m:nothing", "does not exist"),
        ("m:Base.nothing", "does not exist"),
        ("m:Base", "is a type, not a function"),
        ("m:__name__", "is a str, not a function"),
    ],
)
def test_drifted_targets(lib, make, caplog, target, reason):
    engine = make(lib.patch("p", "m:f", target))
    assert lib.load("m").f() == "f"
    assert engine.status()["p"].state is State.DRIFTED
    assert reason in engine.status()["p"].reason
    assert len(logged(caplog, logging.WARNING)) == 1


@pytest.mark.parametrize(
    ("probe", "state", "reason"),
    [
        (broken, State.APPLIED, ""),
        (lambda: fixed("done"), State.FIXED, "done"),
        (lambda: drifted("moved"), State.DRIFTED, "moved"),
        (lambda: 1 / 0, State.FAILED, "ZeroDivisionError: division by zero"),
        (lambda: None, State.FAILED, "AttributeError: 'NoneType' object has no attribute"),
    ],
)
def test_probe_decides(lib, make, probe, state, reason):
    engine = make(lib.patch("p", "m:f", probe=probe))
    assert engine.status()["p"].state is State.ARMED, "not asked before the import"
    assert lib.load("m").f() == ("p>f" if state is State.APPLIED else "f")
    assert engine.status()["p"].state is state
    assert engine.status()["p"].reason.startswith(reason)


def test_a_probe_runs_on_the_cpu(lib, make):
    """Also if the user imports a library where tensors are made on another device."""
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        engine = make(
            lib.patch("p", "m:f", probe=lambda: broken() if torch.ones(1).item() else fixed("zero"))
        )
        lib.load("m")
    assert engine.status()["p"].state is State.APPLIED


def test_probe_may_find_a_vanished_target_fixed(lib, make):
    engine = make(lib.patch("p", "m:gone", probe=lambda: fixed("gone")))
    lib.load("m")
    assert engine.status()["p"].state is State.FIXED


def test_probe_that_imports_a_target_of_its_own_engine(lib, make):
    """The hook of that import must not apply anything inside the work in hand."""
    patches = [
        lib.patch("a", "m:f", probe=lambda: lib.load("n") and broken()),
        lib.patch("b", "m:f", "n:h"),
        lib.patch("c", "n:h"),
    ]
    engine = make(*patches)
    assert lib.load("m").f() == "b>a>f"
    assert lib.load("n").h() == "c>b>h"
    assert {entry.state for entry in engine.status()} == {State.APPLIED}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("probe", [lambda: drifted("moved"), lambda: 1 / 0])
def test_strict_raises_and_the_rest_is_applied(lib, make, late, probe):
    patches = lib.patch("a", "m:f", probe=probe), lib.patch("b", "m:f")
    if late:
        lib.load("m")
    engine = make(*patches, install=False, strict=True)
    with pytest.raises(PatchError, match=r"a (drifted: moved|failed: ZeroDivisionError)"):
        engine.install() if late else (engine.install(), lib.load("m"))
    assert engine.status()["b"].state is State.APPLIED
    assert engine.status()["a"].state in (State.DRIFTED, State.FAILED)


def test_gates_and_switches(lib, make):
    lib.load("m")
    both = {"everything": False}
    for state, reason, affects, switches in [
        (State.UNAFFECTED, "affects packaging<1; installed: packaging ", NEVER, {}),
        (State.NOT_INSTALLED, "no_such_thing not installed", ("no_such_thing<1",), {}),
        (State.DISABLED, "=0", ALWAYS, both),
        (State.DISABLED, "_P=0", ALWAYS, {"off": {"p": "T_P=0"}}),
        (State.APPLIED, "", NEVER, {"forced": ["p"]}),
        (State.NOT_INSTALLED, "", ("nono<1",), {"forced": ["p"]}),
    ]:
        engine = make(lib.patch("p", "m:f", affects=affects), **switches)
        status = engine.status()["p"]
        assert status.state is state, switches
        assert reason in status.reason
        assert lib.load("m").f() == ("p>f" if state is State.APPLIED else "f")
        with engine.disabled(()):
            assert lib.load("m").f() == "f"
        assert engine.status()["p"] == status
        engine.retire()


@pytest.mark.parametrize(
    ("newest", "said"),
    [
        ({}, False),
        ({"packaging": "9999"}, False),
        ({"packaging": metadata.version("packaging")}, False),
        ({"packaging": "1.0"}, True),
        ({"another": "1.0"}, False),
    ],
)
def test_untested_versions_are_said(lib, make, newest, said):
    lib.load("m")
    here = f"untested version: packaging {metadata.version('packaging')}"
    outside = lib.patch("q", "m:g", affects=NEVER)
    status = make(lib.patch("p", "m:f", affects=ALWAYS), outside, newest=newest).status()
    assert status["p"].state is State.APPLIED
    assert (here in status["p"].reason) == said
    assert "untested" not in status["q"].reason


def test_disabled_restores_and_nests(lib, make):
    m = lib.load("m")
    engine = make(lib.patch("a", "m:f"), lib.patch("b", "m:f"))
    with suppress(ZeroDivisionError), engine.disabled(("a",)) as status:
        assert status["a"].state is State.DISABLED
        assert m.f() == "b>f"
        with engine.disabled(()):
            assert m.f() == "f"
        assert m.f() == "b>f"
        1 / 0  # noqa: B018
    assert m.f() == "b>a>f"
    with pytest.raises(ValueError, match="no patch is named 'z': status"):
        engine.disabled(("z",)).__enter__()


def test_blocks_that_overlap(lib, make):
    """As in two threads: the block that began first ends first."""
    m = lib.load("m")
    engine = make(lib.patch("a", "m:f"))
    first, second = engine.disabled(()), engine.disabled(())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert m.f() == "f"
    second.__exit__(None, None, None)
    assert m.f() == "a>f"


def test_uninstall_in_a_block_stays(lib, make):
    m = lib.load("m")
    engine = make(lib.patch("a", "m:f"), lib.patch("b", "m:f"))
    with engine.disabled(()):
        engine.uninstall("a")
        engine.install("b")
        assert m.f() == "b>f"
    assert m.f() == "b>f"


def test_target_by_version(lib, make):
    lib.load("m")
    patch = lib.patch("p", "m:f")
    patch.replaces("no.such.module", "gone", when="packaging<1")(tagging("p"))
    patch.replaces(f"{lib.name}.m", "g", when="packaging>=1")(tagging("p"))
    make(patch)
    assert lib.load("m").g() == "p>g"


def test_a_reloaded_module_has_its_own_code_and_the_status_says_so(lib, make, caplog):
    m, n = lib.load("m"), lib.load("n")
    engine = make(lib.patch("a", "m:f", "m:Base.method"), lib.patch("b", "m:f", "n:h"))
    old = m.Base()
    importlib.reload(m)
    assert (m.f(), m.Base().method()) == ("f", "method")
    assert (n.captured(), old.method(), n.h()) == ("b>a>f", "a>method", "b>h")
    changed = f"other code changed {lib.name}.m.f, {lib.name}.m.Base.method afterwards"
    assert engine.status()["a"].reason == changed
    assert engine.status()["b"].reason == f"other code changed {lib.name}.m.f afterwards"
    assert [entry.state for entry in engine.uninstall()] == [State.APPLIED] * 2
    assert f"a: not uninstalled: {changed}" in logged(caplog, logging.WARNING)
    assert (m.f(), m.Base().method()) == ("f", "method")


def test_target_imported_while_another_patch_is_applied(lib, make, caplog):
    def probe():
        lib.load("n")  # in practice, another thread does
        return broken()

    lib.write("n", "def h(): return 'h'")
    lib.load("m")
    engine = make(lib.patch("a", "m:f", probe=probe), lib.patch("b", "n:h"))
    assert lib.load("n").h() == "b>h"
    assert [(entry.state, entry.reason) for entry in engine.status()] == [(State.APPLIED, "")] * 2
    assert [r.getMessage() for r in caplog.records if r.levelname == "INFO"] == [
        "a: applied",
        "b: applied",
    ]


def test_module_imported_anew(lib, make):
    engine = make(lib.patch("p", "m:f", "m:Base.method"))
    old = lib.load("m")
    del sys.modules[old.__name__]
    new = lib.load("m")
    changed = f"other code changed {lib.name}.m.f, {lib.name}.m.Base.method afterwards"
    assert engine.status()["p"].reason == changed
    assert (new.f(), new.Base().method(), old.f()) == ("f", "method", "p>f")


def test_odd_things_in_sys_modules(lib, make, monkeypatch):
    class Hostile(types.ModuleType):
        def __setattr__(self, name, value):
            raise RuntimeError("read-only")

        def __getattribute__(self, name):
            if name != "__dict__":
                raise RuntimeError("lazy")
            return super().__getattribute__(name)

    m = lib.load("m")
    hostile = Hostile("hostile")
    vars(hostile)["f"] = m.f
    monkeypatch.setitem(sys.modules, "hostile", hostile)
    monkeypatch.setitem(sys.modules, "an object", object())
    monkeypatch.setitem(sys.modules, f"{lib.name}.blocked", None)
    engine = make(lib.patch("p", "m:f"), lib.patch("q", "blocked:f"))
    assert vars(hostile)["f"]() == "p>f"
    assert engine.status()["q"].state is State.ARMED
    engine.uninstall()
    assert vars(hostile)["f"]() == "f"


def test_the_engine_of_a_second_import_takes_over(lib, make):
    m, n = lib.load("m"), lib.load("n")
    before = snapshot(m, m.Sub, n)
    patches = [lib.patch(name, "m:f", "m:Sub.method") for name in "ab"] + [lib.patch("c", "o:f")]
    lib.write("o", "def f(): return 'f'")
    old = make(*patches, prefix="SAME")
    new = make(*patches, prefix="SAME")
    other = make(lib.patch("d", "m:f"), prefix="OTHER")
    assert m.f() == "d>b>a>f"
    assert lib.load("o").f() == "c>f"
    assert len(old.install()) == 0
    other.uninstall()
    new.uninstall()
    assert snapshot(m, m.Sub, n) == before


def test_patch_definitions_are_checked():
    for bad in ("Upper", "two words", "", "9", "a__b"):
        with pytest.raises(ValueError, match="slug"):
            Patch(bad, symptom="", affects=ALWAYS)


def test_unreadable_gates_fail_their_patch_alone(lib, make):
    bad = lib.patch("bad", "m:f", affects=("bad ~~ requirement",))
    worse = lib.patch("worse")
    worse.replaces(f"{lib.name}.m", "f", when="no way")(tagging("worse"))
    engine = make(bad, worse, lib.patch("good", "m:g"))
    assert (lib.load("m").f(), lib.load("m").g()) == ("f", "good>g")
    status = engine.status()
    assert [entry.state for entry in status] == [State.FAILED, State.FAILED, State.APPLIED]
    assert "a version gate is invalid" in status["bad"].reason


def test_started_engines_ask_the_gates_when_needed(lib, make):
    engine = make(lib.patch("a", "m:f"), lib.patch("b", "m:g", affects=NEVER), install=False)
    engine.start()
    assert lib.load("m").f() == "a>f"
    assert [entry.state for entry in engine.status()] == [State.APPLIED, State.UNAFFECTED]
    late = make(lib.patch("c", "n:h"), lib.patch("d", "m:g", affects=NEVER), install=False)
    late.start()
    assert late.status()["d"].state is State.UNAFFECTED
    with late.disabled(["c"]) as status:
        assert status["c"].state is State.DISABLED
        assert lib.load("n").h() == "h"
    assert lib.load("n").h() == "c>h"


# -- patches that require others -------------------------------------------------------------------


def raising(lib):
    patch = lib.patch("a")
    patch.replaces(f"{lib.name}.m", "f")(lambda original: None)
    return patch


@pytest.mark.parametrize(
    ("required", "switches", "state", "reason"),
    [
        (lambda lib: lib.patch("a", "m:f"), {}, State.APPLIED, ""),
        (lambda lib: lib.patch("a", "m:f", affects=NEVER), {}, State.APPLIED, ""),
        (lambda lib: lib.patch("a", "m:f", affects=("nono<1",)), {}, State.APPLIED, ""),
        (lambda lib: lib.patch("a", "m:f", probe=lambda: fixed("gone")), {}, State.APPLIED, ""),
        (
            lambda lib: lib.patch("a", "m:f"),
            {"a": "REQUIRES_A=0"},
            State.BLOCKED,
            "needs a, which is disabled by REQUIRES_A=0",
        ),
        (
            lambda lib: lib.patch("a", "m:f", probe=lambda: drifted("moved")),
            {},
            State.BLOCKED,
            "needs a, which is drifted",
        ),
        (raising, {}, State.BLOCKED, "needs a, which is failed"),
        (lambda lib: lib.patch("a", "n:h"), {}, State.ARMED, "needs a, which is armed"),
    ],
)
@pytest.mark.parametrize(("late", "strict"), [(False, False), (True, False), (True, True)])
def test_what_a_required_patch_may_be(
    lib, make, caplog, late, required, switches, state, reason, strict
):
    if late:
        lib.load("m")
    patches = [
        lib.patch("c", "m:f", requires=("b",)),
        required(lib),
        lib.patch("b", "m:g", requires=("a",)),
        lib.patch("d", "m:f"),
    ]
    engine = make(*patches, install=False, prefix="REQUIRES", strict=strict, off=switches)
    with suppress(PatchError):
        engine.install()
        lib.load("m")
    status = engine.status()
    assert (status["b"].state, status["b"].reason) == (state, reason)
    assert status["c"].state is state
    assert status["c"].reason == (reason and f"needs b, which is {state}")
    assert lib.load("m").g() == ("b>g" if state is State.APPLIED else "g")
    a = "a>" if status["a"].state is State.APPLIED else ""
    c = "c>" if state is State.APPLIED else ""
    assert lib.load("m").f() == f"d>{a}{c}f"
    assert status.ok is (status["a"].state not in (State.DRIFTED, State.FAILED))
    assert not [text for text in logged(caplog, logging.WARNING) if not text.startswith("a: ")]


def test_strict_does_not_count_the_blocked(lib, make):
    """A failure is raised for once, and a choice never."""
    lib.load("m")
    patches = [raising(lib), lib.patch("b", "m:g", requires=("a",))]
    with pytest.raises(PatchError) as raised:
        make(*patches, strict=True)
    assert "b" not in str(raised.value).split()
    engine = make(*patches, strict=True, off={"a": "A=0"})
    assert engine.install()["b"].state is State.BLOCKED


def test_required_patches_are_taken_back_last_and_put_first(lib, make):
    lib.write(
        "o",
        """
        steps = []
        class Meta(type):
            def __setattr__(cls, name, value):
                steps.append(cls.__name__)
                super().__setattr__(name, value)
        class A(metaclass=Meta):
            def f(self): return "f"
        class B(A, metaclass=Meta):
            def f(self): return "f"
        class C(A, metaclass=Meta):
            def f(self): return "f"
        """,
    )
    o = lib.load("o")
    engine = make(
        lib.patch("c", "o:C.f", requires=["b"]),
        lib.patch("b", "o:B.f", requires=["a"]),
        lib.patch("a", "o:A.f"),
    )
    assert o.steps == ["A", "B", "C"]
    assert {entry.state for entry in engine.status()} == {State.APPLIED}
    o.steps.clear()
    status = engine.uninstall("a")
    assert o.steps == ["C", "B", "A"]
    assert status["a"].state is State.DISABLED
    assert status["b"].reason == "needs a, which is disabled by uninstall()"
    assert status["c"].reason == "needs b, which is blocked"
    o.steps.clear()
    assert {entry.state for entry in engine.install("a")} == {State.APPLIED}
    assert o.steps == ["A", "B", "C"]


def test_what_was_switched_off_itself_stays_off(lib, make):
    m = lib.load("m")
    engine = make(
        lib.patch("a", "m:f"), lib.patch("b", "m:f", requires=["a"]), lib.patch("c", "m:f")
    )
    engine.uninstall("a")
    assert m.f() == "c>f"
    assert engine.uninstall("b")["b"].state is State.DISABLED
    assert engine.install("a")["b"].reason == "uninstall()"
    assert m.f() == "c>a>f"
    engine.uninstall("a")
    assert engine.install("b")["b"].state is State.BLOCKED
    engine.install("a")
    assert m.f() == "c>b>a>f"


def test_disabled_with_required_patches(lib, make):
    m = lib.load("m")
    engine = make(lib.patch("a", "m:f"), lib.patch("b", "m:f", requires=["a"]))
    with engine.disabled(["a"]) as status:
        assert status["b"].state is State.BLOCKED
        with engine.disabled(["b"]) as inner:
            assert inner["b"].state is State.DISABLED
            assert m.f() == "f"
        assert engine.status()["b"].state is State.BLOCKED
    assert m.f() == "b>a>f"
    with engine.disabled([]):
        assert m.f() == "f"
    assert m.f() == "b>a>f"


def test_a_required_patch_stays_with_one_that_is_patched_over(lib, make, caplog):
    m = lib.load("m")
    engine = make(lib.patch("a", "m:f"), lib.patch("b", "m:g", requires=["a"]))
    ours = m.g
    m.g = tagging("foreign")(ours)
    status = engine.uninstall("a")
    assert [entry.state for entry in status] == [State.APPLIED] * 2
    assert status["a"].reason == "b needs it and cannot be uninstalled"
    assert logged(caplog, logging.WARNING) == [f"a: not uninstalled: {status['a'].reason}"]
    assert (m.f(), m.g()) == ("a>f", "foreign>b>g")
    m.g = ours
    status = engine.uninstall("a")
    assert [entry.state for entry in status] == [State.DISABLED, State.BLOCKED]
    assert (m.f(), m.g()) == ("f", "g")


def test_a_required_patch_that_drifts_when_it_is_put_again(lib, make):
    m = lib.load("m")
    n = lib.load("n")
    found = [broken()]
    engine = make(
        lib.patch("z", "m:g"),
        lib.patch("c", "n:h", requires=["b"]),
        lib.patch("a", "m:g", probe=lambda: found[-1]),
        lib.patch("b", "n:h", requires=["a"]),
    )
    assert (m.g(), n.h()) == ("a>z>g", "b>c>h")
    found.append(drifted("moved"))
    assert engine.uninstall("z")["a"].state is State.APPLIED, "it stays, around another function"
    assert m.g() == "a>g"
    engine.uninstall("a")
    status = engine.install("a")
    assert status["a"].state is State.DRIFTED
    assert status["b"].reason == "needs a, which is drifted"
    assert status["c"].reason.startswith("needs b, which is blocked")
    assert n.h() == "h"
    found.append(broken())
    engine.install("a", "z")
    assert (m.g(), n.h()) == ("a>z>g", "b>c>h")


def failing_the_second_time(tag):
    made = []

    def factory(original):
        made.append(original)
        if len(made) == 2:
            raise OSError("no more")
        return tagging(tag)(original)

    return factory


def test_a_factory_that_fails_when_a_patch_below_it_leaves(lib, make):
    m = lib.load("m")
    b = lib.patch("b", "m:g")
    b.replaces(f"{lib.name}.m", "f")(failing_the_second_time("b"))
    engine = make(lib.patch("a", "m:f"), b)
    assert (m.f(), m.g()) == ("b>a>f", "b>g")
    status = engine.uninstall("a")
    assert [entry.state for entry in status] == [State.DISABLED, State.APPLIED], "it is put again"
    assert (m.f(), m.g()) == ("b>f", "b>g")


def test_old_references_to_a_blocked_patch_are_said(lib, make):
    m = lib.load("m")
    engine = make(lib.patch("a", "m:f"), lib.patch("b", "m:Base.static", requires=["a"]))
    m.Sub.static = staticmethod(tagging("foreign")(m.Base.static))
    reason = engine.uninstall("a")["b"].reason
    assert reason.startswith("needs a, which is disabled by uninstall(); ")
    assert reason.endswith("reference(s) still point to the patch")


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        ({"a": ["z", "b"]}, "a requires unknown patches: z"),
        ({"b": "a_"}, "b requires unknown patches: _"),
        ({"a": ["a"]}, r"in a cycle.*'a', 'a'"),
        ({"a": ["b"], "b": ["c"], "c": ["a"]}, "in a cycle"),
    ],
)
def test_requirements_are_checked(lib, make, requires, message):
    lib.load("m")
    before = snapshot(lib.load("m"))
    standing = make(lib.patch("p", "m:g"), prefix="CHECKED")
    with pytest.raises((KeyError, ValueError), match=message):
        make(
            *(lib.patch(name, "m:f", requires=requires.get(name, ())) for name in "abc"),
            prefix="CHECKED",
        )
    assert standing.status()["p"].state is State.APPLIED, "the engine before goes on"
    standing.uninstall()
    assert snapshot(lib.load("m")) == before


def test_the_verdict_of_status_is_in_plain_words():
    states = {State.UNAFFECTED: 2, State.FIXED: 1, State.ARMED: 1}
    entries = [
        PatchStatus(f"{state.name}{number}", state, "", "", {}, ())
        for state, count in states.items()
        for number in range(count)
    ]
    assert Status(entries).verdict == "all well: 3 not needed here, 1 waiting for an import"
    with pytest.raises(KeyError, match=r"no patch is named 'ARMED' \(did you mean ARMED0"):
        Status(entries)["ARMED"]


def parted(lib, *, requires=(), common=True):
    """A patch with a part for each of two modules, and a replacement for both."""
    for name in ("a", "b"):
        lib.write(name, f"def {name}(): return '{name}'")
    patch = Patch("family", "", ALWAYS, requires=requires, former=("old",))
    if common:
        patch.replaces(f"{lib.name}.m", "f")(tagging("family"))
    for name in ("a", "b"):
        patch.part(name.upper()).replaces(f"{lib.name}.{name}", name)(tagging("part"))
    return patch


def test_each_part_waits_for_its_own_modules(lib, make):
    engine = make(parted(lib))
    m = lib.load("m")
    assert m.f() == "f", "no part is in place"
    a = lib.load("a")
    assert (a.a(), m.f()) == ("part>a", "family>f")
    status = engine.status()["family"]
    assert status.state is State.APPLIED
    assert status.parts == {"A": State.APPLIED, "B": State.ARMED}
    assert status.reason == f"B: armed (waits for the import of {lib.name}.b)"
    b = lib.load("b")
    assert (b.b(), m.f()) == ("part>b", "family>f"), "what is common is there once"
    status = engine.status()["family"]
    assert (status.reason, len(status.replaces)) == ("", 3)
    engine.uninstall("family")
    assert (a.a(), b.b(), m.f()) == ("a", "b", "f")
    engine.install("family")
    assert (a.a(), b.b(), m.f()) == ("part>a", "part>b", "family>f")


def test_a_second_part_finds_no_older_references(lib, make):
    """The module with what is common was imported before; its replacement is no original."""
    m = lib.load("m")
    engine = make(parted(lib))
    lib.load("a")
    lib.load("b")
    assert m.f() == "family>f"
    assert engine.status()["family"].held == 0


def test_a_part_that_drifted_leaves_the_others(lib, make):
    patch = parted(lib)
    lib.write("b", "")
    engine = make(patch)
    m, a, _ = lib.load("m"), lib.load("a"), lib.load("b")
    assert (a.a(), m.f()) == ("part>a", "family>f")
    status = engine.status()["family"]
    assert (status.state, status.ok) == (State.DRIFTED, False)
    assert status.reason == f"A: applied; B: {lib.name}.b.b does not exist"


def test_each_part_has_its_own_gate_and_probe(lib, make):
    patch = parted(lib, common=False)
    patch.parts[0].affects = NEVER
    patch.parts[1].probe(lambda: fixed("it is gone"))
    engine = make(patch)
    a, b = lib.load("a"), lib.load("b")
    assert (a.a(), b.b()) == ("a", "b")
    status = engine.status()["family"]
    assert status.parts == {"A": State.UNAFFECTED, "B": State.FIXED}
    assert status.reason.startswith("A: unaffected (affects packaging>=1 and ")


def test_a_patch_that_requires_one_with_parts(lib, make):
    needing = lib.patch("needing", "m:g", requires=("family",))
    engine = make(needing, parted(lib))
    m = lib.load("m")
    assert m.g() == "g"
    lib.load("a")
    assert m.g() == "needing>g", "one part is enough"
    engine.uninstall("family")
    assert m.g() == "g"
    assert engine.status()["needing"].state is State.BLOCKED


def test_what_is_common_moves_to_another_part(lib, make):
    """The first part is undone, because another patch belongs below it."""
    lower = lib.patch("lower", "a:a")
    engine = make(lower, parted(lib), install=False)
    engine.install("family")
    m, a, b = lib.load("m"), lib.load("a"), lib.load("b")
    engine.install("lower")
    assert (a.a(), b.b(), m.f()) == ("part>lower>a", "part>b", "family>f")
    engine.uninstall("family")
    assert (a.a(), b.b(), m.f()) == ("lower>a", "b", "f")


def test_a_former_name(lib, make, caplog):
    engine = make(parted(lib), former={"old": "family"})
    a, _ = lib.load("a"), lib.load("m")
    with engine.disabled(["old"]) as status:
        assert a.a() == "a"
        assert status["family"].state is State.DISABLED
    assert a.a() == "part>a"


def test_patches_that_are_added_later(lib, caplog):
    m = lib.load("m")
    logger = logging.getLogger("engine")
    variables = {"ADDED_C": "0", "ADDED_D": "force", "ADDED_E": "banana"}
    switches = read("ADDED", {"a": ()}, logger, variables)
    engine = Engine([lib.patch("a", "m:f")], switches, logger)
    engine.install()
    status = engine.add(
        lib.patch("b", "m:f", requires=["a"]),
        lib.patch("c", "m:f"),
        lib.patch("d", "m:g", affects=NEVER),
    )
    applied = State.APPLIED
    assert [entry.state for entry in status] == [applied, applied, State.DISABLED, applied]
    assert status["c"].reason == "ADDED_C=0"
    assert (m.f(), m.g()) == ("b>a>f", "d>g")
    fast = Patch("e", "", ALWAYS, kind=Kind.FAST)
    fast.replaces(f"{lib.name}.m", "Base.method")(tagging("e"))
    assert engine.add(fast)["e"].state is State.OPTIONAL
    for patch, why in (
        (lib.patch("a", "m:g"), "two patches are named a"),
        (lib.patch("x", "m:g", requires=["y"]), "x requires unknown patches: y"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.add(patch)
    assert len(engine.status()) == 5
    engine.uninstall("a")
    assert m.f() == "f"
    kept = functools.partial(m.Sub().method)
    late = engine.add(lib.patch("z", "m:Base.method"))
    assert late["z"].held == 1, "a reference is older"
    assert kept() == "method"
    engine.retire()


def test_a_name_of_two_places_that_is_changed_in_one(lib, make):
    """Both patches stay, and say why; nothing waits for ever."""
    m, n = lib.load("m"), lib.load("n")
    engine = make(
        lib.patch("r", "m:g"),
        lib.patch("a", "m:f"),
        lib.patch("b", "n:captured", requires=["r"]),
    )
    assert n.captured() == "b>a>f"
    n.captured = tagging("foreign")(n.captured)
    status = engine.uninstall()
    assert [entry.state for entry in status] == [State.APPLIED] * 3
    changed = f"other code changed {lib.name}.n.captured afterwards"
    assert changed in status["a"].reason
    assert changed in status["b"].reason
    assert status["r"].reason == "b needs it and cannot be uninstalled"
    assert m.f() == "b>a>f"


def test_on_revert_that_fails(lib, make, caplog):
    m = lib.load("m")
    patch = lib.patch("a", "m:f")

    @patch.on_revert
    def free():
        raise OSError("full")

    engine = make(patch, lib.patch("b", "m:f"))
    assert [entry.state for entry in engine.uninstall()] == [State.DISABLED] * 2
    assert m.f() == "f"
    assert "a: on_revert failed" in caplog.text


def test_a_factory_fails_when_an_inherited_attribute_leaves(lib, make):
    m = lib.load("m")
    b = lib.patch("b", "m:g")
    b.replaces(f"{lib.name}.m", "Sub.method")(failing_the_second_time("b"))
    engine = make(lib.patch("a", "m:Base.method"), b)
    assert m.Sub().method() == "b>a>method"
    assert [entry.state for entry in engine.uninstall("a")] == [State.DISABLED, State.APPLIED]
    assert m.Sub().method() == "b>method"


def test_a_factory_that_returns_a_function_of_somebody(lib, make):
    m = lib.load("m")
    patch = Patch("a", "", ALWAYS)
    patch.replaces(f"{lib.name}.m", "f")(lambda original: m.g)
    assert make(patch).status()["a"].state is State.FAILED
    assert (m.f(), m.g()) == ("f", "g")


def test_the_bug_is_gone_for_one_model_and_the_other_is_not_imported(lib, make):
    family = parted(lib, common=False)
    family.parts[0].probe(lambda: fixed("gone"))
    engine = make(lib.patch("needing", "m:g", requires=("family",)), family)
    m, _ = lib.load("m"), lib.load("a")
    assert engine.status()["family"].parts == {"A": State.FIXED, "B": State.ARMED}
    assert m.g() == "needing>g"


def looks_at_all_modules(monkeypatch):
    """The number of scans of all modules, in a list that grows."""
    rebind, looked = stack.rebind, []

    def counting(pairs, modules):
        looked.extend([True] * (bool(pairs) and isinstance(modules, list)))
        rebind(pairs, modules)

    monkeypatch.setattr(stack, "rebind", counting)
    return looked


def test_one_scan_of_all_modules_each_time(lib, make, monkeypatch):
    """Not one for each function that other modules have."""
    m = lib.load("m")
    lib.write("user", "from LIB.m import f, g, f as other")
    user, looked = lib.load("user"), looks_at_all_modules(monkeypatch)
    engine = make(*(lib.patch(name, "m:f", "m:g", "m:Base.method") for name in "abc"))
    assert len(looked) == 1
    assert (user.f(), user.g(), user.other()) == ("c>b>a>f", "c>b>a>g", "c>b>a>f")
    for change in (engine.uninstall, engine.install):
        looked.clear()
        change("b")
        assert len(looked) == 1
        assert (user.f(), user.g()) == (m.f(), m.g())
    looked.clear()
    with engine.disabled(["a", "c"]):
        assert user.f() == user.other() == "b>f"
    assert len(looked) == 2
    assert user.f() == user.other() == "c>b>a>f"
    del user.f, user.g, user.other
    looked.clear()
    engine.uninstall("a")
    assert not looked, "no other module has them"


def test_no_search_for_references_in_a_block_that_adds_none(lib, make, monkeypatch):
    """What was held stays said; what a block adds is said, too."""
    m = lib.load("m")
    kept, searched, holders = [functools.partial(m.f)], [], core.holders
    engine = make(lib.patch("p", "m:f"), lib.patch("q", "m:g"))

    def searching(functions):
        searched.extend([True] * bool(functions))
        return holders(functions)

    monkeypatch.setattr(core, "holders", searching)
    for _ in range(2):
        with engine.disabled(["p"]) as status:
            assert status["p"].reason == "uninstall()"
        assert engine.status()["p"].held == 1
    assert not searched
    with engine.disabled(["p"]):
        kept.append(functools.partial(m.f))
    assert (engine.status()["p"].held, bool(searched)) == (2, True)
    with engine.disabled(["p"]):
        kept.clear()
    assert engine.status().ok


def test_a_probe_that_is_interrupted_leaves_no_former_function(lib, make):
    """What was put in place before it is in place everywhere."""
    m, n = lib.load("m"), lib.load("n")
    lib.write("user", "from LIB.m import f")
    user = lib.load("user")

    def probe():
        user.between = m.f
        raise KeyboardInterrupt

    interrupted = lib.patch("q", "m:g", probe=probe)
    engine = make(lib.patch("p", "m:f"), interrupted, lib.patch("r", "m:f"), install=False)
    with pytest.raises(KeyboardInterrupt):
        engine.install()
    assert m.f() == n.captured() == user.f() == user.between() == "p>f"
    interrupted.probe_function = None
    engine.install()
    assert m.f() == n.captured() == user.f() == user.between() == "r>p>f"
    engine.uninstall()
    assert m.f is n.captured is user.f is user.between


def test_what_a_user_takes_between_two_replacements(lib, make):
    """A probe runs code of a user, which takes the function while patches are put in place."""
    m = lib.load("m")
    lib.write("user", "from LIB.m import f as first")
    user, original = lib.load("user"), m.f
    taken = []

    def probe():
        taken.append(m.f)
        setattr(user, f"between{len(taken)}", m.f)
        return broken()

    names = "abc"
    engine = make(*(lib.patch(name, "m:f", probe=probe) for name in names))
    values = [user.first, user.between1, user.between2, user.between3]
    assert [each() for each in values] == ["c>b>a>f"] * 4
    assert len({*taken}) == 3
    engine.uninstall("b")
    assert user.first() == user.between1() == user.between3() == m.f() == "c>a>f"
    engine.uninstall()
    assert user.first is user.between1 is user.between2 is user.between3 is m.f is original
