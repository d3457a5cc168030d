"""Names of the libraries that no documentation promises, and how each is guarded.

Run ``python tools/private_names.py``: it writes ``docs/private-names.md`` from the code of the
package.  ``tests/test_private_names.py`` removes each name in turn.

A name is in the table if a part of it begins with an underscore, or if it is in a module inside of
transformers, accelerate, PEFT or bitsandbytes.  A name without a module, such as ``._hf_hook``, is
an attribute of an object.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gemma4_compat"
PAGE = ROOT / "docs" / "private-names.md"
PLACES = ("patches", "runtime", "model", "objects.py")
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")

#: what guards a read, the best first
GUARDS = {
    "replaced": "the engine says `drifted` if it does not exist",
    "probe": "the probe reads it, or `require` names it there: `drifted`",
    "factory": "it is read when the patch is put in place: `failed`",
    "asked": "`getattr` with a default, or `hasattr`",
    "caught": "a `try` with another way",
    "call": "nothing: the test that removes it shows what happens",
}
_CAUGHT = {"AttributeError", "ImportError", "Exception"}
#: attributes of tensors and modules of PyTorch; classes of this package have some of these, too
_TORCH = {"_version", "_modules", "_parameters", "_buffers"}


class Read(NamedTuple):
    """A name, the file that reads it, and what guards that."""

    name: str
    file: str
    guard: str


def is_private(name: str) -> bool:
    library, *parts = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return hidden or (library in LIBRARIES[1:] and len(parts) > 1 and "__" not in name)


def reads() -> list[Read]:
    """All reads, sorted."""
    found = set()
    for place in PLACES:
        path = PACKAGE / place
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            found |= set(_File(file).reads())
    required = {(r.file, r.name) for r in found if r.guard == "probe"}
    best: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, file, guard in found:
        best[name, file].append("probe" if (file, name) in required else guard)
    # The worst guard counts, but what a probe requires is there.
    order = list(GUARDS)
    return sorted(Read(*key, max(guards, key=order.index)) for key, guards in best.items())


class _File:
    def __init__(self, path: Path) -> None:
        self.name = path.relative_to(PACKAGE).as_posix()
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.known: dict[str, str] = {}  # the library's names behind local ones
        self.own = set(self._own())
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    top = each.name.partition(".")[0]
                    if top in LIBRARIES:
                        self.known[each.asname or top] = each.name if each.asname else top
            elif isinstance(node, ast.ImportFrom) and _is_of_library(node):
                for each in node.names:
                    self.known[each.asname or each.name] = f"{node.module}.{each.name}"
        for node in ast.walk(self.tree):  # own = torch._C
            if isinstance(node, ast.Assign):
                for target, value in _pairs(node):
                    name = self._name_of(value)
                    if isinstance(target, ast.Name) and name and not name.startswith("."):
                        self.known.setdefault(target.id, name)

    def _own(self) -> Iterator[str]:
        """The attributes that this file's classes and functions define."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id

    def _name_of(self, node: ast.expr) -> str:
        """The library's name that an expression reads; "" for none."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self.known:
            return ".".join([self.known[node.id], *parts])
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            return ".".join([ast.unparse(node.slice).strip("'"), *parts])
        is_own = isinstance(node, ast.Name) and node.id in ("self", "cls") and len(parts) == 1
        hidden = [part for part in parts if is_private(f".{part}")]
        if not hidden or (hidden[0] in self.own and (is_own or hidden[0] not in _TORCH)):
            return ""
        if isinstance(node, ast.Name) and node.id in ("sys", "os", "threading"):
            return ""
        return f".{hidden[0]}"

    def reads(self) -> Iterator[Read]:
        for name, guard in self._visit(self.tree, "call"):
            if is_private(name):
                yield Read(name, self.name, guard)

    def _visit(self, node: ast.AST, guard: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef):
            yield from self._function(node, guard)
            return
        if isinstance(node, ast.Try) and _catches(node):
            for each in node.body:
                yield from self._visit(each, "caught" if guard == "call" else guard)
            for each in (*node.handlers, *node.orelse, *node.finalbody):
                yield from self._visit(each, guard)
            return
        if isinstance(node, ast.ImportFrom) and _is_of_library(node):
            yield from ((f"{node.module}.{each.name}", guard) for each in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if name := self._name_of(node):
                yield name, guard
                if not name.startswith("."):  # the whole chain is one name
                    return
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        for child in ast.iter_child_nodes(node):
            yield from self._visit(child, guard)

    def _function(self, node: ast.FunctionDef, guard: str) -> Iterator[tuple[str, str]]:
        inner = "call" if guard == "factory" else guard
        for each in node.decorator_list:
            called = each.func if isinstance(each, ast.Call) else each
            kind = called.attr if isinstance(called, ast.Attribute) else ""
            inner = {"probe": "probe", "replaces": "factory"}.get(kind, inner)
            if kind in ("around", "replaces") and isinstance(each, ast.Call):
                strings = [a.value if isinstance(a, ast.Constant) else "" for a in each.args[:2]]
                yield ".".join(map(str, strings)), "replaced"
        for child in node.body:
            yield from self._visit(child, inner)

    def _call(self, node: ast.Call) -> Iterator[tuple[str, str]]:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
        texts = [text for text in texts if isinstance(text, str)]
        if called == "require":
            yield from ((text, "probe") for text in texts)
        elif called in ("getattr", "hasattr") and texts:
            base = self._name_of(node.args[0])
            base = "" if base.startswith(".") else base
            if is_private(f".{texts[0]}") and texts[0] not in self.own:
                yield f"{base}.{texts[0]}", "asked" if len(node.args) != 2 or called[0] == "h" else "call"


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _is_of_library(node: ast.ImportFrom) -> bool:
    return not node.level and (node.module or "").partition(".")[0] in LIBRARIES


def _catches(node: ast.Try) -> bool:
    caught = {n.id for h in node.handlers if h.type for n in ast.walk(h.type) if isinstance(n, ast.Name)}
    return bool(caught & _CAUGHT)


def page() -> str:
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, file, guard in reads():
        rows[name, guard].append(f"`{file}`")
    lines = [
        "# Private names of the libraries",
        "",
        "Written by `tools/private_names.py`; the names that the package reads after an import.",
        "",
        "| guard | |",
        "|---|---|",
        *(f"| {guard} | {text} |" for guard, text in GUARDS.items()),
        "",
        "| name | guard | read in |",
        "|---|---|---|",
        *(f"| `{name}` | {guard} | {', '.join(files)} |" for (name, guard), files in rows.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
