"""Checkpoints for all tests, and the proof that regression tests fail without the patches.

A test marked ``@pytest.mark.regression(patch, error)`` shows one bug.  Normally it must pass.  With
``GEMMA4_COMPAT=0`` in the environment, on versions inside the patch's gate, it must *fail*, with an
exception whose text matches ``error``: the users' own message.  The report is then inverted, so
``GEMMA4_COMPAT=0 pytest -m regression`` passes exactly if every bug shows.  ``behind=PATCH`` names
another bug that ends the test before its own bug shows.  ``then=PATCH`` names another bug that ends
the test on versions without its own bug.

``--matrix=FILE`` measures instead (``tools/matrix.py``): regression tests run inside and outside
their gates, and only a sample of those with many parameters.  FILE gets a JSON line for each test
and for the state of each patch.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
import warnings
from collections import defaultdict
from importlib.metadata import version

import pytest
from packaging.version import Version

import gemma4_compat  # first: before any of the libraries that it patches
from gemma4_compat.engine.gate import Outcome
from gemma4_compat.patches import gate, groups, load
from tests import engines
from tests.shapes import AUDIO, E2B_TEXT, E4B_TEXT, VISION, write_config

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Deprecations inside bitsandbytes on a newer torch, once per quantized layer.
warnings.filterwarnings("ignore", message=".*_check_is_size.*")

WITHOUT = os.environ.get("GEMMA4_COMPAT") == "0"
PATCHES = {patch.name: patch for patch in load()}
FAST = groups()["fast"]
#: Whether the last test installed these patches.
WAS_FAST = pytest.StashKey[bool]()
#: counts the tests that have run
FINISHED = itertools.count(1)


def inside(patch):
    return gate(PATCHES[patch]).outcome is not Outcome.OUTSIDE


#: The folders of tests with many parameter sets that load a model for each.
SAMPLED = ("tests/patches/", "tests/inspection/")
#: The number of parameter sets of a test that the matrix runs.
MATRIX_SAMPLE = 2
#: The outcome of a test that fails with another error, by the marker's argument.
OTHER_BUG = {"behind": "skipped", "then": "passes"}


def pytest_addoption(parser):
    parser.addoption(
        "--sample", type=int, metavar="N", help=f"N parameter sets of each test in {SAMPLED}"
    )
    parser.addoption("--bugs", type=int, metavar="N", help="N regression tests of each patch")
    parser.addoption("--matrix", metavar="FILE", help="see tests/conftest.py")
    parser.addoption("--matrix-patch", action="append", default=[], metavar="NAME")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "regression(patch, error, behind, then): see tests/conftest.py"
    )
    config.addinivalue_line("markers", "slow: starts many processes; nox leaves it out by default")
    config.addinivalue_line("markers", "each_stack: nox runs it on each stack")
    config.addinivalue_line("markers", "xdist_group(name): these tests run in one worker")
    config.addinivalue_line("markers", "whole_gpu: takes most of a GPU's memory, so one at a time")
    config.addinivalue_line("markers", "plays(engine, form, action): a cell of tests/engines.py")
    config.addinivalue_line("markers", "cuda: needs a CUDA GPU (deselected without one)")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    try:
        import torch

        gpus = torch.cuda.device_count()
    except ImportError:
        gpus = 0
    for item in items:
        wanted = item.get_closest_marker("cuda")
        if wanted is not None and gpus < wanted.kwargs.get("gpus", 1):
            item.add_marker(pytest.mark.skip(reason=f"needs CUDA, found {gpus} GPU(s)"))
        for name, group in (("whole_gpu", "whole GPU"), ("plays", "engines")):
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.xdist_group(group))
        marker = item.get_closest_marker("regression")
        if not WITHOUT or marker is None or config.getoption("matrix"):
            continue
        if not inside(marker.args[0]):
            item.add_marker(pytest.mark.skip(reason="the bug is not in these versions"))
        elif "behind" in marker.kwargs and inside(marker.kwargs["behind"]):
            reason = f"the bug of {marker.kwargs['behind']} comes first in these versions"
            item.add_marker(pytest.mark.skip(reason=reason))

    if config.getoption("matrix"):
        patches = config.getoption("matrix_patch")
        items[:] = sample([item for item in items if shows_bug_of(item, patches)], MATRIX_SAMPLE)
    elif config.getoption("sample"):
        items[:] = sample(items, config.getoption("sample"))
    if config.getoption("bugs"):
        items[:] = few_of_each_patch(items, config.getoption("bugs"))


def pytest_collection_finish(session):
    """Collections of all objects, which take 30 ms, come ten times as seldom: models are many."""
    launched = [item for item in session.items if not item.get_closest_marker("skip")]
    engines.asked = [each.args for item in launched for each in item.iter_markers("plays")]
    pass_by_what_there_is()
    gc.set_threshold(*gc.get_threshold()[:2], 100)


def pytest_runtest_logfinish():
    """What tests import and compile stays, too: it made each installation take half a second."""
    if next(FINISHED) % 100 == 0:
        pass_by_what_there_is()


def pass_by_what_there_is():
    """No collection of garbage, and no search for references, looks at it again."""
    gc.collect()
    gc.freeze()


def forget_older_references():
    """Those of the models of other tests in this process."""
    for record in gemma4_compat._engine._records:
        record.held = 0


def pytest_runtest_setup(item):
    """Install the patches of the kind `fast` for their own tests, and only for these."""
    marked = item.get_closest_marker("regression")
    fast = item.path.stem.removeprefix("test_") in FAST or (marked and marked.args[0] in FAST)
    if not WITHOUT and (fast or item.config.stash.get(WAS_FAST, False)):
        (gemma4_compat.install if fast else gemma4_compat.uninstall)("fast")
        forget_older_references()
        item.config.stash[WAS_FAST] = bool(fast)


def pytest_runtest_teardown(item):
    """Workers share the memory of a GPU."""
    if item.get_closest_marker("cuda") and not item.get_closest_marker("skip"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def shows_bug_of(item, patches):
    """Whether this is a regression test of one of these patches (default: of any)."""
    marker = item.get_closest_marker("regression")
    return marker is not None and (not patches or marker.args[0] in patches)


def sample(items, count):
    """The tests with at most ``count`` parameter sets each, spread over all sets."""
    sets = defaultdict(list)
    for item in items:
        function = item.nodeid.partition("[")[0]
        sets[function if function.startswith(SAMPLED) else item.nodeid].append(item)
    kept = []
    for found in sets.values():
        number = min(count, len(found))
        kept += [found[i * (len(found) - 1) // max(number - 1, 1)] for i in range(number)]
    return kept


def few_of_each_patch(items, count):
    """These tests, but only the first regression tests of each patch, and first those that run."""
    regression = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("regression")
        if marker is not None and item.get_closest_marker("each_stack") is None:
            regression[marker.args[0]].append(item)
    more = set()
    for found in regression.values():
        found.sort(key=may_be_skipped)
        more.update(found[count:])
    return [item for item in items if item not in more]


def may_be_skipped(item):
    return any(item.get_closest_marker(name) is not None for name in ("cuda", "skip", "skipif"))


def matrix_line(config, **line):
    with open(config.getoption("matrix"), "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def matrix_report(item, call, report):
    """Record ``bug``, ``passes``, ``skipped`` or the text of another failure."""
    marker = item.get_closest_marker("regression")
    patch, error = marker.args
    if report.when == "teardown" or (report.when == "setup" and report.passed):
        return
    outcome = "skipped" if report.skipped else "passes"
    if report.failed:
        text = f"{call.excinfo.type.__name__}: {call.excinfo.value}"
        shown = call.when == "call" and re.search(error, text, re.DOTALL)
        outcome = "bug" if shown else " ".join(text.split())[:300]
        if WITHOUT and not shown:
            outcome = next((OTHER_BUG[name] for name in marker.kwargs), outcome)
    matrix_line(item.config, test=item.nodeid, patch=patch, outcome=outcome)


def pytest_sessionfinish(session):
    if session.config.getoption("matrix"):
        gemma4_compat._engine.import_targets()
        if not WITHOUT:  # the last test may have taken them out
            gemma4_compat.install("fast")
        for each in gemma4_compat.status():
            matrix_line(session.config, patch=each.name, state=str(each.state), reason=each.reason)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    marker = item.get_closest_marker("regression")
    if marker is not None and item.config.getoption("matrix"):
        matrix_report(item, call, outcome.get_result())
        return
    if not WITHOUT or marker is None or call.when != "call":
        return
    report = outcome.get_result()
    patch, error = marker.args
    if call.excinfo is None:
        report.outcome, report.longrepr = "failed", f"passes without {patch}"
        return
    text = f"{call.excinfo.type.__name__}: {call.excinfo.value}"
    if re.search(error, text, re.DOTALL):
        report.outcome, report.longrepr = "passed", None
        # pytest-xdist transfers user_properties from its workers.
        report.user_properties.append(("bug", f"{patch} | {item.name} | {' '.join(text.split())}"))


def pytest_terminal_summary(terminalreporter):
    passed = terminalreporter.stats.get("passed", [])
    bugs = [value for each in passed for name, value in each.user_properties if name == "bug"]
    if bugs:
        terminalreporter.section("without gemma4_compat")
    for bug in sorted(bugs):
        terminalreporter.write_line(bug[:240])
    if WITHOUT and bugs:
        terminalreporter.write_line(f"{len(bugs)} regression tests show their bug")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny random Gemma 4 checkpoint, bfloat16."""
    from gemma4_compat.tiny import build_checkpoint

    return build_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def adapter_dir(tmp_path_factory, model_dir):
    """A LoRA adapter on language model and towers, with the users' broad targets."""
    from gemma4_compat.tiny import build_adapter

    return build_adapter(tmp_path_factory.mktemp("adapter"), model_dir)


@pytest.fixture(scope="session")
def outer_adapter_dir(tmp_path_factory, adapter_dir):
    """The same adapter with the rarer layout of names, without ``.linear``."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(adapter_dir, tmp_path_factory.mktemp("outer"), dirs_exist_ok=True)
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    tensors = {name.replace(".linear.lora_", ".lora_"): t for name, t in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def second_adapter_dir(tmp_path_factory, model_dir):
    """Another broad adapter: other values, other rank."""
    from gemma4_compat.tiny import build_adapter

    return build_adapter(tmp_path_factory.mktemp("second"), model_dir, rank=8, seed=1)


@pytest.fixture(scope="session")
def language_adapter_dir(tmp_path_factory, model_dir):
    """An adapter on the language model alone, which PEFT loads without any patch."""
    from gemma4_compat.tiny import LANGUAGE_TARGETS, build_adapter

    folder = tmp_path_factory.mktemp("language")
    return build_adapter(folder, model_dir, targets=LANGUAGE_TARGETS)


@pytest.fixture(scope="session")
def e2b_dir(tmp_path_factory):
    """The config.json of an E2B, and nothing else."""
    return write_config(tmp_path_factory.mktemp("e2b"), E2B_TEXT, VISION, AUDIO)


@pytest.fixture(scope="session")
def e4b_dir(tmp_path_factory):
    """The config.json of an E4B, and nothing else."""
    return write_config(tmp_path_factory.mktemp("e4b"), E4B_TEXT, VISION, AUDIO)


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory):
    """A tiny model with experts, like the text model of 26B-A4B, bfloat16."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=512,
        vocab_size_per_layer_input=512,
        hidden_size=128,
        hidden_size_per_layer_input=0,
        intermediate_size=128,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=128,
        enable_moe_block=True,
        num_experts=32,  # the router is quantized too, in blocks of 32 rows
        top_k_experts=2,
        moe_intermediate_size=48,
    )
    path = tmp_path_factory.mktemp("moe")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma4ForCausalLM(config)
    for layer in model.model.layers:
        for parameter in layer.experts.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory):
    """A tiny Llama: another model, and the base of an adapter for another model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    with torch.random.fork_rng(devices=[]):
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        ).save_pretrained(folder)
    return folder


@pytest.fixture
def cell(request):
    """The cell that a test plays."""
    return request.node.get_closest_marker("plays").args


@pytest.fixture
def offloaded_eight_bit():
    """Skips if bitsandbytes cannot offload 8-bit layers."""
    if Version("0.47") <= Version(version("bitsandbytes")) < Version("0.48.2"):
        pytest.skip("offloaded 8-bit layers raise with bitsandbytes 0.47.0 to 0.48.1")


@pytest.fixture
def eight_bit_files():
    """Skips if an 8-bit model on the CPU changes when it is saved and loaded."""
    if Version(version("bitsandbytes")) < Version("0.48.1"):
        pytest.skip("8-bit weights do not survive a file on the CPU before bitsandbytes 0.48.1")


@pytest.fixture
def native_adapters():
    """Skips if the installed PEFT is too old for transformers' own adapter methods."""
    skip_before_peft(wanted_peft())


@pytest.fixture
def native_loading():
    """The same for ``load_adapter`` alone.

    transformers 5.24 wants a PEFT that is not released, but does not check it there.
    """
    skip_before_peft(min(wanted_peft(), Version("0.21")))


def wanted_peft():
    from transformers.integrations.peft import MIN_PEFT_VERSION

    return Version(MIN_PEFT_VERSION)


def skip_before_peft(wanted):
    if Version(version("peft")) < wanted:
        pytest.skip(f"this transformers needs peft {wanted}")


@pytest.fixture
def pristine():
    """All patches in their initial state, before and after the test."""
    gemma4_compat.install()
    yield
    gemma4_compat.install()
