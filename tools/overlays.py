"""Puts other releases of the libraries in front of those that an environment with torch has.

    python tools/overlays.py REQUIREMENT ... [--overlays FOLDER]

Prints a PYTHONPATH with a folder for each requirement, such as ``transformers==5.6.2``.  A release
is fetched once.  The name of its folder is the requirement, so another pin has another folder.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).resolve().parents[1] / ".nox" / "overlays"
#: Libraries that a release of transformers needs in a certain version.
COMPANIONS = ("tokenizers", "huggingface-hub")


class Overlays:
    """One folder for each release, fetched when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, requirements: Iterable[str]) -> str:
        """``PYTHONPATH`` for these releases, and for what this transformers needs beside them."""
        folders = [self._release(each) for each in requirements]
        paths = [str(each) for each in folders]
        for distribution in metadata.distributions(name="transformers", path=paths):
            for text in distribution.requires or ():
                name = re.split(r"[^\w-]", text)[0]
                if name in COMPANIONS and "extra" not in text and not _is_installed(text):
                    paths.append(str(self._release(text)))
        return os.pathsep.join(paths)

    def _release(self, requirement: str) -> Path:
        name = re.sub(r"[^\w.]+", "-", requirement.replace("==", "-"))
        target = self.folder / name
        if not target.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f".{name}.{os.getpid()}"
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
            subprocess.run([*command, str(partial), requirement], check=True)
            partial.rename(target)
        return target


def _is_installed(requirement: str) -> bool:
    """Whether this Python has a version that fits; a newer one may need what it does not have."""
    wanted = Requirement(requirement)
    return wanted.specifier.contains(metadata.version(wanted.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requirements", nargs="+", metavar="REQUIREMENT")
    parser.add_argument("--overlays", type=Path, default=FOLDER)
    options = parser.parse_intermixed_args()
    print(Overlays(options.overlays).path(options.requirements))


if __name__ == "__main__":
    main()
