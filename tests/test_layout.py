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
FEATURES = ("inspection", "merge", "plan")
#: The engine's docstring that may name Gemma.
NO_WORD = "It knows nothing of Gemma."


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


SOURCES = {module_of(file): file.read_text(encoding="utf-8") for file in FOLDER.rglob("*.py")}
PACKAGES = {module_of(file) for file in FOLDER.rglob("__init__.py")}
ERRORS = {
    node.name
    for source in SOURCES.values()
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.ClassDef)
    and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
}


@cache
def imports(source: str, module: str) -> tuple[Import, ...]:
    """All imports of the package's modules in the source of one of them."""
    return tuple(each for node in ast.walk(ast.parse(source)) for each in taken(node, module))


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


def model_is_the_ground_floor(found: Import) -> bool:
    """``model`` imports no patch and no command."""
    return not is_in(found.importer, "model") or is_in(found.module, "model", "errors", "versions")


def patches_stand_on_engine_and_model(found: Import) -> bool:
    """Patches may also import helpers of patches: modules that begin with an underscore."""
    helper = is_in(found.module, "patches") and is_private(found.module.rpartition(".")[2])
    allowed = helper or is_in(found.module, "engine", "model", "errors", "versions")
    return not is_in(found.importer, "patches") or allowed


def engine_knows_nothing_else(found: Import) -> bool:
    return not is_in(found.importer, "engine") or is_in(found.module, "engine", "errors")


def errors_and_versions_know_nothing(found: Import) -> bool:
    return not is_in(found.importer, "errors", "versions")


def features_take_no_private_name(found: Import) -> bool:
    """Features import no private name of another folder."""
    return not is_in(found.importer, "inspection", "plan", "cli") or not found.is_private()


def tiny_is_for_demo_and_merge(found: Import) -> bool:
    return not is_in(found.module, "tiny") or is_in(found.importer, "demo", "merge")


def errors_come_from_errors(found: Import) -> bool:
    """No module imports a feature for its error class."""
    is_error = found.name in ERRORS or found.name.endswith("Error")
    return not is_error or not is_in(found.module, *FEATURES)


RULES = (
    model_is_the_ground_floor,
    patches_stand_on_engine_and_model,
    engine_knows_nothing_else,
    errors_and_versions_know_nothing,
    features_take_no_private_name,
    tiny_is_for_demo_and_merge,
    errors_come_from_errors,
)


def broken(rule, source: str, module: str) -> list[str]:
    """The imports in this source that break the rule."""
    return [str(each) for each in imports(source, module) if not rule(each)]


def circle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle; empty if there is no circle."""
    edges = {m: {each.module for each in imports(s, m)} - {m} for m, s in sources.items()}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


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
    (model_is_the_ground_floor, "model.sizes", "from ..patches._offload import onloaded"),
    (model_is_the_ground_floor, "model.sizes", "from .. import patches"),
    (model_is_the_ground_floor, "model.sizes", "from ..inspection import targets"),
    (model_is_the_ground_floor, "model.sizes", "from ..plan import plan"),
    (model_is_the_ground_floor, "model.sizes", "from ..merge import merge_adapter"),
    (model_is_the_ground_floor, "model", "from ..cli import main"),
    (model_is_the_ground_floor, "model.sizes", "import gemma4_compat.demo.stage"),
    (model_is_the_ground_floor, "model.sizes", "from .. import status"),
    (
        patches_stand_on_engine_and_model,
        A_PATCH,
        "from ...plan import plan",
    ),
    (
        patches_stand_on_engine_and_model,
        A_PATCH,
        "from ... import status",
    ),
    (
        patches_stand_on_engine_and_model,
        A_PATCH,
        "from . import host_embedding",
    ),
    (
        patches_stand_on_engine_and_model,
        "patches._offload",
        "from .offloading.host_embedding import PATCH",
    ),
    (engine_knows_nothing_else, "engine.core", "from ..model import parts"),
    (engine_knows_nothing_else, "engine.core", "from .. import patches"),
    (engine_knows_nothing_else, "engine", "import gemma4_compat"),
    (errors_and_versions_know_nothing, "errors", "from .merge import MergeResult"),
    (errors_and_versions_know_nothing, "versions", "from .engine.gate import later"),
    (features_take_no_private_name, "inspection.targets", "from ..patches import _clippable"),
    (features_take_no_private_name, "plan.planning", "from ..patches._offload import onloaded"),
    (features_take_no_private_name, "inspection.targets", "from ..model.parts import _WRAPPER"),
    (features_take_no_private_name, "inspection.targets", "from .. import _engine"),
    (features_take_no_private_name, "plan.planning", "from ..model.sizes import _parameter"),
    (features_take_no_private_name, "plan.planning", "from ..inspection._text import size"),
    (features_take_no_private_name, "cli.plan", "from ..inspection import _text"),
    (features_take_no_private_name, "cli.plan", "import gemma4_compat.inspection._text"),
    (tiny_is_for_demo_and_merge, "inspection.targets", "from ..tiny import TOWERS"),
    (tiny_is_for_demo_and_merge, "cli.demo", "from .. import tiny"),
    (tiny_is_for_demo_and_merge, "model.meta", "import gemma4_compat.tiny"),
    (errors_come_from_errors, "cli.merge", "from ..merge import MergeError"),
    (errors_come_from_errors, "plan.planning", "from ..inspection.device_map import InputError"),
    (errors_come_from_errors, "inspection.report", "from ..plan import UsageError"),
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
        (A_PATCH, "from .._offload import onloaded"),
        (A_PATCH, "from ...engine import Patch"),
        ("inspection.targets", "from ._text import size"),
        ("cli.plan", "from ._command import Command"),
        ("cli.plan", "from .. import __version__"),
        ("merge", "from .tiny import image_inputs"),
        ("demo.stage", "from ..tiny import TOWERS"),
        ("plan.planning", "from ..errors import InputError"),
        ("cli.merge", "from ..merge import merge_adapter"),
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
