"""The rules on imports inside the package; every import in the syntax tree counts.

Imports in functions and under ``TYPE_CHECKING`` count too.  A planted line proves that each rule
works.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import gemma4_compat

PACKAGE = "gemma4_compat"
FOLDER = Path(gemma4_compat.__file__).parent
FEATURES = ("inspection", "merging", "planning")
#: The engine's docstring that may name Gemma.
NO_WORD = "It knows nothing of Gemma."


#: The rooms, from the ground floor up.
FLOORS = (
    ("errors", "versions", "_version", "objects", "engine", "results"),
    ("files", "machine"),
    ("model",),
    ("runtime",),
    ("patches",),
    ("tiny", ""),  # "" is the package itself
    ("inspection", "merging", "planning"),
    ("demo", "launcher", "_sitecustomize"),
    ("cli",),
    ("__main__",),
)
RUNTIME = (
    ("memory",),
    ("kernels",),
    ("experts",),
    ("host",),
    ("capture",),
    ("loss",),
    ("facts", ""),
)


def floor_of(module: str, floors: tuple[tuple[str, ...], ...] = FLOORS) -> int:
    room = [*module.split(".")[1 if floors is FLOORS else 2 :], ""][0]
    return next(number for number, rooms in enumerate(floors) if room in rooms)


def is_in(module: str, *folders: str) -> bool:
    """Whether a module is in one of these folders or modules of the package."""
    return any(f"{module}.".startswith(f"{PACKAGE}.{folder}.") for folder in folders)


@dataclass(frozen=True)
class Import:
    """An import of ``name`` from a module; ``name`` is "" if the module itself is imported."""

    importer: str
    module: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.importer} imports {f'{self.module}.{self.name}'.rstrip('.')}"

    def is_private(self) -> bool:
        """Whether it imports a private module or a private name of another folder."""
        steps = [*self.module.split("."), self.name]
        first = next((number for number, step in enumerate(steps) if is_private(step)), None)
        return first is not None and folder_of(".".join(steps[:first])) != folder_of(self.importer)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def folder_of(module: str) -> str:
    """The package that contains a module; a package contains itself."""
    return module if module in PACKAGES else module.rpartition(".")[0]


def module_of(file: Path) -> str:
    steps = (PACKAGE, *file.relative_to(FOLDER).with_suffix("").parts)
    return ".".join(steps[:-1] if steps[-1] == "__init__" else steps)


def parsed(source: str) -> ast.Module:
    """The syntax tree; CPython 3.11 raises SystemError now and then (python/cpython #106905)."""
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


SOURCES = {module_of(file): file.read_text(encoding="utf-8") for file in FOLDER.rglob("*.py")}
PACKAGES = {module_of(file) for file in FOLDER.rglob("__init__.py")}
ERRORS = {
    node.name
    for source in SOURCES.values()
    for node in ast.walk(parsed(source))
    if isinstance(node, ast.ClassDef)
    and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
}


@cache
def imports(source: str, module: str) -> tuple[Import, ...]:
    """All imports of the package's modules in the source of one of them."""
    return tuple(each for node in ast.walk(parsed(source)) for each in taken(node, module))


def taken(node: ast.AST, module: str) -> Iterator[Import]:
    """The imports of the package's modules in a node of that module's syntax tree."""
    if isinstance(node, ast.Import):
        yield from (Import(module, each.name) for each in node.names if is_ours(each.name))
    elif isinstance(node, ast.ImportFrom):
        steps = folder_of(module).split(".")
        above = steps[: len(steps) - node.level + 1] if node.level else []
        target = ".".join([*above, *filter(None, [node.module])])
        for each in node.names if is_ours(target) else ():
            inner = f"{target}.{each.name}"
            is_module = inner in SOURCES
            yield Import(module, inner) if is_module else Import(module, target, each.name)


def is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


# -- the rules ------------------------------------------------------------------------------------


def imports_go_down(found: Import) -> bool:
    """A room imports from rooms on its own floor or below."""
    return is_shown(found) or floor_of(found.module) <= floor_of(found.importer)


def is_shown(found: Import) -> bool:
    """Whether it is a function that the package itself shows, imported for types alone."""
    return found.importer == PACKAGE and is_in(found.module, *FEATURES)


def runtime_goes_down(found: Import) -> bool:
    """The same inside ``runtime``."""
    if not all(is_in(each, "runtime") for each in (found.importer, found.module)):
        return True
    return floor_of(found.module, RUNTIME) <= floor_of(found.importer, RUNTIME)


def runtime_knows_no_engine(found: Import) -> bool:
    allowed = is_in(found.module, "runtime", "model", "files", "machine", "objects", "errors")
    return not is_in(found.importer, "runtime") or allowed


def patches_import_helpers_only(found: Import) -> bool:
    """A patch imports helpers of all topics and of its own: modules that begin with ``_``."""
    if not (is_in(found.importer, "patches") and is_in(found.module, "patches")):
        return True
    folder, _, name = found.module.rpartition(".")
    return is_private(name) and folder in (f"{PACKAGE}.patches", folder_of(found.importer))


def engine_knows_nothing_else(found: Import) -> bool:
    return not is_in(found.importer, "engine") or is_in(found.module, "engine")


def some_know_nothing(found: Import) -> bool:
    """But that the list of all errors has the engine's."""
    is_error = is_in(found.importer, "errors") and is_in(found.module, "engine.errors")
    return is_error or not is_in(found.importer, "errors", "versions", "objects")


def features_ask_little(found: Import) -> bool:
    """Features see patches and the runtime from outside; they say what ``fast`` means."""
    if not is_in(found.importer, *FEATURES, "cli") or found.name == "FAST_MEANS":
        return True
    if is_in(found.module, "patches"):
        return found.name in ("gate", "load")
    if is_in(found.module, "runtime"):
        return is_in(found.module, "runtime.facts")
    return not is_in(found.module, "engine") or is_in(found.module, "engine.status", "engine.gate")


def features_take_no_private_name(found: Import) -> bool:
    """Features import no private name of another folder."""
    return not is_in(found.importer, "inspection", "planning", "cli") or not found.is_private()


def tiny_is_for_demo_and_merge(found: Import) -> bool:
    return not is_in(found.module, "tiny") or is_in(found.importer, "demo", "merging")


def errors_come_from_errors(found: Import) -> bool:
    """No module imports a feature for its error class."""
    is_error = found.name in ERRORS or found.name.endswith("Error")
    return not is_error or not is_in(found.module, *FEATURES)


RULES = (
    imports_go_down,
    runtime_goes_down,
    runtime_knows_no_engine,
    patches_import_helpers_only,
    engine_knows_nothing_else,
    some_know_nothing,
    features_ask_little,
    features_take_no_private_name,
    tiny_is_for_demo_and_merge,
    errors_come_from_errors,
)


def broken(rule, source: str, module: str) -> list[str]:
    """The imports in this source that break the rule."""
    return [str(each) for each in imports(source, module) if not rule(each)]


def circle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle; empty if there is no circle."""
    edges = {
        m: {each.module for each in imports(s, m) if not is_shown(each)} - {m}
        for m, s in sources.items()
    }
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def lonely_helpers(sources: dict[str, str]) -> list[str]:
    """Helpers of all topics that only one topic imports."""
    users: dict[str, set[str]] = {}
    for module, source in sources.items():
        for each in imports(source, module):
            users.setdefault(each.module, set()).add(folder_of(module))
    helpers = (module for module in sources if is_helper(module))
    return [module for module in helpers if len(users.get(module, set())) < 2]


def is_helper(module: str) -> bool:
    folder, _, name = module.rpartition(".")
    return folder == f"{PACKAGE}.patches" and is_private(name)


def replaced_attributes(source: str) -> list[str]:
    """Lines that replace an attribute of an imported module, or of something from it."""
    tree, foreign = parsed(source), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            foreign |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Assign) and "sys.modules" in ast.unparse(node.value):
            foreign |= {each.id for each in node.targets if isinstance(each, ast.Name)}

    def is_foreign(node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in foreign

    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).rpartition(".")[2]
            changes = name in ("setattr", "delattr", "shadowed", "hidden")
            found += [ast.unparse(node)] if changes and is_foreign(node.args[0]) else []
        elif any(isinstance(each, ast.Attribute) and is_foreign(each) for each in targets):
            found.append(ast.unparse(node))
    return found


def words_of_gemma(text: str) -> list[str]:
    return re.findall(r".*gemma.*", text.replace(NO_WORD, ""), re.IGNORECASE)


# -- the package keeps them -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule):
    assert not [line for module, source in SOURCES.items() for line in broken(rule, source, module)]


def test_nothing_is_imported_in_circles():
    assert circle(SOURCES) == []


def test_the_engine_has_no_word_of_gemma():
    engine = {module: text for module, text in SOURCES.items() if is_in(module, "engine")}
    assert engine
    assert not [line for text in engine.values() for line in words_of_gemma(text)]


def test_a_helper_of_one_topic_is_in_its_folder():
    assert lonely_helpers(SOURCES) == []


def test_the_runtime_replaces_nothing():
    runtime = {module: text for module, text in SOURCES.items() if is_in(module, "runtime")}
    assert runtime
    assert not [line for text in runtime.values() for line in replaced_attributes(text)]


def test_every_file_is_read():
    """The rules see every file that imports from the package."""
    found = [each for module, source in SOURCES.items() for each in imports(source, module)]
    importers = {each.importer for each in found}
    line = re.compile(rf"^ *(from \.|from {PACKAGE}|import {PACKAGE})", re.MULTILINE)
    assert importers == {module for module, source in SOURCES.items() if line.search(source)}
    assert {each.module for each in found} <= SOURCES.keys()


# -- and they find what breaks them ---------------------------------------------------------------

A_PATCH = "patches.offloading.device_map_keys"
PLANTED = [
    (imports_go_down, "model.sizes", "from ..patches._families import FAMILIES"),
    (imports_go_down, "model.sizes", "from ..runtime import facts"),
    (imports_go_down, "model.sizes", "from .. import status"),
    (imports_go_down, "model", "from ..cli import main"),
    (imports_go_down, "files.checkpoint", "from ..model import parts"),
    (imports_go_down, "machine.host_memory", "import gemma4_compat.demo.stage"),
    (imports_go_down, "runtime.facts", "from ..planning import plan"),
    (imports_go_down, A_PATCH, "from ...merging import merge"),
    (imports_go_down, A_PATCH, "from ... import status"),
    (imports_go_down, "inspection.targets", "from ..cli import main"),
    (runtime_goes_down, "runtime.kernels.streams", "from ..experts.packed import FUSED"),
    (runtime_goes_down, "runtime.experts.packed", "from ..host import blocks"),
    (runtime_goes_down, "runtime.host.blocks", "from ..capture.snapshot import Snapshot"),
    (runtime_goes_down, "runtime.capture.graph", "from .. import facts"),
    (runtime_knows_no_engine, "runtime.facts", "from ..engine import Patch"),
    (runtime_knows_no_engine, "runtime.host.blocks", "from ...patches._families import FAMILIES"),
    (runtime_knows_no_engine, "runtime.host.blocks", "from ...versions import FLOORS"),
    (patches_import_helpers_only, A_PATCH, "from . import host_embedding"),
    (patches_import_helpers_only, A_PATCH, "from ..adapters._clippable import wrappers"),
    (
        patches_import_helpers_only,
        "patches._families",
        "from .offloading.host_embedding import PATCH",
    ),
    (features_ask_little, "inspection.targets", "from ..patches import TOPICS"),
    (features_ask_little, "planning.planner", "from ..runtime.host.blocks import Blocks"),
    (features_ask_little, "cli.status", "from ..engine.core import Engine"),
    (engine_knows_nothing_else, "engine.core", "from ..model import parts"),
    (engine_knows_nothing_else, "engine.core", "from .. import patches"),
    (engine_knows_nothing_else, "engine", "import gemma4_compat"),
    (engine_knows_nothing_else, "engine.status", "from ..result import Result"),
    (some_know_nothing, "errors", "from .merging import MergeResult"),
    (some_know_nothing, "versions", "from .engine.gate import later"),
    (some_know_nothing, "objects", "from .errors import InputError"),
    (features_take_no_private_name, "inspection.targets", "from ..patches import _families"),
    (features_take_no_private_name, "planning.planner", "from ..patches._families import FAMILIES"),
    (features_take_no_private_name, "inspection.targets", "from ..model.parts import _WRAPPER"),
    (features_take_no_private_name, "inspection.targets", "from .. import _engine"),
    (features_take_no_private_name, "planning.planner", "from ..model.sizes import _parameter"),
    (features_take_no_private_name, "planning.planner", "from ..inspection._text import size"),
    (features_take_no_private_name, "cli.plan", "from ..inspection import _text"),
    (features_take_no_private_name, "cli.plan", "import gemma4_compat.inspection._text"),
    (tiny_is_for_demo_and_merge, "inspection.targets", "from ..tiny import TOWERS"),
    (tiny_is_for_demo_and_merge, "cli.demo", "from .. import tiny"),
    (tiny_is_for_demo_and_merge, "model.meta", "import gemma4_compat.tiny"),
    (errors_come_from_errors, "cli.merge", "from ..merging import MergeError"),
    (errors_come_from_errors, "planning.planner", "from ..inspection.device_map import InputError"),
    (errors_come_from_errors, "inspection.report", "from ..planning import UsageError"),
]
AROUND = {
    "plain": "{}",
    "in a function": "def function():\n    {}",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}",
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize(("rule", "module", "line"), PLANTED)
def test_a_planted_line_is_found(rule, module, line, around):
    module = f"{PACKAGE}.{module}"
    assert module in SOURCES
    assert len(broken(rule, around.format(line), module)) == 1
    assert len(broken(rule, f"{SOURCES[module]}\n{around.format(line)}", module)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (A_PATCH, "from .._families import FAMILIES"),
        (A_PATCH, "from ._dispatched import use"),
        ("runtime.capture.graph", "from ..host.blocks import Blocks"),
        (A_PATCH, "from ...engine import Patch"),
        ("inspection.targets", "from ._text import size"),
        ("cli.plan", "from ._command import Command"),
        ("cli.plan", "from .. import __version__"),
        ("merging", "from .tiny import image_inputs"),
        ("demo.stage", "from ..tiny import TOWERS"),
        ("planning.planner", "from ..errors import InputError"),
        ("cli.merge", "from ..merging import merge"),
    ],
)
def test_what_is_allowed_is_not_found(module, line):
    assert not [each for rule in RULES for each in broken(rule, line, f"{PACKAGE}.{module}")]


def test_a_planted_circle_is_found():
    module = f"{PACKAGE}.model.parts"
    line = "def function():\n    from .sizes import tensor_sizes"
    found = circle({**SOURCES, module: f"{SOURCES[module]}\n{line}"})
    assert {module, f"{PACKAGE}.model.sizes"} <= set(found)


@pytest.mark.parametrize("line", ["MODEL = 'Gemma4Model'", "# for gemma4", "import gemma4_compat"])
def test_a_planted_word_is_found(line):
    assert words_of_gemma(f"{SOURCES[f'{PACKAGE}.engine.core']}\n{line}")


def test_a_planted_helper_of_one_topic_is_found():
    helper, patch = f"{PACKAGE}.patches._planted", f"{PACKAGE}.{A_PATCH}"
    line = f"{SOURCES[patch]}\nfrom .._planted import name"
    assert lonely_helpers({**SOURCES, helper: "", patch: line}) == [helper]


@pytest.mark.parametrize(
    "line",
    [
        "import bitsandbytes\nbitsandbytes.matmul = None",
        "import torch.nn\nsetattr(torch.nn.Linear, name, None)",
        "from torch import nn\nwith shadowed(nn, Linear=None):\n    pass",
        "import sys\nfound = sys.modules.get('bitsandbytes')\nfound.nn.matmul: int = 1",
        "def function():\n    import torch\n    del torch.Tensor.to",
    ],
)
def test_a_planted_replacement_is_found(line):
    source = SOURCES[f"{PACKAGE}.runtime.host.blocks"]
    assert len(replaced_attributes(f"{source}\n{line}")) == 1


#: Errors that the package itself catches, and those that Python asks a method for.
CAUGHT = {
    "KernelError", "NotCaptured", "CaptureFailed", "NotImplementedError", "AttributeError",
    "KeyError", "AssertionError", "error",
}  # fmt: skip
TOLD = {"DeadlockError", "InputError", "ModelError", "RefusedError"}


def raised(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            yield ast.unparse(error).rpartition(".")[2]


def test_only_errors_of_the_package_reach_users():
    """What patches and runtime raise is in a table, which says for which calls."""
    files = [file for name in ("patches", "runtime") for file in (FOLDER / name).rglob("*.py")]
    found = {file.stem: set(raised(ast.parse(file.read_text()))) for file in files}
    found = {name: errors for name, errors in found.items() if errors}
    assert [(name, errors) for name, errors in found.items() if errors - TOLD - CAUGHT] == []
    text = (FOLDER.parent / "docs" / "how-it-works.md").read_text()
    told = [name for name, errors in found.items() if errors & TOLD]
    assert len(told) > 8
    assert [name for name in told if f"`{name}`" not in text] == []
    for name, errors in found.items():
        if errors & {"AttributeError", "KeyError", "AssertionError", "error"}:
            assert name in ("logits", "head", "output", "quantized_resave", "decoding", "launch")
    assert set(raised(ast.parse("raise ValueError(1)\nraise KeyError"))) - CAUGHT == {"ValueError"}


def test_long_files_say_why():
    """A file above 350 lines says in its docstring why it is one."""
    for module, source in SOURCES.items():
        if source.count("\n") > 350:
            assert "one file" in (ast.get_docstring(parsed(source)) or ""), module


#: Names of private helpers that meant several things.
AMBIGUOUS = {"_table", "_fill", "_plain", "_Plan", "_Kind"}


def test_one_name_means_one_thing():
    found = {
        node.name
        for source in SOURCES.values()
        for node in parsed(source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    assert found & AMBIGUOUS == set()
