"""Reads ``tools/measured/PATCH.json``: the measurements of each patch on released versions.

``tools/matrix.py`` writes these files.  Each is a list of stacks: versions by library, the device,
and as ``result`` "without/with/state".  "without" is the result without the patches: ``broken``,
``fixed`` or ``unknown``.  "with" is the result with them: ``works``, ``fails`` or ``unknown``.
"state" is the state of the patch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from packaging.version import Version

from gemma4_compat.versions import LIBRARIES, USERS

DATA = Path(__file__).with_name("measured")


@dataclass(frozen=True)
class Measurement:
    """The measurement of one patch on one stack."""

    stack: dict[str, str]
    without: str
    with_: str
    state: str


@dataclass(frozen=True)
class Run:
    """Consecutive releases of a library that all have a patch's bug, or all do not."""

    broken: bool
    first: str
    last: str

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


class Measured:
    """The measurements of all patches."""

    def __init__(self, by_patch: Mapping[str, Iterable[dict[str, str]]]) -> None:
        self.by_patch: dict[str, list[Measurement]] = {}
        self.stacks: list[dict[str, str]] = []
        self._releases: dict[str, list[str]] = {}
        for name, entries in by_patch.items():
            self.by_patch[name] = []
            for entry in entries:
                stack = {key: value for key, value in entry.items() if key != "result"}
                self.by_patch[name].append(Measurement(stack, *entry["result"].split("/")))
                self.stacks.append(stack)

    @classmethod
    def read(cls, folder: Path) -> Measured:
        """Read the files of a folder; without a file, a patch is not measured."""
        files = sorted(folder.glob("*.json"))
        return cls({file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files})

    def releases(self, library: str) -> list[str]:
        """The measured releases of a library, oldest first."""
        if library not in self._releases:
            found = {stack[library] for stack in self.stacks}
            self._releases[library] = sorted(found, key=Version)
        return self._releases[library]

    def newest(self) -> dict[str, str]:
        """The newest measured release of each library."""
        return {library: self.releases(library)[-1] for library in LIBRARIES if self.stacks}

    def on_newest(self, patch: str) -> str:
        """Whether the stack of the newest releases has the bug."""
        newest = self.newest().items()
        measured = self.by_patch.get(patch, ())
        return _joined(each.without for each in measured if newest <= each.stack.items())

    def states(self, stack: dict[str, str]) -> list[str]:
        """The state of each patch that was measured on this stack without a GPU."""
        wanted = {**stack, "device": "cpu"}.items()
        on = ([e.state for e in es if wanted <= e.stack.items()] for es in self.by_patch.values())
        return [states[-1] for states in on if states]

    def axis(self, patch: str, library: str) -> dict[str, str]:
        """The verdict for each release of one library; the others are the users' or the newest."""
        verdicts: dict[str, list[str]] = {}
        for each in self.by_patch.get(patch, ()):
            if self._is_on_axis(each.stack, library):
                verdicts.setdefault(each.stack[library], []).append(each.without)
        return {version: _joined(verdicts[version]) for version in sorted(verdicts, key=Version)}

    def runs(self, patch: str, library: str) -> list[Run]:
        """Runs of releases with and without the bug; unknown verdicts are left out."""
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
    """The verdict of several stacks with one release: broken if one of them is."""
    seen = set(verdicts)
    return next((v for v in ("broken", "fixed") if v in seen), "unknown")
