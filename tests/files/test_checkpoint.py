"""Headers, indices and configs: read where they are whole, and named where they are not."""

from __future__ import annotations

import json
import math
import os
import re
import struct

import pytest
from safetensors import SafetensorError, safe_open

from gemma4_compat.errors import InputError
from gemma4_compat.files import checkpoint as files
from gemma4_compat.results import text
from tests import damage

DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "I64": 8}


def read_tensors(folder):
    """Every tensor of a checkpoint's weights, by name."""
    headers = files.weight_headers(folder)
    return {name: entry for header in headers for name, entry in header.items()}


@pytest.fixture(scope="module")
def sharded_dir(model_dir, tmp_path_factory):
    from tests.support import load_model

    folder = tmp_path_factory.mktemp("sharded")
    load_model(model_dir).save_pretrained(folder, max_shard_size="500KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    return folder


def copy(folder, to):
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def header_only(file):
    """The same file with a hole in place of its tensors."""
    raw = file.read_bytes()
    file.write_bytes(raw[: 8 + struct.unpack("<Q", raw[:8])[0]])
    os.truncate(file, len(raw))


def as_safetensors_says(file):
    with safe_open(file, "pt") as opened:
        return {
            name: (opened.get_slice(name).get_dtype(), tuple(opened.get_slice(name).get_shape()))
            for name in opened.keys()  # noqa: SIM118
        }


# -- what is there --------------------------------------------------------------------------------


def test_header_is_what_safetensors_reads(model_dir):
    header = files.read_header(model_dir / "model.safetensors")
    found = {e.name: (e.dtype, e.shape) for e in header.values()}
    assert found == as_safetensors_says(model_dir / "model.safetensors")
    assert all(e.bytes == e.numel * DTYPES[e.dtype] for e in header.values())


def test_shards(sharded_dir):
    found = read_tensors(sharded_dir)
    expected = {}
    for file in sharded_dir.glob("*.safetensors"):
        expected |= as_safetensors_says(file)
    assert {name: (e.dtype, e.shape) for name, e in found.items()} == expected
    assert len(files.weight_headers(sharded_dir)) == len(list(sharded_dir.glob("*.safetensors")))


def test_quantized_checkpoint(model_dir, tmp_path):
    pytest.importorskip("bitsandbytes")
    from tests.support import load_model

    load_model(model_dir, "nf4").save_pretrained(tmp_path)
    found = read_tensors(tmp_path)
    quantized = [name for name in found if name.endswith("q_proj.weight.absmax")]
    assert quantized
    for name in quantized:
        assert found[name.removesuffix(".absmax")].dtype == "U8"


def test_no_tensor_data_is_read(sharded_dir, tmp_path):
    whole = read_tensors(sharded_dir)
    copy(sharded_dir, tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        header_only(file)
    cut = read_tensors(tmp_path)
    assert {n: (e.dtype, e.shape, e.bytes) for n, e in cut.items()} == {
        n: (e.dtype, e.shape, e.bytes) for n, e in whole.items()
    }


# -- what is not ----------------------------------------------------------------------------------


def refused(call, path, message):
    """The error names the file in one line."""
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        call(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", damage.SAFETENSORS)
def test_damaged_header(adapter_dir, tmp_path, kind):
    copy(adapter_dir, tmp_path)
    file = tmp_path / files.ADAPTER_WEIGHTS
    change, message = damage.SAFETENSORS[kind]
    change(file)
    assert str(file) in refused(files.read_header, file, message)
    assert str(file) in refused(files.adapter_header, tmp_path, message)


@pytest.mark.parametrize("kind", damage.SAFETENSORS)
def test_damaged_shard(sharded_dir, tmp_path, kind):
    copy(sharded_dir, tmp_path)
    file = sorted(tmp_path.glob("model-*"))[1]
    change, message = damage.SAFETENSORS[kind]
    change(file)
    assert str(file) in refused(files.weight_headers, tmp_path, message)


def test_header_is_refused_as_safetensors_refuses_it(adapter_dir, tmp_path):
    """What is damaged in its header, and complete, is not loaded by safetensors either."""
    for kind in damage.SAFETENSORS.keys() - damage.ANY.keys():
        folder = tmp_path / kind
        folder.mkdir()
        file = copy(adapter_dir, folder) / files.ADAPTER_WEIGHTS
        damage.SAFETENSORS[kind][0](file)
        with pytest.raises(SafetensorError), safe_open(file, "pt"):
            pass


def test_cut_off_data(adapter_dir, tmp_path):
    file = copy(adapter_dir, tmp_path) / files.ADAPTER_WEIGHTS
    change, message = damage.CUT_OFF
    change(file)
    assert str(file) in refused(files.read_header, file, message)
    assert str(file) in refused(files.adapter_header, tmp_path, message)


@pytest.mark.parametrize("kind", damage.JSON)
@pytest.mark.parametrize(
    ("read", "name"),
    [
        (files.read_config, files.CONFIG),
        (files.weight_headers, files.INDEX),
        (files.read_adapter_config, files.ADAPTER_CONFIG),
        (files.read_json, "any.json"),
    ],
)
def test_damaged_json(sharded_dir, adapter_dir, tmp_path, read, name, kind):
    copy(sharded_dir, tmp_path)
    copy(adapter_dir, tmp_path)
    file = tmp_path / name
    if not file.exists():
        file.write_text("{}")
    change, message = damage.JSON[kind]
    change(file)
    path = tmp_path if read in (files.read_config, files.weight_headers) else file
    assert str(file) in refused(read, path, message)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("peft_type", 4), ("r", "8"), ("r", 8.5), ("target_modules", 4),
        ("target_modules", ["q_proj", 4]), ("modules_to_save", "lm_head"),
        ("rank_pattern", {"q_proj": "8"}), ("layers_to_transform", ["1"]), ("lora_alpha", "8"),
        ("lora_alpha", math.nan), ("lora_alpha", -math.inf),
        ("alpha_pattern", {"q_proj": math.nan}),
    ],
)  # fmt: skip
def test_types_in_an_adapter_config(adapter_dir, tmp_path, entry, value):
    file = tmp_path / files.ADAPTER_CONFIG
    config = json.loads((adapter_dir / files.ADAPTER_CONFIG).read_text())
    file.write_text(json.dumps(config | {entry: value}))
    shown = json.dumps(value)
    refused(files.read_adapter_config, file, f"{file}: {entry} cannot be {shown}")
    file.write_text(json.dumps(config | {entry: None}))
    assert files.read_adapter_config(file)[entry] is None


def test_adapter_configs_of_every_method(tmp_path):
    """What PEFT itself writes passes, for every method of the installed release."""
    peft = pytest.importorskip("peft")
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    written = 0
    for method, config in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        folder = tmp_path / str(method.value)
        try:
            config().save_pretrained(folder)
        except (TypeError, ValueError, ImportError):  # some need arguments, or a library
            continue
        found = files.read_adapter_config(folder / files.ADAPTER_CONFIG)
        assert found["peft_type"] == method.value
        written += 1
    assert written > 15
    peft.AdaLoraConfig(
        total_step=9, rank_pattern={"q_proj": [True, False]}, target_modules=["q_proj"]
    ).save_pretrained(tmp_path)
    files.read_adapter_config(tmp_path / files.ADAPTER_CONFIG)


def test_config_without_a_model(tmp_path):
    (tmp_path / files.CONFIG).write_text("{}")
    refused(files.read_config, tmp_path, f"{tmp_path / files.CONFIG}: not a model's config")


def test_no_permission(model_dir, tmp_path):
    """As another user; see "unreadable" in ``tests/damage.py`` for what root cannot read."""
    copy(model_dir, tmp_path)
    (tmp_path / files.CONFIG).chmod(0)
    if os.access(tmp_path / files.CONFIG, os.R_OK):
        pytest.skip("this user reads every file")
    refused(files.read_config, tmp_path, f"{files.CONFIG}: cannot be read: Permission denied")


def test_missing(tmp_path, adapter_dir):
    for call, path, message in (
        (files.read_config, tmp_path / "nowhere", "no such folder"),
        (files.read_config, tmp_path, "no config.json"),
        (files.read_config, adapter_dir, r"no config.json \(an adapter's folder\?\)"),
        (files.read_config, adapter_dir / "adapter_config.json", "not a folder"),
        (files.read_header, tmp_path / "nowhere", "no such file"),
        (files.weight_headers, tmp_path, "no model.safetensors and no model.safetensors.index"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            call(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x" * 300, "cannot be read: File name too long"),
        ("dangling", "no such folder"),
        ("file", "not a folder"),
        ("file/in", "no such folder"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_what_is_no_folder(tmp_path, path, message):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for read in (files.existing_folder, files.read_config, files.weight_headers):
        refused(read, tmp_path / path, message)


def with_index(folder, weight_map):
    (folder / files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_damaged_index(sharded_dir, tmp_path):
    copy(sharded_dir, tmp_path)
    index = tmp_path / files.INDEX
    places = json.loads(index.read_text())["weight_map"]
    first, *_, last = sorted(set(places.values()))
    name = next(name for name, shard in places.items() if shard == last)
    for weight_map, message in (
        (None, f"{index}: no weight_map"),
        ([1], f"{index}: no weight_map"),
        (places | {name: 4}, f"{index}: no weight_map"),
        (places | {name: [first]}, f"{index}: no weight_map"),
        (places | {name: ""}, f"{tmp_path}: cannot be read: Is a directory"),
    ):
        refused(read_tensors, with_index(tmp_path, weight_map), message)
    with_index(tmp_path, places)
    (tmp_path / first).unlink()
    refused(read_tensors, tmp_path, f"{first}: no such file")


def test_shards_as_the_hub_keeps_them(sharded_dir, tmp_path):
    """Its cache is links to files elsewhere; folders inside are fine as well."""
    (tmp_path / "sub").mkdir()
    places = json.loads((sharded_dir / files.INDEX).read_text())["weight_map"]
    for shard in set(places.values()):
        (tmp_path / "sub" / shard).symlink_to(sharded_dir / shard)
    with_index(tmp_path, {name: f"sub/{shard}" for name, shard in places.items()})
    found, whole = read_tensors(tmp_path), read_tensors(sharded_dir)
    assert {n: (e.dtype, e.shape) for n, e in found.items()} == {
        n: (e.dtype, e.shape) for n, e in whole.items()
    }


# -- text and imports -----------------------------------------------------------------------------


def test_sizes():
    assert [text.size(n) for n in (0, 1023, 1024, 3 * 2**19, 2**30 + 2**28)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "1.25 GiB",
    ]  # fmt: skip


def test_table_fits_80_columns():
    rows = [("model." + "x" * 60, 12345, "words " * 30), ("b", 1, "")]
    printed = text.table(rows, ("name", "number", "why"), right=(1,)).splitlines()
    assert max(map(len, printed)) <= 80
    # A long name stays whole, so that it can be copied; the last cells are below.
    assert [line.split() for line in printed[:2]] == [["name", "number"], ["why"]]
    assert printed[2].split() == [rows[0][0], "12345"]
    assert printed[-1].split() == ["b", "1"]
    assert "".join(printed).count("words") == 30


def test_cells_of_a_narrow_table_are_wrapped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [("the KV cache of 32,768 tokens", "1.25 GiB", "7.00 GiB"), ("b", "-", "1 B")]
    printed = text.table(rows, ("", "GPU 0", "CPU"), right=(1, 2)).splitlines()
    assert max(map(len, printed)) <= 40
    assert " ".join(line[:18].strip() for line in printed[1:3]) == "the KV cache of 32,768 tokens"
    assert printed[1].endswith("1.25 GiB  7.00 GiB")
