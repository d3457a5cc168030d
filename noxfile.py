"""Everything that is run on this project.

With nox installed, ``nox``; without, ``python noxfile.py`` fetches it into ``.nox/`` first.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent

TORCH = "torch==2.13.0"
STACKS = {
    # what the users had when they reported the failures
    "users": (
        "transformers==5.6.2",
        "accelerate==1.13.0",
        "peft==0.19.1",
        "bitsandbytes==0.49.2",
    ),
    # the lower bounds of the extra in pyproject.toml
    "oldest": (
        "transformers==5.5.0",
        "accelerate==1.10.0",
        "peft==0.18.0",
        "bitsandbytes==0.46.1",
    ),
    "newest": (
        "transformers==5.23.0",
        "accelerate==1.15.0",
        "peft==0.21.2",
        "bitsandbytes==0.50.2",
    ),
}
#: datasets 5 fails to prepare TRL's, with and without us
TRL = {
    "users": ("trl==1.3.0", "datasets==4.8.5"),
    "oldest": ("trl==1.3.0", "datasets==4.8.5"),
    "newest": ("trl==1.16.0", "datasets==4.8.5"),
}
#: everything on the newest libraries; on the users' all but the engine, which knows no library; on
#: the oldest what depends on their versions most
PARTS = {
    "users": ("tests", "--ignore=tests/engine"),
    "oldest": ("tests/patches", "tests/test_contract.py", "tests/test_import.py"),
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
    """ruff and, strict on the package, mypy."""
    session.install("ruff==0.16.*", "mypy==2.*", "wrapt", "packaging", "nox")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
@nox.parametrize("stack", list(STACKS))
def tests(session: nox.Session, stack: str) -> None:
    """The tests on one stack; then, without the patches, that every regression test fails."""
    session.install(TORCH, *STACKS[stack], *TRL[stack], *TEST_TOOLS)
    session.install(".", "--no-deps", "--force-reinstall", silent=True)
    session.install("wrapt", "packaging")
    session.env["OMP_NUM_THREADS"] = "1"  # two workers of as many threads take twice as long
    session.run("pytest", "-n", "2", *(session.posargs or PARTS.get(stack, ())))
    if not session.posargs:
        session.log("the users' failures, with the patches switched off:")
        session.run("pytest", "-n", "2", "-m", "regression", env={"GEMMA4_COMPAT": "0"})


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
    session.run("python", "tests/upstream.py", f"--out={out}", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """The users' stories, without and with the patches, on the newest libraries."""
    session.install(TORCH, ".[gemma4]")
    session.run("gemma4-compat", "demo", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Write patches.md anew from the patches."""
    session.install(".")
    session.run("python", "-m", "gemma4_compat.catalog", "patches.md")


@nox.session
def package(session: nox.Session) -> None:
    """Build, check, and use the wheel in an empty environment, from outside the checkout."""
    session.install("build", "twine")
    out = Path(session.create_tmp()).resolve() / "dist"
    session.run("python", "-m", "build", "--outdir", str(out), silent=True)
    built = sorted(str(path) for path in out.iterdir() if path.is_file())
    session.run("twine", "check", "--strict", *built)
    wheel = max(path for path in built if path.endswith(".whl"))
    session.run("python", "-m", "venv", "--clear", str(out / "empty"))
    bin_dir = out / "empty" / ("Scripts" if sys.platform == "win32" else "bin")
    session.chdir(out)
    session.run(str(bin_dir / "python"), "-m", "pip", "install", "-q", wheel, external=True)
    session.run(str(bin_dir / "gemma4-compat"), "status", external=True)
