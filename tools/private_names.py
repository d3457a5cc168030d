"""Names of the libraries that no documentation promises, and what guards each read of them.

``python tools/private_names.py`` writes ``docs/private-names.md`` and
``gemma4_compat/patches/names.json`` from the code of the package.  A patch drifts if a name is
missing that the second file lists for it.  ``tests/test_missing_names.py`` hides each name in turn.

A name is in the table if a part of it begins with an underscore, or if it is inside of
transformers, accelerate, PEFT or bitsandbytes.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gemma4_compat"
PAGE, NAMES = ROOT / "docs" / "private-names.md", PACKAGE / "patches" / "names.json"
PLACES = ("patches", "runtime", "model", "planning", "objects.py", "engine/probing.py")
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
GUARDS = {
    "replaced": "A patch replaces it: the patch is `drifted` without it.",
    "probe": "The probe reads it: the patch is `drifted` without it.",
    "factory": "It is read when the patch is put in place: the patch is `failed` without it.",
    "asked": "It is read by `getattr` with a default, or after `hasattr`.",
    "caught": "A `try` has another way.",
    "listed": "Each patch that reads it is `drifted` without it: `patches/names.json`.",
    "open": "Nothing guards it; the reason is below.",
}
#: read by ``getattr`` with a default, but in all releases; without them a patch would do nothing
ALWAYS = {"._hf_hook"}
_CAUGHT = {"AttributeError", "ImportError", "Exception"}
#: attributes of PyTorch's objects that classes of this package have, too
_TORCH = {"_version", "_modules", "_parameters", "_buffers"}
#: attributes of a ``View``, and of Python's locks
_OTHERS = {"_module", "_read", "_updates", "_chosen", "_is_owned"}
_MODULE, _STATE = "torch.nn.Module()", "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_TUNER, _HOOK = "peft.tuners.tuners_utils.BaseTuner", "accelerate.hooks.add_hook_to_module"
_MODEL, _CONFIG = (
    "transformers.modeling_utils.PreTrainedModel",
    "transformers.configuration_utils.PreTrainedConfig",
)
#: Where the attributes of objects are: a class, or a function that names the attribute.
OWNERS = {
    "_apply_gate": "transformers.models.gemma4.modeling_gemma4.Gemma4TextExperts",
    "_attn_implementation": f"{_CONFIG}",
    "_backward_hooks": _MODULE,
    "_backward_pre_hooks": _MODULE,
    "_buffers": _MODULE,
    "_cast_input_dtype": "peft.tuners.tuners_utils.BaseTunerLayer",
    "_cdata": "torch.UntypedStorage",
    "_check_target_module_exists": _TUNER,
    "_create_and_replace": _TUNER,
    "_dequantize_weights": "transformers.integrations.gemma_quant.QuantizedEmbedding",
    "_experts_implementation": _CONFIG,
    "_forward_hooks": _MODULE,
    "_forward_pre_hooks": _MODULE,
    "_from_config": _MODEL,
    "_global_mapping": "transformers.utils.generic.GeneralInterface",
    "_get_available_adapters": "peft.tuners.tuners_utils.BaseTunerLayer",
    "_hf_hook": _HOOK,
    "_hf_peft_config_loaded": _MODEL,
    "_is_root": f"{_STATE}.__init__",
    "_load_from_state_dict": _MODULE,
    "_load_pretrained_model": _MODEL,
    "_load_state_dict_post_hooks": _MODULE,
    "_module_info": "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__",
    "_modules": _MODULE,
    "_norm": "transformers.models.gemma4.modeling_gemma4.Gemma4RMSNorm",
    "_old_forward": _HOOK,
    "_param_fqn": "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__",
    "_parameters": _MODULE,
    "_prepare_adapter_config": _TUNER,
    "_reduce_scatter_process_group": _GROUP,
    "_skip_keys_device_placement": _MODEL,
    "_state_ctx": f"{_STATE}.__init__",
    "_supports_flash_attn": _MODEL,
    "_supports_flex_attn": _MODEL,
    "_supports_sdpa": _MODEL,
    "_training_state": f"{_GROUP}.__init__",
    "_version": "torch.Tensor",
}
#: Why nothing guards a name.
OPEN = {
    "._fsdp_param_group": "releases without `_fsdp_param_groups` have it",
    "._fsdp_param_groups": "`hasattr` asks before",
    "torch._C._cuda_getCurrentRawStream": "only PyTorch for CUDA has it, and only there it is read",
}


class Read(NamedTuple):
    """A name, the file that reads it, the outermost function or class, and the guard."""

    name: str
    file: str
    function: str
    guard: str


def is_private(name: str) -> bool:
    library, *parts = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return hidden or (library in LIBRARIES[1:] and len(parts) > 1 and "__" not in name)


def full(name: str) -> str:
    """The name with its owner."""
    return f"{OWNERS.get(name[1:], '')}{name}" if name.startswith(".") else name


class File:
    """The reads of a file, and what its functions and classes refer to."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(PACKAGE)
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.known: dict[str, str] = {}  # a library's names behind local ones
        self.imported: dict[str, tuple[str, str]] = {}  # files of the package, and their functions
        self.texts: dict[str, str] = {}
        self.own = set(self._own())
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    top = each.name.partition(".")[0]
                    if top in LIBRARIES:
                        self.known[each.asname or top] = each.name if each.asname else top
            elif isinstance(node, ast.ImportFrom):
                for each in node.names:
                    if _is_of_library(node):
                        self.known[each.asname or each.name] = f"{node.module}.{each.name}"
                    elif node.level:
                        found = self._import(node, each.name)
                        self.imported[each.asname or each.name] = found
        for node in ast.walk(self.tree):  # own = torch._C
            for target, value in _pairs(node) if isinstance(node, ast.Assign) else ():
                if not isinstance(target, ast.Name):
                    continue
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    self.texts[target.id] = value.value
                name = self._name_of(value)
                if name and not name.startswith("."):
                    self.known.setdefault(target.id, name)
        self.reads: list[Read] = []
        self.refers: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for part in self.tree.body:
            outer = getattr(part, "name", "")
            self.reads += (
                Read(n, str(self.path), outer, g) for n, g in self._visit(part, "listed")
            )
            self.refers[outer] |= set(self._references(part))

    def _import(self, node: ast.ImportFrom, name: str) -> tuple[str, str]:
        base = (PACKAGE / self.path).parents[node.level - 1]
        base = base.joinpath(*(node.module or "").split("."))
        is_module = (base / f"{name}.py").exists()
        file = base / f"{name}.py" if is_module else base.with_suffix(".py")
        file = file if file.exists() else base / "__init__.py"
        return file.relative_to(PACKAGE).as_posix(), "" if is_module else name

    def _references(self, tree: ast.AST) -> Iterator[tuple[str, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                file, name = self.imported.get(node.value.id, ("", "?"))
                if not name:
                    yield file, node.attr
            elif isinstance(node, ast.Name):
                file, name = self.imported.get(node.id, (self.path.as_posix(), node.id))
                if name:
                    yield file, name

    def _own(self) -> Iterator[str]:
        """The attributes that this file's classes and functions define."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                yield node.attr if isinstance(node, ast.Attribute) else node.id

    def _name_of(self, node: ast.expr) -> str:
        """The library's name that an expression reads; "" for none."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self.known:
            return ".".join([self.known[node.id], *parts])
        hidden = [part for part in parts if is_private(f".{part}")]
        if not hidden or (isinstance(node, ast.Name) and node.id in ("sys", "os", "threading")):
            return ""
        of_self = isinstance(node, ast.Name) and node.id in ("self", "cls") and len(parts) == 1
        is_own = hidden[0] in self.own and (of_self or hidden[0] not in _TORCH)
        is_own = is_own or hidden[0] in _OTHERS
        return "" if is_own else f".{hidden[0]}"

    def _visit(self, node: ast.AST, guard: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef):
            yield from self._function(node, guard)
            return
        if isinstance(node, ast.Try) and _catches(node):
            for tried in node.body:
                yield from self._visit(tried, "caught" if guard == "listed" else guard)
            for other in (*node.handlers, *node.orelse, *node.finalbody):
                yield from self._visit(other, guard)
            return
        names: Iterable[str] = ()
        if isinstance(node, ast.ImportFrom) and _is_of_library(node):
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names = [self._name_of(node)]
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        yield from ((name, guard) for name in names if is_private(name))
        if not any(name and not name.startswith(".") for name in names):  # a chain is one name
            for child in ast.iter_child_nodes(node):
                yield from self._visit(child, guard)

    def _function(self, node: ast.FunctionDef, guard: str) -> Iterator[tuple[str, str]]:
        inner = "listed" if guard == "factory" else guard
        for each in node.decorator_list:
            called = each.func if isinstance(each, ast.Call) else each
            kind = called.attr if isinstance(called, ast.Attribute) else ""
            inner = {"probe": "probe", "replaces": "factory"}.get(kind, inner)
            if kind in ("around", "replaces") and isinstance(each, ast.Call):
                name = ".".join(self._text(argument) for argument in each.args[:2])
                if is_private(name):
                    yield name, "replaced"
        for child in node.body:
            yield from self._visit(child, inner)

    def _text(self, node: ast.expr) -> str:
        found = ast.unparse(node).strip("'")
        return self.texts.get(found, found)

    def _call(self, node: ast.Call) -> Iterator[tuple[str, str]]:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called not in ("getattr", "hasattr") or len(node.args) < 2:
            return
        name = self._text(node.args[1])
        if name.startswith("f'_"):
            raise ValueError(f"{self.path}:{node.lineno}: write the private names out: {name}")
        base = self._name_of(node.args[0])
        name = f"{'' if base.startswith('.') else base}.{name}"
        if is_private(name) and (name in ALWAYS or name.rpartition(".")[2] not in self.own):
            yield name, "listed" if name in ALWAYS else "asked"


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _is_of_library(node: ast.ImportFrom) -> bool:
    return not node.level and (node.module or "").partition(".")[0] in LIBRARIES


def _catches(node: ast.Try) -> bool:
    types = [handler.type for handler in node.handlers if handler.type]
    caught = {n.id for each in types for n in ast.walk(each) if isinstance(n, ast.Name)}
    return bool(caught & _CAUGHT)


@cache
def files() -> dict[str, File]:
    paths = [PACKAGE / place for place in PLACES]
    found = (file for path in paths for file in ([path] if path.suffix else path.rglob("*.py")))
    return {file.relative_to(PACKAGE).as_posix(): File(file) for file in sorted(found)}


def reads() -> list[Read]:
    """All reads, sorted."""
    found = {read for file in files().values() for read in file.reads}
    return sorted(r._replace(guard="open") if r.name in OPEN else r for r in found)


def by_patch(*guards: str) -> dict[str, list[str]]:
    """What each patch reads with these guards, with the owners of attributes."""
    by_place = defaultdict(set)
    for read in reads():
        if read.guard in guards:
            by_place[read.file, read.function].add(full(read.name))
    names = {}
    for file in files():
        if file.count("/") == 2 and file.startswith("patches/") and "/_" not in file:
            found = set().union(*(by_place[place] for place in _reached(file)))
            if found:
                names[Path(file).stem] = sorted(found)
    return names


def _reached(file: str) -> set[tuple[str, str]]:
    """The functions and classes that a patch may use: (file, name)."""
    waiting = [(file, name) for name in files()[file].refers]
    found: set[tuple[str, str]] = set()
    while waiting:
        place = waiting.pop()
        if place not in found and place[0] in files():
            found.add(place)
            waiting += files()[place[0]].refers.get(place[1], ())
    return found


def page() -> str:
    """The table for contributors."""
    rows: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for name, file, _, guard in reads():
        rows[name, guard][f"`{file}`"] = None
    lines = [
        "# Private names of the libraries",
        "",
        "<!-- Generated by `python tools/private_names.py`; do not edit. -->",
        "",
        "The package reads these names after an import.  `._name` is an attribute of objects.",
        "",
        "| guard | |",
        "|---|---|",
        *(f"| {guard} | {text} |" for guard, text in GUARDS.items()),
        "",
        "| name | guard | read in |",
        "|---|---|---|",
        *(f"| `{name}` | {guard} | {', '.join(where)} |" for (name, guard), where in rows.items()),
        "",
        *(f"- `{name}`: {reason}" for name, reason in OPEN.items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def json_text() -> str:
    return json.dumps(by_patch("listed"), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    NAMES.write_text(json_text(), encoding="utf-8")
