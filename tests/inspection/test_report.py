"""``gemma4-compat report``: complete, and without private data."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys

import pytest

import gemma4_compat
from gemma4_compat.errors import InputError
from gemma4_compat.inspection.report import REPORTED, Report, _Private, build_report
from gemma4_compat.patches import load
from tests.support import run_command

pytest.importorskip("bitsandbytes")

MAP = {"model.vision_tower": "cpu", "model.multi_modal_projector": "cpu", "": 0}


@pytest.fixture(autouse=True)
def _everything_armed(pristine):
    pass


def run(*arguments):
    return run_command("report", *arguments)


# -- complete -------------------------------------------------------------------------------------


def test_system_libraries_and_patches():
    found = build_report()
    assert platform.system() in found.system["OS"]
    assert found.system["Python"].startswith(platform.python_version())
    assert found.libraries["gemma4_compat"] == gemma4_compat.__version__
    for name in ("transformers", "accelerate", "peft", "bitsandbytes", "tokenizers", "safetensors"):
        assert found.libraries[name] == importlib.metadata.version(name)
    assert set(found.patches) == {patch.name for patch in load()}
    text = str(found)
    for name in [*found.patches, *found.libraries]:
        assert name in text
    assert "armed" not in {patch["state"] for patch in found.patches.values()}
    assert found.model is found.device_map is found.adapter is None


def test_a_gpu_is_named():
    import torch

    found = build_report()
    gpus = [name for name in found.system if name.startswith("GPU ")]
    assert len(gpus) == torch.cuda.device_count()
    if not gpus:
        assert "- GPU: none that PyTorch sees" in str(found)


@pytest.mark.parametrize("name", ["OPENAI_KEY", "WANDB_PASS", "HTTP_AUTH", "SENTRY_DSN"])
def test_values_of_variables_named_like_secrets(model_dir, tmp_path, monkeypatch, name):
    """Secrets are removed wherever they are, such as in the name of the model's folder."""
    value = "sk-0123456789abcdef"
    monkeypatch.setenv(name, value)
    folder = tmp_path / f"model-{value}"
    shutil.copytree(model_dir, folder)
    found = build_report(folder)
    assert value not in str(found)
    assert value not in json.dumps(found.as_dict())


def test_model_map_and_adapter(model_dir, adapter_dir):
    found = build_report(model_dir, adapter_dir, MAP)
    assert "Gemma4ForConditionalGeneration" in found.model["class"]
    assert found.model["layers"] == "6, 3 of them share keys and values"
    assert " in 1 file, " in found.model["weights"]
    assert "cut off" not in str(found)
    assert found.device_map["unknown"] == {"model.multi_modal_projector": "model.embed_vision"}
    text = str(found)
    assert "model.multi_modal_projector is not a module of this model" in text
    for heading in ("### System", "### Patches", "### Model: ", "### Device map", "### Adapter"):
        assert heading in text
    assert text.count("```") == 4
    assert found.adapter["tensors"] == 112


def test_cut_off_weights(model_dir, tmp_path):
    shutil.copy(model_dir / "config.json", tmp_path)
    whole = (model_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(InputError, match="cut off, 1000 bytes are missing"):
        build_report(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "no safetensors files in the folder" in str(build_report(tmp_path))


# -- nothing private ------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="HOME is not where the home folder is")
def test_nothing_private(model_dir, adapter_dir, tmp_path):
    """The report contains no user, home folder, host, token or folder name."""
    home = tmp_path / "home" / "Jane Qux-Smith"
    projects = home / "top-secret-project"
    model = projects / "gemma-of-janequx"
    shutil.copytree(model_dir, model)
    lora = home / "loras" / "customer-acme" / "my-lora"
    shutil.copytree(adapter_dir, lora)
    config = json.loads((lora / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(projects / "elsewhere" / "base")
    config["revision"] = "hf_abcdefghijklmnopqrstuvwx"
    (lora / "adapter_config.json").write_text(json.dumps(config))
    token = "s3cr3t-t0ken-value"
    code = (
        "import platform, sys\n"
        "platform.node = lambda: 'janes-laptop.corp.example'\n"
        "import gemma4_compat\n"
        "from gemma4_compat.inspection.report import build_report\n"
        "import json\n"
        f"found = build_report({str(model)!r}, {str(lora)!r}, {MAP!r})\n"
        "print(json.dumps(found.as_dict())); print(found)\n"
    )
    names = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={
            **names,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HOME": str(home),
            "USER": "janequx",
            "LOGNAME": "janequx",
            "HOSTNAME": "janes-laptop",
            "HF_TOKEN": token,
            "MY_API_KEY": "0123456789abcdef",
            "GEMMA4_COMPAT_PEFT_REDISPATCH": "0",
        },
        cwd=projects,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    private = (
        "jane", "qux", "smith", "secret-project", "acme", "laptop", "corp.example", "elsewhere",
        str(tmp_path), "/home", token, "0123456789abcdef", "hf_abc",
    )  # fmt: skip
    for text in private:
        assert text.lower() not in ran.stdout.lower(), text
    assert "gemma-of-<user>" in ran.stdout
    assert "my-lora/adapter_model.safetensors" in ran.stdout
    assert "peft_redispatch" in ran.stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("in /data/models/x/config.json: bad", "in config.json: bad"),
        ("(/data/models/x)", "(x)"),
        (r"C:\Users\Jane Doe\models\gemma", "gemma"),
        (r"\\server\share\gemma", "gemma"),
        (r"C:\Users\Jane Doe\my models\gemma 4\config.json: not JSON", "config.json: not JSON"),
        (r"no such file: 'C:\\Users\\Jane Doe\\my models\\gemma'", "no such file: 'gemma'"),
        (r"no such file: '\\\\server\\Jane Doe\\gemma'", "no such file: 'gemma'"),
        ("../up/there", "there"),
        ("~/models/gemma", "gemma"),
        ("/data/my models/the base", "the base"),
        ("file:///data/models/gemma", "gemma"),
        ("runs/customer/gemma/", "gemma"),
        ("//server/share/gemma", "gemma"),
        # not paths
        ("https://github.com/huggingface/peft/issues/3129", None),
        ("google/gemma-4-E4B-it", None),
        ("4/8-bit and CPU/GPU", None),
        (r".*\.layers\.(\d+)\.(q|o)_proj", None),
        (r"(?:model\.language_model\.layers\.\d+)", None),
        ("affects transformers>=5.6,<5.13; found transformers 5.6.2", None),
    ],
)
def test_paths(text, expected):
    assert _Private([]).text(text) == (text if expected is None else expected)


def test_a_name_inside_of_a_word_stays(monkeypatch):
    monkeypatch.setenv("USER", "ann")
    clean = _Private([]).text
    assert clean("ann's channel, ann-lora, Ann") == "<user>'s channel, <user>-lora, <user>"
    monkeypatch.setenv("USER", "root")
    assert _Private([]).text("root_device_map and root") == "root_device_map and root"


def test_keys_and_numbers_stay():
    found = {"a": [1, None, True, 0.5], 3: ("/x/y/z",)}
    assert _Private([]).clean(found) == {"a": [1, None, True, 0.5], 3: ("z",)}


def test_the_current_folder_is_no_dot(model_dir, monkeypatch):
    monkeypatch.chdir(model_dir)
    found = build_report(".")
    assert found.model["name"] == model_dir.name
    assert found.libraries["gemma4_compat"] == gemma4_compat.__version__


# -- the command ----------------------------------------------------------------------------------


def test_command(model_dir, adapter_dir, capsys):
    arguments = ["--model", model_dir, "--adapter", adapter_dir, "--map", json.dumps(MAP)]
    assert run(*arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("### System\n")
    assert printed.err == ""
    assert str(model_dir.parent) not in printed.out
    assert run(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(build_report(), Report)
    assert set(found) == {
        "system", "libraries", "state", "patches", "model", "device_map", "adapter",
    }  # fmt: skip
    assert set(found["libraries"]) == {"gemma4_compat", *REPORTED}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere: no such folder"),
        (["--adapter", "nowhere"], "nowhere"),
        (["--model", "EMPTY"], "no config.json"),
        (["--map", '{"": 0}'], "--map is checked against a model"),
        (["--model", "MODEL", "--map", "{"], "--map: '{' is not a device map"),
        (["--model", "DAMAGED"], "model.safetensors: "),
    ],
)
def test_arguments_that_cannot_work(model_dir, tmp_path, arguments, message, capsys):
    damaged = tmp_path / "damaged"
    (tmp_path / "empty").mkdir()
    damaged.mkdir()
    shutil.copy(model_dir / "config.json", damaged)
    (damaged / "model.safetensors").write_bytes(b"\x00\x01")
    places = {"EMPTY": tmp_path / "empty", "MODEL": model_dir, "DAMAGED": damaged}
    assert run(*(places.get(each, each) for each in arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("gemma4-compat report: ")
    assert message in line


def test_errors_from_python(model_dir):
    with pytest.raises(InputError, match="no such folder"):
        build_report("nowhere")
    with pytest.raises(InputError, match="checked against a model"):
        build_report(device_map=MAP)


def test_links_in_a_circle(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(InputError, match="cannot be read"):
        build_report(tmp_path / "a")
    with pytest.raises(InputError, match="cannot be read"):
        build_report(adapter=tmp_path / "a")
