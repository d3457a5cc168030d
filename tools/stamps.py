"""Says which tables of ``benchmarks/*.md`` were measured with other code than that of the checkout.

    python tools/stamps.py PAGE [LINE]

A comment above a table, or above several, names the files and folders that its figures depend on,
and the hash of their code.  Comments, docstrings and blank lines do not count.  After measuring
again, this program renews the hashes of a page, or that of the comment in this line.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAMP = re.compile(r"<!-- files: (.+) sha256: (\w+) -->")


def essence(name: str, text: str) -> str:
    """The code of a file in Python or CUDA, without comments, docstrings and blank lines."""
    if not name.endswith(".py"):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    lines = text.split("\n")
    for (row, begin), (last, end) in reversed([*_remarks(text)] if name.endswith(".py") else []):
        lines[row - 1 : last] = [lines[row - 1][:begin] + lines[last - 1][end:]]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _remarks(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where comments, and strings at the begin of a statement, are: (row, column) of their ends."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_first = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and is_first):
            yield token.start, token.end
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type


def sha(sources: Mapping[str, str]) -> str:
    """The hash of the code in these files, by name."""
    parts = (f"{name}\n{essence(name, sources[name])}\n" for name in sorted(sources))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def sources(names: str, root: Path = ROOT) -> dict[str, str]:
    """The text of these files, and of those in these folders."""
    found = {}
    for path in (root / name for name in names.split()):
        files = [each for each in path.rglob("*") if each.suffix in (".py", ".cu", ".cuh")]
        for file in files if path.is_dir() else [path]:
            found[file.relative_to(root).as_posix()] = file.read_text(encoding="utf-8")
    return found


def stamp(names: str, root: Path = ROOT) -> str:
    """The comment above a table that was measured with the code as it is."""
    return f"<!-- files: {names} sha256: {sha(sources(names, root))} -->"


def stale(page: str, root: Path = ROOT) -> list[str]:
    """The tables of a page that have to be measured again, or that have no stamp."""
    problems, mark, before = [], None, ""
    for number, line in enumerate((root / page).read_text(encoding="utf-8").splitlines(), 1):
        mark = STAMP.fullmatch(line) or mark
        if line.startswith("|") and not before.startswith("|"):
            where = f"{page}:{number}"
            if mark is None:
                problems.append(f"{where}: no comment above this table names its files")
            elif missing := [name for name in mark[1].split() if not (root / name).exists()]:
                problems.append(f"{where}: the table depends on {missing[0]}, which is gone")
            elif mark[0] != stamp(mark[1], root):
                problems.append(f"{where}: measure this table again, its code has changed since")
        before = line
    return problems


def main(page: str, line: str = "") -> None:
    lines = Path(page).read_text(encoding="utf-8").split("\n")
    for number, each in enumerate(lines):
        if (mark := STAMP.fullmatch(each)) and line in ("", str(number + 1)):
            lines[number] = stamp(mark[1])
    Path(page).write_text("\n".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
