"""Fingerprints of the functions that patches copy, in all measured releases of their library.

    python tools/fingerprints.py [PATCH ...] [--overlays FOLDER] [--write]

Prints the functions that ``copies`` of a patch names, with the releases that have each
fingerprint.  With ``--write``, the files in the patch's folder get the fingerprints.  Releases are
fetched once (``tools/overlays.py``); nothing of them is imported.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gemma4_compat.engine import Part, Patch  # noqa: E402
from gemma4_compat.engine.fingerprint import digest  # noqa: E402
from gemma4_compat.engine.patch import Copied  # noqa: E402
from gemma4_compat.patches import topics  # noqa: E402
from tools.measured import DATA, Measured  # noqa: E402
from tools.overlays import FOLDER, Overlays  # noqa: E402


def in_source(source: str, attribute: str) -> str | None:
    """The fingerprint of a function such as ``Class.method``; ``None`` if it is not there."""
    body: list[ast.stmt] = ast.parse(source).body
    node: ast.stmt | None = None
    for name in attribute.split("."):
        body = [*body, *(inner for each in body if isinstance(each, ast.If) for inner in each.body)]
        node = next((each for each in body if getattr(each, "name", "") == name), None)
        body = getattr(node, "body", [])
    if not isinstance(node, ast.FunctionDef):
        return None
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return digest(source.splitlines(keepends=True)[first - 1 : node.end_lineno])


def copied_by(patch: Patch) -> Iterator[tuple[Copied, list[Requirement]]]:
    """What a patch and its parts copy, each with the versions that they are for."""
    units: list[Part | Patch] = [patch, *patch.parts]
    for unit in units:
        for each in unit.copied:
            texts = (*patch.gate_of(unit), *filter(None, [each.when]))
            yield each, [Requirement(text) for text in texts]


def measured(
    copied: Copied, gate: list[Requirement], releases: list[str], overlays: Overlays
) -> dict[str, list[str]]:
    """The fingerprints of a function: each with the releases that have it, oldest first."""
    found: dict[str, list[str]] = {}
    library, *names = copied.module.split(".")
    for release in releases:
        if all(each.specifier.contains(release) for each in gate if each.name == library):
            folder = overlays.path([f"{library}=={release}"]).partition(os.pathsep)[0]
            module = Path(folder, library, *names)
            files = (module.with_suffix(".py"), module / "__init__.py")
            if file := next(filter(Path.exists, files), None):
                each = in_source(file.read_text("utf-8"), copied.attribute)
                found.setdefault(each or "", []).append(release)
    found.pop("", None)
    return found


def written(text: str, attribute: str, hashes: Iterable[str]) -> str:
    """The source of a patch, with other fingerprints of a function that it copies."""
    call = rf'((?:copies|Copied)\(\s*[\w.\"]+,\s*"{re.escape(attribute)}",\s*)(?:"[\w ]*"\s*)+'
    known = list(hashes)
    lines = [" ".join(known[start : start + 6]) for start in range(0, len(known), 6)]
    return re.sub(call, "".join([r"\1", '"', ' " "'.join(lines), '"']), text)


def main() -> None:
    """Print the fingerprints; write them into the patches if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patches", nargs="*", metavar="PATCH")
    parser.add_argument("--overlays", type=Path, default=FOLDER)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_intermixed_args()
    data, overlays = Measured.read(DATA), Overlays(options.overlays)
    for module in (module for modules in topics().values() for module in modules):
        patch, folder = module.PATCH, Path(str(module.__file__)).parent
        if options.patches and patch.name not in options.patches:
            continue
        tuples = (value for value in vars(module).values() if type(value) is tuple)
        others = (each for value in tuples for each in value if isinstance(each, Copied))
        for copied, gate in (*copied_by(patch), *((each, []) for each in others)):
            releases = data.releases(copied.module.partition(".")[0])
            table = measured(copied, gate, releases, overlays)
            print(f"{patch.name}: {copied}")
            for each, found in table.items():
                known = "" if each in copied.fingerprints.split() else "  (new)"
                print(f"    {each}  {found[0]} to {found[-1]}{known}")
            for file in folder.glob("*.py") if options.write and table else ():
                text = file.read_text("utf-8")
                if (new := written(text, copied.attribute, table)) != text:
                    file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
