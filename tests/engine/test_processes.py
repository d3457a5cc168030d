"""Threads, forks, and imports in the middle of imports."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from gemma4_compat.engine import broken, core
from gemma4_compat.engine.status import State

from .conftest import snapshot

PATIENCE = 60  # seconds until a test that hangs fails


def together(*functions):
    """Run functions in threads at once; their exceptions, and a failure where one hangs."""
    errors = []
    barrier = threading.Barrier(len(functions))

    def guarded(function):
        try:
            barrier.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "deadlock"
    assert errors == []


@pytest.mark.parametrize("repeat", range(10))
def test_threads_import_targets_at_once(lib, make, repeat):
    for name in "uvw":
        lib.write(name, "import time\ntime.sleep(0.002)\ndef f(): return 'f'")
    patches = [lib.patch("a", "u:f", "v:f"), lib.patch("b", "v:f", "w:f"), lib.patch("c", "w:f")]
    engine = make(*patches, install=False)

    def busy():
        for _ in range(20):
            engine.status()

    together(
        lambda: lib.load("u"), lambda: lib.load("v"), lambda: lib.load("w"),
        engine.install, busy,
    )  # fmt: skip
    assert {entry.state for entry in engine.status()} == {State.APPLIED}
    assert [lib.load(name).f() for name in "uvw"] == ["a>f", "b>a>f", "c>b>f"]


def test_threads_install_and_uninstall_at_once(lib, make):
    m, n = lib.load("m"), lib.load("n")
    before = snapshot(m, m.Base, m.Sub, n)
    targets = ("m:f", "m:Base.method", "m:Sub.of")
    engine = make(*(lib.patch(name, *targets) for name in "abc"))

    def toggle(name):
        for _ in range(15):
            engine.uninstall(name)
            engine.status()
            engine.install(name)

    together(*(lambda name=name: toggle(name) for name in "abc"))
    assert m.f() == n.captured() == "c>b>a>f"
    engine.uninstall()
    assert snapshot(m, m.Base, m.Sub, n) == before


def test_threads_switch_required_patches_at_once(lib, make):
    m = lib.load("m")
    before = snapshot(m, m.Base, m.Sub)
    targets = ("m:f", "m:Base.method", "m:Sub.of")
    requires = {"a": ["c"], "b": ["a"]}
    engine = make(*(lib.patch(n, *targets, requires=requires.get(n, ())) for n in "abc"))

    def toggle(name):
        for _ in range(15):
            engine.uninstall(name)
            engine.status()
            engine.install(name)

    together(*(lambda name=name: toggle(name) for name in "abc"))
    assert {entry.state for entry in engine.status()} == {State.APPLIED}
    assert m.f() == "c>b>a>f"
    engine.uninstall("c")
    assert snapshot(m, m.Base, m.Sub) == before


def test_probe_waits_for_a_package_that_waits_for_the_engine(lib, make, monkeypatch):
    """The lock of the engine and the lock of a module, taken in opposite orders."""
    monkeypatch.setattr("gemma4_compat.engine.core._PATIENCE", 0.5)
    lib.write("pack", "")
    os.remove(lib.root / "pack.py")
    (lib.root / "pack").mkdir()
    lib.write(
        "pack/__init__",
        """
        import threading
        from . import one
        first, second = threading.Event(), threading.Event()
        import LIB.gates as gates
        gates.half.set()
        gates.probing.wait(10)
        from . import two
        """,
    )
    lib.write("pack/one", "def f(): return 'f'")
    lib.write("pack/two", "def f(): return 'f'")
    lib.write("gates", "import threading\nhalf, probing = threading.Event(), threading.Event()")
    gates = lib.load("gates")

    def probe():
        gates.probing.set()
        from importlib import import_module

        import_module(f"{lib.name}.pack")  # half-initialized in the other thread: waits for it
        return broken()

    engine = make(lib.patch("a", "pack.one:f", "m:f", probe=probe), lib.patch("b", "pack.two:f"))

    def importer():
        gates.half.wait(10)
        lib.load("m")

    together(lambda: lib.load("pack"), importer)
    assert {entry.state for entry in engine.status()} == {State.APPLIED}
    assert lib.load("pack").two.f() == "b>f"
    assert lib.load("m").f() == "a>f"


def test_engine_started_while_another_thread_imports_the_target(lib, make):
    lib.write(
        "slow",
        """
        import threading
        def f(): return "early"
        import LIB.gates as gates
        gates.half.set()
        gates.go.wait(10)
        def f(): return "f"
        """,
    )
    lib.write("gates", "import threading\nhalf, go = threading.Event(), threading.Event()")
    gates = lib.load("gates")
    engine = make(lib.patch("p", "slow:f"), install=False)

    def starter():
        gates.half.wait(10)
        threading.Timer(0.1, gates.go.set).start()
        engine.install()

    together(lambda: lib.load("slow"), starter)  # and nobody asks for the status
    assert lib.load("slow").f() == "p>f"
    assert engine.status()["p"].state is State.APPLIED


def test_engine_started_in_the_middle_of_the_targets_own_import(lib, make):
    """Half a module is left alone; the next occasion finds the whole."""
    lib.write("half", "import builtins\nbuiltins._start()\ndef f(): return 'f'")
    engine = make(lib.patch("p", "half:f"), install=False)
    import builtins

    seen = []
    builtins._start = lambda: seen.append(engine.install()["p"].state)
    try:
        half = lib.load("half")
    finally:
        del builtins._start
    assert seen == [State.ARMED]
    assert engine.status()["p"].state is State.APPLIED
    assert half.f() == "p>f"


def test_import_that_fails_is_the_users(lib, make):
    lib.write("bad", "raise ImportError('half installed')")
    engine = make(lib.patch("p", "bad:f"))
    with pytest.raises(ImportError, match="half installed"):
        lib.load("bad")
    assert engine.status()["p"].state is State.ARMED
    assert engine.import_targets()["p"].state is State.FAILED
    assert "half installed" in engine.status()["p"].reason
    lib.write("bad", "def f(): return 'f'")
    assert engine.install()["p"].state is State.ARMED
    assert lib.load("bad").f() == "p>f", "the hook is still there"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_fork_while_another_thread_applies(lib, make):
    m = lib.load("m")
    applying = threading.Event()
    patch = lib.patch("p", "m:f")

    @patch.replaces(f"{lib.name}.m", "g")
    def factory(original):
        applying.set()
        time.sleep(0.3)
        return lambda: f"p>{original()}"

    engine = make(lib.patch("q", "m:Base.method", requires=["p"]), patch, install=False)
    thread = threading.Thread(target=engine.install)
    thread.start()
    applying.wait(10)
    child = os.fork()
    if not child:
        try:
            import faulthandler

            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            status = engine.install()
            fine = all(entry.state is State.APPLIED for entry in status)
            fine = fine and (m.f(), m.g(), m.Base().method()) == ("p>f", "p>g", "q>method")
            engine.uninstall("p")
            fine = fine and (m.f(), m.g(), m.Base().method()) == ("f", "g", "method")
            os._exit(0 if fine else 3)
        finally:
            os._exit(4)
    _, code = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(code) == 0
    thread.join(PATIENCE)
    assert engine.status()["p"].state is State.APPLIED
    assert sys.modules[m.__name__].f() == "p>f"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_does_not_wait_for_replaced_engines(lib, make):
    old = make(lib.patch("p", "m:f"), prefix="REPLACED")
    make(lib.patch("q", "m:f"), prefix="REPLACED")
    held, done = threading.Event(), threading.Event()

    def hold():
        with old._lock:
            held.set()
            done.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE)
    begin = time.monotonic()
    child = os.fork()
    if not child:
        os._exit(0)
    took = time.monotonic() - begin
    done.set()
    thread.join()
    os.waitpid(child, 0)
    assert took < core._PATIENCE / 2


def test_target_that_needs_a_library_that_is_not_installed(lib, make):
    """Nobody can use that target; a module that a library itself lacks is a fault."""
    lib.write("needing", "import no_such_library")
    lib.write("broken", "import json.no_such_module")
    misspelled = lib.patch("r")
    misspelled.replaces("no_such_library.module", "f")(lambda original: original)
    engine = make(lib.patch("p", "needing:f"), lib.patch("q", "broken:f"), misspelled)
    states = engine.import_targets()
    assert (states["p"].state, states["p"].ok) == (State.UNAFFECTED, True)
    assert states["p"].reason.endswith("needing needs no_such_library, which is not installed")
    assert states["q"].state is State.FAILED
    assert states["r"].state is State.FAILED  # no library of the engine has this name
