"""Everything that is run on this project.

With nox installed, ``nox``; without, ``python noxfile.py`` fetches it into ``.nox/`` first.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent

# By its path: nothing is installed yet.
VERSIONS = runpy.run_path(str(ROOT / "gemma4_compat" / "versions.py"))


def pinned(versions: dict[str, str]) -> tuple[str, ...]:
    """Requirements for exactly these."""
    return tuple(f"{name}=={version}" for name, version in versions.items())


TORCH = "torch==2.13.0"
OLDEST_TORCH = "torch==2.8.0"
STACKS = {
    "users": pinned(VERSIONS["USERS"]),
    "oldest": pinned(VERSIONS["FLOORS"]),
    "newest": pinned(VERSIONS["NEWEST"]),
}
#: datasets 5 fails to prepare TRL's, with and without us
TRL = {
    "users": ("trl==1.3.0", "datasets==4.8.5"),
    "oldest": ("trl==1.3.0", "datasets==4.8.5"),
    "newest": ("trl==1.16.0", "datasets==4.8.5"),
}
#: Another library that patches what we patch, for tests/test_neighbours.py.
NEIGHBOURS = {"newest": ("compressed-tensors==0.20.0",)}
#: what pytest runs on them, call by call: nearly everything on the newest; on the others that
#: each bug is fixed, and what depends on their versions most
PARTS = {
    "newest": (("tests", "-m", "not slow"),),
    "users": (
        ("tests", "--sample"),
        (
            "tests/test_contract.py",
            "tests/test_import.py",
            "tests/test_users_code.py",
            "-m",
            "not slow",
        ),
    ),
    "oldest": (("tests", "--sample"), ("tests/test_import.py", "-m", "not slow")),
}
TEST_TOOLS = ("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100")
# what the libraries' own tests import beyond that
UPSTREAM_TOOLS = (
    "pytest-timeout",
    "parameterized",
    "scipy",
    "scikit-learn",
    "datasets",
    "diffusers",
    "einops",
)


def run_nox(arguments: list[str]) -> int:
    """Run nox on this file, from a virtual environment of its own where it is not installed."""
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

nox.options.sessions = ["lint", "tests", "package"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and, strict on package and tools, mypy."""
    session.install("ruff==0.16.*", "mypy==2.*", "wrapt", "packaging", "nox")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
@nox.parametrize("stack", list(STACKS))
def tests(session: nox.Session, stack: str) -> None:
    """The tests on one stack; then, without the patches, that regression tests fail.

    Arguments after ``--`` go to pytest instead, as in ``-- tests``: all tests.
    """
    others = NEIGHBOURS.get(stack, ())
    session.install(TORCH, *STACKS[stack], *TRL[stack], *others, *TEST_TOOLS)
    session.install(".", "--no-deps", "--force-reinstall", silent=True)
    session.install("wrapt", "packaging")
    session.env["OMP_NUM_THREADS"] = "1"  # two workers of as many threads take twice as long
    for part in (session.posargs,) if session.posargs else PARTS[stack]:
        session.run("pytest", "-n", "2", "--durations=10", *part)
    if not session.posargs:
        session.log("the users' failures, with the patches switched off:")
        session.run("pytest", "-n", "2", "--sample", env={"GEMMA4_COMPAT": "0"})


@nox.session
def properties(session: nox.Session) -> None:
    """The engine under 10,000 random examples of each property; half an hour."""
    session.install(*TEST_TOOLS, "wrapt", "packaging")
    session.env["PROPERTY_EXAMPLES"] = "10000"
    session.env["PYTHONPATH"] = "."
    session.run("pytest", "-n", "2", "tests/engine/test_properties.py", *session.posargs)


@nox.session(venv_backend="none")
def new(session: nox.Session) -> None:
    """Begin a patch: ``-- NAME [TOPIC]`` copies the templates of patch and test."""
    session.run(sys.executable, "tools/new.py", *session.posargs, external=True)


@nox.session(name="measure")
def measure_session(session: nox.Session) -> None:
    """The patches named after ``--``, or all that lack it, on the three stacks of the tests.

    Takes some minutes a stack.
    """
    measure(session, TORCH, "--tested", *session.posargs)
    session.run("python", "tools/catalog.py", "patches.md", "README.md")


@nox.session
def matrix(session: nox.Session) -> None:
    """Every patch on every released version, without and with it: tools/matrix.json.

    Takes two hours for all that is missing there; names of patches after ``--`` measure these anew.
    """
    measure(session, TORCH, *session.posargs)
    session.run("python", "tools/catalog.py", "patches.md", "README.md")


@nox.session(name="matrix-oldest-torch")
def matrix_oldest_torch(session: nox.Session) -> None:
    """The same for the users' and the newest libraries on the oldest torch that they take."""
    measure(session, OLDEST_TORCH, "--newest", *session.posargs)


@nox.session
def expiry(session: nox.Session) -> None:
    """Which patches the newest releases, and pre-releases, do not need any more."""
    measure(session, TORCH, "--newest")
    session.run("python", "tools/matrix.py", "--expiry")


def measure(session: nox.Session, torch: str, *arguments: str) -> None:
    """Run tools/matrix.py where the newest libraries and all that they need are installed."""
    session.install(torch, *STACKS["newest"], *TEST_TOOLS, "wrapt", "packaging", "pip")
    session.run("python", "tools/matrix.py", "--overlays", ".nox/overlays", *arguments)


@nox.session
@nox.parametrize("stack", list(STACKS))
def upstream(session: nox.Session, stack: str) -> None:
    """The libraries' own tests, without and with the patches: none may fare worse.

    Takes hours; names of libraries after ``--`` select some.
    """
    session.install(TORCH, *STACKS[stack], *TEST_TOOLS, *UPSTREAM_TOOLS)
    session.install(".", "--no-deps", "--force-reinstall", silent=True)
    session.install("wrapt", "packaging")
    out = ROOT / ".nox" / f"upstream-{stack}"
    session.run("python", "tools/upstream.py", f"--out={out}", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """The users' stories, without and with the patches, on the newest libraries."""
    session.install(TORCH, ".[gemma4]")
    session.run("gemma4-compat", "demo", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Write patches.md, and the README's table of versions, anew."""
    session.install(".")
    session.run("python", "tools/catalog.py", "patches.md", "README.md")


@nox.session
def package(session: nox.Session) -> None:
    """Build, check, and use the wheel in an empty environment, from outside the checkout."""
    build_and_try(session)


@nox.session(name="release-check")
def release_check(session: nox.Session) -> None:
    """What ``package`` does, and all else that a release needs, on the newest libraries.

    sdist and wheel are compared with the checkout; demo and contract tests run on the installed
    wheel.  A version after ``--`` says that this is to be released, as that version.
    """
    source, wheel = build_and_try(session)
    work = source.parents[1]
    direct = str(work / "direct")
    session.install("packaging")
    session.run("python", "-m", "build", "--wheel", "--outdir", direct, silent=True)
    session.run("python", "tools/release.py", str(source.parent), direct, *session.posargs)

    wanted = (TORCH, *STACKS["newest"], f"{wheel}[gemma4]")
    bin_dir = empty_environment(session, work / "newest", *wanted)
    shutil.unpack_archive(source, work)
    unpacked = work / source.name.removesuffix(".tar.gz")
    shutil.rmtree(unpacked / "gemma4_compat")  # so that the tests find the installed one
    session.env["OMP_NUM_THREADS"] = "1"
    session.chdir(unpacked)
    session.run(str(bin_dir / "gemma4-compat"), "demo", external=True)
    python = str(bin_dir / "python")
    session.run(python, "-m", "pip", "install", "-q", TEST_TOOLS[0], external=True)
    files = ("tests/test_contract.py", "tests/test_catalog.py")
    session.run(python, "-m", "pytest", *files, external=True)


def build_and_try(session: nox.Session) -> tuple[Path, Path]:
    """Build sdist and wheel in a folder of their own, and use the wheel without libraries."""
    session.install("build", "twine")
    session.env["PYTHONPATH"] = ""  # or what it names would be there as well
    work = Path(session.create_tmp()).resolve()
    shutil.rmtree(work)
    work.mkdir()
    dist = work / "dist"
    session.run("python", "-m", "build", "--outdir", str(dist), silent=True)
    session.run("twine", "check", "--strict", *map(str, dist.iterdir()))
    [source], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    bin_dir = empty_environment(session, work / "empty", str(wheel))
    with session.chdir(dist):
        session.run(str(bin_dir / "gemma4-compat"), "status", external=True)
    return source, wheel


def empty_environment(session: nox.Session, folder: Path, *requirements: str) -> Path:
    """A virtual environment with these alone; its folder of programs."""
    session.run("python", "-m", "venv", "--clear", str(folder))
    bin_dir = folder / ("Scripts" if sys.platform == "win32" else "bin")
    session.run(str(bin_dir / "python"), "-m", "pip", "install", "-q", *requirements, external=True)
    return bin_dir
