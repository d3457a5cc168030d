"""Every public function has an example in its docstring, which runs.

The examples name folders as users do: "gemma-4-E2B-it" is the configuration of an E2B, or a tiny
checkpoint where weights are read.
"""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

import gemma4_compat
from tests.conftest import forget_older_references
from tests.support import load_model
from tests.test_merge import with_tokenizer

MODULES = (
    "gemma4_compat",
    "gemma4_compat.planning",
    "gemma4_compat.inspection",
    "gemma4_compat.merging",
)
#: the functions whose examples read weights
TINY = {"input_device", "inspect_adapter", "inspect_model", "merge", "quantize_on"}


def public_functions():
    modules = map(importlib.import_module, MODULES)
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {name: value for name, value in public.items() if inspect.isfunction(value)}


FUNCTIONS = public_functions()


def test_functions_are_found():
    assert {
        "status", "install", "uninstall", "disabled", "input_device", "limit_page_locked", "plan",
        "parse_gpu", "parse_size", "scan_targets", "inspect_adapter", "check_device_map",
        "inspect_model", "merge", "quantize_on",
    } == set(FUNCTIONS)  # fmt: skip


@pytest.fixture
def patches_restored():
    off = [each.name for each in gemma4_compat.status() if each.state == "disabled"]
    yield
    gemma4_compat.install()
    forget_older_references()
    gemma4_compat.limit_page_locked(None)
    if off:
        gemma4_compat.uninstall(*off)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example(name, e2b_dir, model_dir, adapter_dir, tmp_path, monkeypatch, patches_restored):
    function = FUNCTIONS[name]
    forget_older_references()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-lora").symlink_to(adapter_dir)
    (tmp_path / "gemma-4-E2B-it").symlink_to(model_dir if name in TINY else e2b_dir)
    values = {**vars(importlib.import_module(function.__module__)), "gemma4_compat": gemma4_compat}
    if name in ("input_device", "inspect_model"):
        from transformers import AutoTokenizer

        with_tokenizer(model_dir, tmp_path / "tokenizer")
        values["tokenizer"] = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        values["model"] = load_model(model_dir)

    example = doctest.DocTestParser().get_doctest(
        inspect.getdoc(function), values, name, inspect.getsourcefile(function), 0
    )
    assert example.examples, f"{name} has no example"
    report = []
    ran = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
    assert not ran.failed, "".join(report)
