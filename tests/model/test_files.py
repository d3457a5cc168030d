"""Headers, indices and configs: read where they are whole, and named where they are not."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest
from safetensors import safe_open

from gemma4_compat.cli import _colour
from gemma4_compat.errors import InputError
from gemma4_compat.inspection import _text
from gemma4_compat.model import files

DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "I64": 8}


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
    """The same file without a byte of its tensors."""
    raw = file.read_bytes()
    file.write_bytes(raw[: 8 + struct.unpack("<Q", raw[:8])[0]])


def as_safetensors_says(file):
    with safe_open(file, "pt") as opened:
        return {
            name: (opened.get_slice(name).get_dtype(), tuple(opened.get_slice(name).get_shape()))
            for name in opened.keys()  # noqa: SIM118
        }


# -- what is there --------------------------------------------------------------------------------


def test_header_is_what_safetensors_reads(model_dir):
    header = files.read_header(model_dir / "model.safetensors")
    found = {e.name: (e.dtype, e.shape) for e in header.tensors.values()}
    assert found == as_safetensors_says(model_dir / "model.safetensors")
    assert all(e.bytes == e.numel * DTYPES[e.dtype] for e in header.tensors.values())
    assert header.metadata == {"format": "pt"}
    assert header.missing == 0


def test_shards(sharded_dir):
    found = files.read_tensors(sharded_dir)
    expected = {}
    for file in sharded_dir.glob("*.safetensors"):
        expected |= as_safetensors_says(file)
    assert {name: (e.dtype, e.shape) for name, e in found.items()} == expected
    assert len(files.weight_headers(sharded_dir)) == len(list(sharded_dir.glob("*.safetensors")))


def test_quantised_checkpoint(model_dir, tmp_path):
    pytest.importorskip("bitsandbytes")
    from tests.support import load_model

    load_model(model_dir, "nf4").save_pretrained(tmp_path)
    found = files.read_tensors(tmp_path)
    quantised = [name for name in found if name.endswith("q_proj.weight.absmax")]
    assert quantised
    for name in quantised:
        assert found[name.removesuffix(".absmax")].dtype == "U8"


def test_no_tensor_data_is_read(sharded_dir, tmp_path):
    whole = files.read_tensors(sharded_dir)
    copy(sharded_dir, tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        header_only(file)
    cut = files.read_tensors(tmp_path)
    assert {n: (e.dtype, e.shape, e.bytes) for n, e in cut.items()} == {
        n: (e.dtype, e.shape, e.bytes) for n, e in whole.items()
    }
    headers = files.weight_headers(tmp_path)
    assert sum(h.missing for h in headers) == sum(e.bytes for e in whole.values())


# -- what is not ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"cut off in the safetensors header \(0 bytes\)"),
        (b"\x10", "cut off in the safetensors header"),
        (struct.pack("<Q", 500) + b'{"a": {"dtype"', "cut off in the safetensors header"),
        (b"PK\x03\x04 a pickle, not this " * 3, "not a safetensors file"),
        (struct.pack("<Q", 7) + b"{'bad'}", "header is damaged"),
        (struct.pack("<Q", 4) + b"[[]]", "header is damaged"),
        (struct.pack("<Q", 10) + b'{"a": "b"}', "header is damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
    ],
)
def test_damaged_header(tmp_path, content, message):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        files.read_header(file)
    assert str(file) in str(caught.value)


def test_header_that_contradicts_itself(tmp_path):
    raw = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(InputError, match="header is damaged"):
        files.read_header(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": ', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b"{}", "no model_type"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    ],
)
def test_damaged_config(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        files.read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


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
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match=r"only pytorch_model\.bin"):
        files.weight_headers(tmp_path)


def test_damaged_index(sharded_dir, tmp_path):
    copy(sharded_dir, tmp_path)
    index = tmp_path / files.INDEX
    whole = json.loads(index.read_text())
    first = min(whole["weight_map"].values())
    index.write_text(json.dumps(whole | {"weight_map": {**whole["weight_map"], "more": first}}))
    with pytest.raises(InputError, match=rf"{first}: no tensor more"):
        files.read_tensors(tmp_path)
    index.write_text("{}")
    with pytest.raises(InputError, match="no weight_map"):
        files.read_tensors(tmp_path)
    index.write_text(json.dumps(whole))
    (tmp_path / first).unlink()
    with pytest.raises(InputError, match=rf"{first}: no such file .a shard that"):
        files.read_tensors(tmp_path)


# -- text and imports -----------------------------------------------------------------------------


def test_sizes():
    assert [_text.size(n) for n in (0, 1023, 1024, 3 * 2**19, 2**30 + 2**28)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "1.25 GiB",
    ]  # fmt: skip


def test_table_fits_80_columns():
    rows = [("model." + "x" * 60, 12345, "words " * 30), ("b", 1, "")]
    printed = _text.table(rows, ("name", "number", "why"), right=(1,)).splitlines()
    assert max(map(len, printed)) <= 80
    assert printed[0].split() == ["name", "number", "why"]
    assert printed[1].startswith("model.x")
    assert "..." in printed[1]
    assert printed[-1].split() == ["b", "1"]
    assert "".join(printed).count("words") == 30


def test_colour_only_on_a_terminal(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert _colour.coloured("fits", "green", Terminal()) == "\033[32mfits\033[0m"
    assert _colour.coloured("fits", "green") == "fits"  # pytest's stdout is none
    monkeypatch.setenv("NO_COLOR", "1")
    assert _colour.coloured("fits", "green", Terminal()) == "fits"


def test_imports_nothing_heavy(adapter_dir):
    """Nor does reading an adapter without a model."""
    code = (
        "import sys, gemma4_compat.inspection as inspection\n"
        "assert not {'inspect_adapter', 'scan_targets'} - set(dir(inspection))\n"
        "assert 'gemma4_compat.inspection.targets' not in sys.modules\n"
        f"assert inspection.inspect_adapter({str(adapter_dir)!r}).tensors\n"
        "heavy = {'torch', 'transformers', 'peft', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute():
    import gemma4_compat.inspection as inspection

    with pytest.raises(AttributeError, match="no attribute 'inspect_all'"):
        inspection.inspect_all  # noqa: B018
