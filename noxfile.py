"""The linters, tests and other checks of this project.

Run ``nox``.  If it is not installed, run ``python noxfile.py``, which installs it into ``.nox/``.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent

# Run by its path, as the package is not installed yet.
VERSIONS = runpy.run_path(str(ROOT / "gemma4_compat" / "versions.py"))


def pinned(versions: dict[str, str]) -> tuple[str, ...]:
    """Requirements for exactly these versions."""
    return tuple(f"{name}=={version}" for name, version in versions.items())


TORCH = f"torch=={VERSIONS['TORCH']}"
OLDEST_TORCH = f"torch=={VERSIONS['OLDEST_TORCH']}"
STACKS = {
    "users": pinned(VERSIONS["USERS"]),
    "middle": pinned(VERSIONS["MIDDLE"]),
    "oldest": pinned(VERSIONS["FLOORS"]),
    "newest": pinned(VERSIONS["NEWEST"]),
}
TRL = {
    "users": "trl==1.3.0",
    "middle": "trl==1.3.0",
    "oldest": "trl==1.3.0",
    "newest": "trl==1.16.0",
}
#: datasets 5 fails on TRL's data sets, with and without the patches
DATASETS = "datasets==4.8.5"
#: Another library that patches the same functions as we do, for tests/test_neighbors.py.
NEIGHBOR = "compressed-tensors==0.20.0"
#: One parameter set of each test that loads a model.
SAMPLE = ("--sample", "1")
#: The regression tests.
BUGS = ("tests/patches", "tests/test_cuda.py", "-m", "regression and not slow", *SAMPLE)
#: One of them for each patch.
ONE_OF_EACH = ("--bugs", "1")
#: The regression tests, and the tests that depend most on the versions.
EACH = ("-m", "(regression or each_stack) and not slow", *SAMPLE)
#: Tests of two processes, which take long.  One of each patch runs on the users' stack.
LEFT_OUT = tuple(
    f"--deselect=tests/patches/{each}"
    for each in (
        "test_distributed_offload.py::test_two_processes",
        "test_fsdp_4bit.py::test_experts_in_two_processes",
        "test_fsdp_4bit_left_out.py::test_each_process_holds_half",
        "test_fsdp_layer_classes.py::test_one_process_has_text_alone",
        "test_fsdp_unused_tower.py::test_another_model_asks_nothing",
        "test_fsdp_unused_tower.py::test_no_process_has_an_image",
        "test_fsdp_unused_tower.py::test_one_process_has_an_image",
        "test_rotary_buffer_order.py::test_ddp",
    )
)
#: The arguments of pytest on these stacks.  Most tests run on the newest stack only.  On the
#: others, a test that each bug is fixed runs, and those that depend most on the versions.
ARGUMENTS = {
    "newest": ("tests", "-m", "not slow", *SAMPLE, *LEFT_OUT),
    "users": (*BUGS[:2], "tests/test_import.py", "tests/test_users_code.py", *EACH, *ONE_OF_EACH),
    "middle": (*BUGS, *ONE_OF_EACH, *LEFT_OUT),
    "oldest": (*BUGS[:2], "tests/test_import.py", *EACH, *ONE_OF_EACH, *LEFT_OUT),
}
#: Quick tests of a patch of each topic, in tests/patches/.
SMOKE = (
    "test_clippable_linear.py",
    "test_cpu_packed_state.py",
    "test_device_map_keys.py",
    "test_inputs_embeds_lookup.py",
    "test_packed_mask_notice.py",
    "test_quant_state_offload.py",
    "test_sliding_prompt_attention.py",
    "test_sound_arguments.py",
)
SMOKE_FILES = tuple(f"tests/patches/{name}" for name in SMOKE)
#: The arguments of pytest in the session ``quick``.
QUICK = (
    "tests/engine",
    *(f"tests/test_{name}.py" for name in ("layout", "catalog", "contract", "docs", "versions")),
    *(*SMOKE_FILES, "-m", "not slow", *SAMPLE),
)
#: Two workers; a file whose tests share results of other processes runs in one of them.
WORKERS = ("-n", "2", "--dist", "loadgroup")
#: What the newest stack needs beside its libraries.
BESIDE = (DATASETS, NEIGHBOR, "wrapt", "packaging")
#: The environment of all stacks.
STACKS_HOME = ROOT / ".nox" / "stacks"
#: the files and folders that tools/catalog.py writes
GENERATED = ("patches.md", "docs/errors.md", "docs/patches", "README.md")
# pytest-xdist 3.8 names groups in an attribute that pytest 9.2 no longer has, and so ignores them.
TEST_TOOLS = ("pytest>=8,<9.2", "pytest-xdist>=3.6", "hypothesis>=6.100")
# additional imports of the libraries' own tests
UPSTREAM_TOOLS = (
    "pytest-timeout",
    "parameterized",
    "scipy",
    "scikit-learn",
    "datasets",
    "diffusers",
    "einops",
    "torchvision",  # without it, the tests of Gemma 4 cannot be collected
)


def run_nox(arguments: list[str]) -> int:
    """Run nox on this file; if it is not installed, from a virtual environment of its own."""
    python = Path(sys.executable)
    try:
        import nox  # noqa: F401
    except ImportError:
        home = ROOT / ".nox" / "bootstrap"
        python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        if not python.exists():
            print("installing nox into", home, flush=True)
            subprocess.check_call([sys.executable, "-m", "venv", str(home)])
        subprocess.check_call([str(python), "-m", "pip", "install", "-q", "nox>=2024.10"])
    return subprocess.call([str(python), "-m", "nox", "-f", __file__, *arguments], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(run_nox(sys.argv[1:]))

import nox  # noqa: E402

nox.options.sessions = [
    "lint",
    *(f"tests(stack='{stack}')" for stack in ("users", "oldest", "newest")),
    "package",
]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False

#: The environments that this run has made ready.
ready: set[Path] = set()
#: Seconds of this run: at its begin, and for installation.
began, installation = time.monotonic(), [0.0]


@contextmanager
def installing() -> Iterator[None]:
    """Counts as installation, of which the end of the run says how long it took."""
    start = time.monotonic()
    try:
        yield
    finally:
        installation[0] += time.monotonic() - start


@atexit.register
def say_how_long_it_took() -> None:
    checks = time.monotonic() - began - installation[0]
    print(f"installation: {installation[0]:.0f} s; checks: {checks:.0f} s", file=sys.stderr)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff on all files, and mypy, strict, on package and tools."""
    with installing():
        session.install("ruff==0.16.*", "mypy==2.*", "wrapt", "packaging", "nox")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session(venv_backend="none")
@nox.parametrize("stack", list(STACKS))
def tests(session: nox.Session, stack: str) -> None:
    """Run the tests on one stack; on the newest, check that they show the bugs without patches.

    On the other stacks, tools/matrix.py measured that.  Arguments after ``--`` replace those of
    pytest: ``-- tests`` runs all tests.
    """
    pytest = str(with_stack(session, stack) / "pytest")
    session.run(pytest, *WORKERS, "--durations=10", *(session.posargs or ARGUMENTS[stack]))
    if not session.posargs and stack == "newest":
        session.log("with the patches switched off, the regression tests must show the bugs:")
        session.run(pytest, *WORKERS, *BUGS, *ONE_OF_EACH, env={"GEMMA4_COMPAT": "0"})


@nox.session(venv_backend="none")
def quick(session: nox.Session) -> None:
    """Run the quickest tests on the newest stack, and then ``lint``.

    They prove the engine, what each patch promises (it is reverted exactly, and functions keep
    their signatures), the layers of the code, the documents and their Python.  Of the patches,
    eight are tested, of every topic; without them, their bugs must show.  Not tested are all other
    patches, the commands, ``plan`` and ``merge``, several processes, and other releases of the
    libraries: ``tests`` does that.
    """
    session.notify("lint")
    pytest = str(with_stack(session, "newest") / "pytest")
    session.run(pytest, *WORKERS, "--durations=10", *QUICK)
    session.log("with the patches switched off, the regression tests must show the bugs:")
    bugs = ("-m", "regression and not slow", *SAMPLE)
    session.run(pytest, *SMOKE_FILES, *bugs, env={"GEMMA4_COMPAT": "0"})


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the CUDA tests on this machine's GPU, and write what came out into tests/gpu.json.

    A stack may come first after ``--``, then arguments of tools/gpu.py: ``-- users -n 16``.
    """
    named = next(iter(session.posargs), None) in STACKS
    stack = session.posargs[0] if named else "newest"
    python = str(with_stack(session, stack) / "python")
    session.run(python, "tools/gpu.py", *session.posargs[named:])


def with_stack(session: nox.Session, stack: str) -> Path:
    """Let the session run on a stack; returns the folder of programs to run.

    All stacks share one environment, which has torch and the newest stack.  The other stacks are
    folders in front of it on the path (tools/overlays.py).
    """
    programs = STACKS_HOME / ("Scripts" if sys.platform == "win32" else "bin")
    python = str(programs / "python")
    with installing():
        if STACKS_HOME not in ready:
            if not programs.exists():
                session.run(sys.executable, "-m", "venv", str(STACKS_HOME))
            pip = (python, "-m", "pip", "install", "-q")
            session.run(*pip, TORCH, *STACKS["newest"], TRL["newest"], *BESIDE, *TEST_TOOLS)
            session.run(*pip, "--no-deps", "--force-reinstall", ".")
            ready.add(STACKS_HOME)
        session.env["PYTHONPATH"] = ""
        if stack != "newest":
            command = (python, "tools/overlays.py", *STACKS[stack], TRL[stack])
            printed = session.run(*command, silent=True)
            session.env["PYTHONPATH"] = str(printed).splitlines()[-1]
    session.env["PATH"] = os.pathsep.join((str(programs), os.environ["PATH"]))
    session.env["OMP_NUM_THREADS"] = "1"  # more threads make the two workers twice as slow
    session.env["PYTHONDONTWRITEBYTECODE"] = ""  # else each process compiles our files again
    return programs


@nox.session(name="tests-oldest-torch")
def tests_oldest_torch(session: nox.Session) -> None:
    """Run the regression tests of the newest libraries on the oldest torch that they support."""
    session.install(OLDEST_TORCH, *STACKS["newest"], TRL["newest"], DATASETS, *TEST_TOOLS)
    session.install("wrapt", "packaging")
    session.install(".", "--no-deps", "--force-reinstall", silent=True)
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("pytest", *WORKERS, *(session.posargs or BUGS))


@nox.session
def properties(session: nox.Session) -> None:
    """Test the engine on 10,000 random examples of each property.  Takes half an hour."""
    session.install(*TEST_TOOLS, "wrapt", "packaging")
    session.env["PROPERTY_EXAMPLES"] = "10000"
    session.env["PYTHONPATH"] = "."
    session.run("pytest", "-n", "2", "tests/engine/test_properties.py", *session.posargs)


@nox.session
def wrapt(session: nox.Session) -> None:
    """Test imports and the engine on the oldest, an older and the newest wrapt."""
    session.install(TORCH, *STACKS["newest"], *TEST_TOOLS, "packaging")
    session.env["PYTHONPATH"] = "."
    for version in ("1.15.0", "1.17.*", "2.*"):
        session.install(f"wrapt=={version}")
        files = ("tests/test_import.py", "tests/test_switches.py", "tests/engine")
        session.run("pytest", *WORKERS, *files)


@nox.session(venv_backend="none")
def new(session: nox.Session) -> None:
    """Start a new patch: ``-- NAME [TOPIC]`` copies the templates of patch and test."""
    session.run(sys.executable, "tools/new.py", *session.posargs, external=True)


@nox.session(name="measure")
def measure_session(session: nox.Session) -> None:
    """Measure patches on the four stacks of the tests, and update the documentation.

    Measures the patches named after ``--``, else all that are not measured yet.  Takes some minutes
    per stack.
    """
    measure(session, TORCH, "--tested", *session.posargs)
    session.run("python", "tools/catalog.py", *GENERATED)


@nox.session
def matrix(session: nox.Session) -> None:
    """Measure every patch on every release, without and with it, into tools/measured/.

    Measures the patches named after ``--``, else all that the file lacks, which takes two hours if
    it is empty.
    """
    measure(session, TORCH, *session.posargs)
    session.run("python", "tools/catalog.py", *GENERATED)


@nox.session(name="matrix-oldest-torch")
def matrix_oldest_torch(session: nox.Session) -> None:
    """Measure the users' and the newest libraries on the oldest torch that they support."""
    measure(session, OLDEST_TORCH, "--newest", *session.posargs)


@nox.session
def expiry(session: nox.Session) -> None:
    """List the patches that the newest releases and pre-releases no longer need."""
    measure(session, TORCH, "--newest")
    session.run("python", "tools/matrix.py", "--expiry")


def measure(session: nox.Session, torch: str, *arguments: str) -> None:
    """Run tools/matrix.py in an environment with the newest libraries and their dependencies."""
    session.install(torch, *STACKS["newest"], *TEST_TOOLS, "wrapt", "packaging", "pip")
    session.run("python", "tools/matrix.py", "--overlays", ".nox/overlays", *arguments)


@nox.session
@nox.parametrize("stack", list(STACKS))
def upstream(session: nox.Session, stack: str) -> None:
    """Run the libraries' own tests without and with the patches; no result may get worse.

    Takes hours.  Names of libraries after ``--`` select some.
    """
    session.install(TORCH, *STACKS[stack], *TEST_TOOLS, *UPSTREAM_TOOLS)
    session.install(".", "--no-deps", "--force-reinstall", silent=True)
    session.install("wrapt", "packaging")
    out = ROOT / ".nox" / f"upstream-{stack}"
    session.run("python", "tools/upstream.py", f"--out={out}", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the users' stories without and with the patches, on the newest libraries."""
    session.install(TORCH, ".[gemma4]")
    session.run("gemma4-compat", "demo", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Regenerate patches.md, docs/errors.md, docs/patches/, the README's table, and printed output.

    What commands print is written into ``docs/``, from the newest libraries.
    """
    session.install(TORCH, *STACKS["newest"], ".")
    session.run("python", "tools/catalog.py", *GENERATED)
    pages = sorted(map(str, ROOT.glob("docs/*.md")))
    session.run("python", "tools/blocks.py", "README.md", "CONTRIBUTING.md", *pages)


@nox.session
def package(session: nox.Session) -> None:
    """Build and check the wheel, and use it in an empty environment, outside the checkout."""
    build_and_try(session)


@nox.session(name="release-check")
def release_check(session: nox.Session) -> None:
    """Run all checks before a release: those of ``package``, and more, on the newest libraries.

    sdist and wheel are compared with the checkout.  The demo and the contract tests run on the
    installed wheel.  A version after ``--`` is the one to release.
    """
    source, wheel = build_and_try(session)
    work = source.parents[1]
    direct = str(work / "direct")
    session.install("packaging", "wrapt")
    session.run("python", "-m", "build", "--wheel", "--outdir", direct, silent=True)
    session.run("python", "tools/release.py", str(source.parent), direct, *session.posargs)

    wanted = (TORCH, *STACKS["newest"], f"{wheel}[gemma4]")
    bin_dir = empty_environment(session, work / "newest", *wanted)
    shutil.unpack_archive(source, work)
    unpacked = work / source.name.removesuffix(".tar.gz")
    shutil.rmtree(unpacked / "gemma4_compat")  # so that the tests import the installed one
    session.env["OMP_NUM_THREADS"] = "1"
    session.chdir(unpacked)
    session.run(str(bin_dir / "gemma4-compat"), "demo", external=True)
    python = str(bin_dir / "python")
    session.run(python, "-m", "pip", "install", "-q", TEST_TOOLS[0], external=True)
    files = ("tests/test_contract.py", "tests/test_catalog.py")
    session.run(python, "-m", "pytest", *files, external=True)


def build_and_try(session: nox.Session) -> tuple[Path, Path]:
    """Build sdist and wheel in a separate folder, and use the wheel without the libraries."""
    with installing():
        session.install("build", "twine")
    session.env["PYTHONPATH"] = ""  # else packages that it names could be imported
    work = Path(session.create_tmp()).resolve()
    shutil.rmtree(work)
    work.mkdir()
    dist = work / "dist"
    session.run("python", "-m", "build", "--outdir", str(dist), silent=True)
    session.run("twine", "check", "--strict", *map(str, dist.iterdir()))
    [source], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    bin_dir = empty_environment(session, work / "empty", str(wheel))
    with session.chdir(dist):
        program = str(bin_dir / "gemma4-compat")
        session.run(program, "--version", external=True)
        session.run(program, "status", external=True, success_codes=[1])  # nothing to patch
    return source, wheel


def empty_environment(session: nox.Session, folder: Path, *requirements: str) -> Path:
    """Create a virtual environment with only these requirements; returns its folder of programs."""
    bin_dir = folder / ("Scripts" if sys.platform == "win32" else "bin")
    with installing():
        session.run("python", "-m", "venv", "--clear", str(folder))
        pip = (str(bin_dir / "python"), "-m", "pip", "install", "-q")
        session.run(*pip, *requirements, external=True)
    return bin_dir
