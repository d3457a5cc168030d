"""What each patch was measured to do on released versions: reads ``tools/matrix.json``.

That file is written by ``tools/matrix.py``.  It is a list of stacks: versions by library, and for
each patch "without/with/state", which are ``broken``, ``fixed`` or ``unknown`` without the patches,
``works``, ``fails`` or ``unknown`` with them, and the patch's state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from packaging.version import Version

from gemma4_compat.versions import LIBRARIES, USERS

DATA = Path(__file__).with_name("matrix.json")


@dataclass(frozen=True)
class Found:
    """One patch on one stack."""

    stack: dict[str, str]
    without: str
    with_: str
    state: str


@dataclass(frozen=True)
class Run:
    """Consecutive releases of a library on which a patch's bug is there, or is not."""

    broken: bool
    first: str
    last: str

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


class Measured:
    """All stacks of one file."""

    def __init__(self, stacks: Iterable[dict[str, object]]) -> None:
        self.found: dict[str, list[Found]] = {}
        self.stacks: list[dict[str, str]] = []
        for entry in stacks:
            stack = {name: str(value) for name, value in entry.items() if name != "patches"}
            self.stacks.append(stack)
            patches = entry["patches"]
            assert isinstance(patches, dict)
            for name, text in patches.items():
                self.found.setdefault(name, []).append(Found(stack, *text.split("/")))

    @classmethod
    def read(cls, file: Path) -> Measured:
        """From a file; nothing measured where there is none."""
        return cls(json.loads(file.read_text(encoding="utf-8")) if file.exists() else ())

    def releases(self, library: str) -> list[str]:
        """Those that were measured, oldest first."""
        return sorted({stack[library] for stack in self.stacks}, key=Version)

    def newest(self) -> dict[str, str]:
        """The newest measured release of each library."""
        return {library: self.releases(library)[-1] for library in LIBRARIES if self.stacks}

    def on_newest(self, patch: str) -> str:
        """Whether the newest releases together have the bug."""
        newest = self.newest().items()
        found = [f.without for f in self.found.get(patch, ()) if newest <= f.stack.items()]
        return _joined(found)

    def axis(self, patch: str, library: str) -> dict[str, str]:
        """The verdict for each release of one library, the others as the users had them or the
        newest."""
        found: dict[str, list[str]] = {}
        for each in self.found.get(patch, ()):
            if self._is_on_axis(each.stack, library):
                found.setdefault(each.stack[library], []).append(each.without)
        return {version: _joined(found[version]) for version in sorted(found, key=Version)}

    def runs(self, patch: str, library: str) -> list[Run]:
        """Where the bug is along that axis; releases that tell nothing are left out."""
        axis = self.axis(patch, library).items()
        known = [(version, verdict) for version, verdict in axis if verdict != "unknown"]
        runs = []
        for verdict, group in groupby(known, key=lambda pair: pair[1]):
            versions = [version for version, _ in group]
            runs.append(Run(verdict == "broken", versions[0], versions[-1]))
        return runs

    def _is_on_axis(self, stack: dict[str, str], library: str) -> bool:
        others = {name: stack[name] for name in LIBRARIES if name != library}
        return any(others.items() <= anchor.items() for anchor in (USERS, self.newest()))


def _joined(verdicts: Iterable[str]) -> str:
    """Of several stacks with one release: broken if that can be."""
    found = set(verdicts)
    return next((v for v in ("broken", "fixed") if v in found), "unknown")
