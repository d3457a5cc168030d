"""Which patches variables, calls and other packages switch on and off, on any releases."""

from __future__ import annotations

import json
from datetime import date

import pytest

from tests.test_import import REPORT, python


@pytest.mark.parametrize(
    ("variable", "value", "on", "off"),
    [
        ("GEMMA4_COMPAT_SPEED", "0", "host_embedding", "captured_decoding"),
        ("GEMMA4_COMPAT_MEMORY", "0", "captured_decoding", "host_embedding"),
        ("GEMMA4_COMPAT_ADAPTERS", "0", "captured_decoding", "peft_redispatch"),
        ("GEMMA4_COMPAT", "only:peft_redispatch", "offloaded_tie_check", "captured_decoding"),
        ("GEMMA4_COMPAT", "only:speed", "offload_streaming", "peft_redispatch"),
    ],
)
def test_switches_by_subject(variable, value, on, off):
    states = json.loads(python("-c", REPORT, **{variable: value}).stdout)["patches"]
    assert states[on][0] != "disabled"
    assert states[off] == ["disabled", f"{variable}={value}"]


#: A fix, one that saves memory, one that saves time, and two of the kind `fast`.
PLAIN, FAST = ("cudnn_attention", "loss_memory", "norm_kernels"), ("one_row_4bit", "one_row_lora")
ON, ASKED, OFF = "11100", "11111", "00000"  # which of them are in place


@pytest.mark.parametrize(
    ("variables", "calls", "states"),
    [
        ({}, "", ON),
        ({}, "install()", ON),
        ({}, "install('generation', 'adapters', 'attention', 'fix', 'memory', 'exact')", ON),
        ({}, "install('fast')", ASKED),
        ({}, "install('speed')", ASKED),
        ({}, "install('one_row_4bit')", "11110"),
        ({}, "install('one_row_lora')", ASKED),  # which requires the other
        ({}, "install('fast'); install()", ASKED),
        ({}, "install('fast'); uninstall('fast')", ON),
        ({}, "install('fast'); uninstall('speed')", "11000"),
        ({}, "install('fast'); uninstall(); install()", ON),
        ({}, "install('fast'); block = disabled('speed'); block.__enter__()", "11000"),
        ({}, "install('fast')\nwith disabled('speed'): pass", ASKED),
        ({}, "\nwith disabled('speed'): pass", ON),
        ({}, "\nwith disabled(): install('fast')", ASKED),
        ({"FAST": "1"}, "", ASKED),
        ({"FAST": "on"}, "uninstall(); install()", ASKED),
        ({"FAST": "0"}, "", ON),
        ({"FAST": "0"}, "install('fast')", ON),
        ({"SPEED": "1"}, "", ASKED),
        ({"SPEED": "0"}, "", "11000"),
        ({"SPEED": "0", "FAST": "1"}, "", "11000"),
        ({"EXACT": "0", "FAST": "1"}, "", "11011"),
        ({"MEMORY": "0"}, "", "10100"),
        ({"FIX": "0"}, "", "01100"),
        ({"GENERATION": "1", "ADAPTERS": "1"}, "", ON),
        ({"GENERATION": "0", "FAST": "1"}, "", "11000"),
        ({"ONE_ROW_4BIT": "1"}, "", "11110"),
        ({"ONE_ROW_LORA": "force"}, "", ASKED),
        ({"ONE_ROW_4BIT": "0", "FAST": "1"}, "", ON),
        ({"": "0", "FAST": "1"}, "install('fast')", OFF),
        ({"": "1"}, "", ON),
        ({"": "only:generation,adapters"}, "", "00100"),
        ({"": "only:generation,adapters"}, "install('fast')", "00111"),
        ({"": "only:speed"}, "", "00111"),
        ({"": "only:exact"}, "", "00100"),
        ({"": "only:fast"}, "", "00011"),
        ({"": "only:one_row_lora"}, "", "00011"),
        ({"": "only:loss_memory", "FAST": "1"}, "", "01000"),
    ],
)  # fmt: skip
def test_what_rounds_differently_is_asked_for(variables, calls, states):
    code = f"from gemma4_compat import *; {calls}\n" + (
        f"print(''.join(str(int(status()[name].state == 'armed')) for name in {PLAIN + FAST}))"
    )
    environ = {f"GEMMA4_COMPAT_{name}".rstrip("_"): value for name, value in variables.items()}
    result = python("-c", code, **environ)
    assert (result.stdout.strip(), result.stderr) == (states, "")


def test_fast_patches_that_are_uninstalled_are_optional_again():
    import gemma4_compat

    before = gemma4_compat.uninstall("fast")["one_row_4bit"]
    gemma4_compat.install("fast")
    status = gemma4_compat.uninstall("fast")
    assert status["one_row_4bit"] == before
    assert before.state != "disabled"
    assert "one_row" not in str(status)


def test_a_patch_of_an_earlier_checkout():
    [line] = python(
        "-c", "import gemma4_compat", GEMMA4_COMPAT_HOOK_REMOVAL="0"
    ).stderr.splitlines()
    assert "unknown environment variable GEMMA4_COMPAT_HOOK_REMOVAL has no effect" in line


def test_names_of_groups():
    import gemma4_compat

    with gemma4_compat.disabled("speed", "adapters") as status:
        assert status["captured_decoding"].state is gemma4_compat.State.DISABLED
        assert status["peft_redispatch"].state is gemma4_compat.State.DISABLED
        assert status["quant_state_offload"].state is not gemma4_compat.State.DISABLED
    with pytest.raises(ValueError, match="sped"):
        gemma4_compat.uninstall("sped")


def test_a_legacy_patch_answers_to_its_former_topic():
    """So a topic's name, in a call or a variable, does not turn on what it turned off before."""
    from gemma4_compat.patches import LEGACY, TOPICS, groups, topics

    modules = {module.PATCH.name for module in topics()["legacy"]}
    assert modules == {*groups()["legacy"]} == LEGACY.keys()
    for name, (topic, until) in LEGACY.items():
        assert [each for each in TOPICS if name in groups()[each]] == [topic, "legacy"]
        date.fromisoformat(until)


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("GEMMA4_COMPAT_PEFT_REDISPACH", "did you mean GEMMA4_COMPAT_PEFT_REDISPATCH?"),
        ("GEMMA4_COMPAT_DISBALE", "GEMMA4_COMPAT=0 switches all patches off"),
        ("GEMMA4COMPAT", "write GEMMA4_COMPAT"),
        ("GEMMA4COMPAT_STRICT", "write GEMMA4_COMPAT_STRICT"),
    ],
)
def test_a_switch_that_has_no_effect_is_one_short_line(variable, hint):
    (line,) = python("-c", "import gemma4_compat", **{variable: "0"}).stderr.splitlines()
    assert f"environment variable {variable} has no effect: " in line
    assert hint in line
    assert len(line) < 160


def test_environment_variables_of_others():
    assert python("-c", "import gemma4_compat", GEMMA4_COMPATIBLE="0").stderr == ""


def test_patches_of_other_packages(tmp_path, monkeypatch, caplog):
    """An installed package names a patch in the entry-point group; another one has a mistake."""
    import sys

    from gemma4_compat import patches

    (tmp_path / "theirs.py").write_text(
        'from gemma4_compat.engine import Patch\nPATCH = Patch("theirs", symptom="", affects=())\n'
    )
    metadata = tmp_path / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[gemma4_compat.patches]\ntheirs = theirs:PATCH\nwrong = theirs:Patch\ngone = absent:P\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    ours = {patch.name for patch in patches.load()} - {"theirs"}
    assert {patch.name for patch in patches.load()} == {*ours, "theirs"}
    assert "the patch wrong is left out: theirs:Patch is no Patch" in caplog.text
    assert "the patch gone is left out: No module named 'absent'" in caplog.text
    sys.modules.pop("theirs")
