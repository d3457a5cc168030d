"""Hub ids in place of folders, against a local server that answers as the Hub does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gemma4_compat import InputError
from gemma4_compat.files import checkpoint as files
from gemma4_compat.files import hub
from gemma4_compat.inspection import inspect_adapter
from gemma4_compat.merging.arguments import locate
from tests.hub_server import serving
from tests.support import run_command

MODEL, ADAPTER = "google/gemma-tiny", "someone/lora.v1"
CONFIG = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"]}
#: what huggingface_hub fetches of a safetensors file
FIRST_BYTES = 100_001
SHARDS = ("model-1.safetensors", "model-2.safetensors")


def safetensors(*names, values=64):
    """A safetensors file of bfloat16 tensors."""
    size = 2 * values
    described = {
        name: {"dtype": "BF16", "shape": [values], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    header = json.dumps(described).encode()
    head = len(header).to_bytes(8, "little") + header
    return head + bytes(size * len(names))


LORA = safetensors(
    "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight",
    "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_B.weight",
)
ADAPTER_FILES = {
    "adapter_config.json": json.dumps({"peft_type": "LORA", "r": 1}).encode(),
    "adapter_model.safetensors": LORA,
}
PARTS = [safetensors(name, values=100_000) for name in ("first", "second")]
MODEL_FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors.index.json": json.dumps(
        {"weight_map": dict(zip(("first", "second"), SHARDS, strict=True))}
    ).encode(),
    **dict(zip(SHARDS, PARTS, strict=True)),
}


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


@pytest.fixture
def on_hub(server, tmp_path, monkeypatch):
    """The server as the Hub of this process, with an empty cache, in an empty folder."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    server.clear()
    server.add(MODEL, MODEL_FILES)
    server.add(ADAPTER, ADAPTER_FILES)
    return server


@pytest.fixture
def offline(monkeypatch):
    """A function that switches the network off, by the switch or by an unreachable server."""
    from huggingface_hub import constants

    def switch(how):
        if how == "switch":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        else:
            template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return switch


def refusal(read, *arguments):
    with pytest.raises(InputError) as caught:
        read(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- what is a Hub id ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "id", "revision"),
    [
        ("google/gemma-4-E4B-it", "google/gemma-4-E4B-it", None),
        ("google/gemma-4-E4B-it@main", "google/gemma-4-E4B-it", "main"),
        ("google/gemma-4-E4B-it@refs/pr/7", "google/gemma-4-E4B-it", "refs/pr/7"),
        ("a/b_c.d", "a/b_c.d", None),
    ],
)
def test_hub_ids(text, id, revision):
    found = hub.repository(text)
    assert (found.id, found.revision, str(found)) == (id, revision, text)
    assert hub.id_and_revision(text) == (id, revision)


@pytest.mark.parametrize(
    "text",
    [
        "gemma-4-E4B-it",  # without a namespace: only models of 2019 have such ids
        "/models/gemma", "./gemma", "../gemma", "~/gemma", ".cache/gemma", "models/gemma/", "a/b/c",
        r"C:\models\gemma", "C:/gemma", r"models\gemma", r"\\server\gemma", "models/my gemma",
        "lora/adapter_model.safetensors", "gemma/config.json", "a/b@", "a/b@x@y", r"a/b@x\y",
        "a//b",
        "a/..", "a/b..c", "a/b--c", "a/-b", "a/b-", "a/ä", "", "/", "a/" + "b" * 97, "a/b\n",
    ],
)  # fmt: skip
def test_what_cannot_be_a_hub_id(text, on_hub):
    assert hub.repository(text) is None
    assert hub.id_and_revision(text) == (text, None)
    assert "no such folder" in refusal(files.read_config, text) or text in ("", "/", "a/..")
    assert on_hub.tokens == []


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_an_existing_path_wins(kind, on_hub):
    path = Path(MODEL)
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "local"}))
        assert files.read_config(MODEL)["model_type"] == "local"
    elif kind == "file":
        path.touch()
        assert refusal(files.read_config, MODEL) == f"{MODEL}: not a folder"
    else:
        path.symlink_to("nowhere")
        assert refusal(files.read_config, MODEL) == f"{MODEL}: no such folder"
    assert on_hub.tokens == []


# -- what is read -------------------------------------------------------------------------------


def test_only_configs_and_headers_are_fetched(on_hub):
    model = files.located(MODEL)
    assert files.read_config(model) == CONFIG
    headers = files.weight_headers(model)
    files_of = [str(entry.file) for header in headers for entry in header.values()]
    assert files_of == [f"{MODEL}/{shard}" for shard in SHARDS]
    assert [list(header) for header in headers] == [["first"], ["second"]]
    assert all(on_hub.bytes_of(shard) <= FIRST_BYTES for shard in SHARDS)
    assert all(len(MODEL_FILES[shard]) > FIRST_BYTES for shard in SHARDS)
    fetched = {name for method, name, count in on_hub.sent if count}
    assert fetched == {"config.json", "model.safetensors.index.json", *SHARDS}


@pytest.mark.parametrize(
    "content", [b"abc", b"version https://git-lfs.github.com/spec/v1\n", LORA[:20]]
)
def test_damaged_header(content, on_hub):
    on_hub.add(ADAPTER, ADAPTER_FILES | {"adapter_model.safetensors": content})
    damaged = "adapter_model.safetensors is not a safetensors file, or its header is damaged"
    assert refusal(files.adapter_header, ADAPTER) == f"{ADAPTER}: {damaged}"


def test_adapter(on_hub):
    found = inspect_adapter(ADAPTER)
    assert (found.kind, found.tensors, found.rank) == ("LoRA", 2, 1)
    assert found.file == f"{ADAPTER}/adapter_model.safetensors"
    assert 0 < on_hub.bytes_of("adapter_model.safetensors") <= len(LORA)


def test_a_cached_file_is_read_from_the_cache(on_hub):
    from huggingface_hub import hf_hub_download

    hf_hub_download(ADAPTER, "adapter_model.safetensors")
    on_hub.sent.clear()
    assert inspect_adapter(ADAPTER).tensors == 2
    assert on_hub.bytes_of("adapter_model.safetensors") == 0


def test_revisions(on_hub):
    for revision in ("v2", "refs/pr/1"):
        config = json.dumps(CONFIG | {"transformers_version": revision}).encode()
        on_hub.add(MODEL, MODEL_FILES | {"config.json": config}, revision)
        found = files.read_config(f"{MODEL}@{revision}")
        assert found["transformers_version"] == revision
    commit = on_hub.commit(MODEL, "v2")
    assert files.read_config(f"{MODEL}@{commit}")["transformers_version"] == "v2"
    assert "transformers_version" not in files.read_config(MODEL)
    assert (
        refusal(files.read_config, f"{MODEL}@v3") == f"{MODEL}@v3: the Hub has no revision v3 of it"
    )


def test_files_of_one_commit(on_hub):
    """A push between two reads does not mix the files of two commits; a later read sees it."""
    model = files.located(MODEL)
    files.read_config(model)
    changed = safetensors("first", "second", "third")
    config = MODEL_FILES["config.json"]
    on_hub.add(MODEL, {"config.json": config, "model.safetensors": changed})
    assert len(files.weight_headers(model)) == 2
    [header] = files.weight_headers(MODEL)
    assert list(header) == ["first", "second", "third"]


def test_token(on_hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    files.adapter_header(ADAPTER)
    assert set(on_hub.tokens) == {"Bearer hf_secret"}
    assert set(on_hub.storage_tokens) == {None}  # it is not sent to another host


def test_merge_downloads_the_whole_repository(on_hub):
    on_hub.add(MODEL, MODEL_FILES | {"README.md": b"text"}, "v2")
    folder = locate(f"{MODEL}@v2")
    assert sorted(os.listdir(folder)) == sorted(MODEL_FILES)
    assert (folder / SHARDS[0]).read_bytes() == PARTS[0]
    assert "not found on the Hub" in refusal(locate, "google/typo")
    assert refusal(locate, "typo") == "typo: no such folder"


# -- without network ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["switch", "no network"])
def test_offline(how, on_hub, offline):
    files.read_config(MODEL)
    inspect_adapter(ADAPTER)
    offline(how)
    assert files.read_config(MODEL) == CONFIG  # from the cache
    missing = {
        "model.safetensors": refusal(files.weight_headers, MODEL),  # half a cache
        "config.json": refusal(files.read_config, "google/other"),  # nothing
        "adapter_model.safetensors": refusal(inspect_adapter, ADAPTER),
    }
    for name, message in missing.items():
        assert f"the cache of the Hub has no {name}" in message
        hint = "HF_HUB_OFFLINE is set: unset it" if how == "switch" else "Check the network"
        assert hint in message


@pytest.mark.parametrize("how", ["switch", "no network"])
def test_a_complete_cache_needs_no_network(how, on_hub, offline):
    from huggingface_hub import hf_hub_download

    for name in MODEL_FILES:
        hf_hub_download(MODEL, name)
    for name in ADAPTER_FILES:
        hf_hub_download(ADAPTER, name)
    offline(how)
    assert files.read_config(MODEL) == CONFIG
    assert len(files.weight_headers(MODEL)) == 2
    assert inspect_adapter(ADAPTER).tensors == 2


def test_half_a_cache_with_an_index(on_hub, offline):
    files.read_config(MODEL)
    files.located(MODEL).file("model.safetensors.index.json")
    offline("switch")
    assert f"the cache of the Hub has no {SHARDS[0]}" in refusal(files.weight_headers, MODEL)


# -- what the Hub refuses -----------------------------------------------------------------------


def test_refusals(on_hub):
    on_hub.gated.add("google/gated")
    on_hub.broken.add("google/broken")
    on_hub.add("google/bin", {"config.json": MODEL_FILES["config.json"], "pytorch_model.bin": b""})
    for read, id, message in (
        (files.read_config, "google/typo", "not a folder here, and not found on the Hub."),
        (files.read_config, "google/gated", f"gated: accept the license at {on_hub.url}/google/ga"),
        (files.read_config, "google/broken", "not a folder here, and the cache of the Hub"),
        (files.read_config, ADAPTER, "no config.json (an adapter's folder?)"),
        (files.weight_headers, "google/bin", "no model.safetensors and no model"),
        (files.adapter_header, MODEL, "no adapter_model.safetensors"),
        (inspect_adapter, MODEL, "no adapter_model.safetensors (is it the folder of a model?)"),
    ):  # fmt: skip
        assert refusal(read, id).startswith(f"{id}: {message}"), id
    assert refusal(files.read_config, "google/gated").endswith("and log in: hf auth login")


def test_without_huggingface_hub(on_hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    expected = f"{MODEL}: no such folder; if it is a Hub id: pip install -U huggingface_hub"
    assert refusal(files.read_config, MODEL) == expected


# -- the commands -------------------------------------------------------------------------------


def test_commands(on_hub, model_dir, capsys):
    """The same results as for the folder; plan's code names the Hub id."""
    content = {file.name: file.read_bytes() for file in model_dir.iterdir()}
    on_hub.add(MODEL, content)
    on_hub.add(MODEL, content, "v2")
    shutil.copytree(model_dir, "gemma-tiny@v2")
    commands = (
        ("plan", "--gpu", "8GiB"),
        ("map", "--map", '{"": 0}'),
        ("scan", "--targets", "q_proj"),
    )
    for command, *options in commands:
        assert run_command(command, f"{MODEL}@v2", *options) == 0
        from_hub = capsys.readouterr().out
        assert run_command(command, "./gemma-tiny@v2", *options) == 0
        printed = capsys.readouterr().out
        if command == "plan":
            assert f'    "{MODEL}", revision="v2",\n' in from_hub
            from_hub = from_hub.replace(f'"{MODEL}", revision="v2"', '"gemma-tiny@v2"')
        assert from_hub == printed
    assert on_hub.bytes_of("model.safetensors") == 0
    assert run_command("report", "--model", MODEL, "--adapter", ADAPTER) == 0
    report = capsys.readouterr().out
    assert "### Model: gemma-tiny\n" in report
    assert "google/" not in report
    assert "someone/" not in report
    header = files.read_header(model_dir / "model.safetensors")
    assert 0 < on_hub.bytes_of("model.safetensors") < sum(t.bytes for t in header.values())


def test_weights_in_the_cache(on_hub, model_dir, offline, capsys):
    """Those that are there must be whole; the others, and half a download, are left to the Hub."""
    from huggingface_hub import hf_hub_download

    weights = model_dir / "model.safetensors"
    tensors = files.read_header(weights)
    shards = dict.fromkeys(SHARDS, weights.read_bytes())
    names = dict(zip(tensors, [*SHARDS, *[SHARDS[0]] * len(tensors)], strict=False))
    config = (model_dir / "config.json").read_bytes()
    index = json.dumps({"weight_map": names}).encode()
    on_hub.add(MODEL, {"config.json": config, "model.safetensors.index.json": index, **shards})
    command = "plan", MODEL, "--gpu", "8GiB", "--context", "64"
    cached = [hf_hub_download(MODEL, name) for name in ("config.json", files.INDEX, SHARDS[1])]
    unfinished = Path(cached[0]).parents[2] / "blobs" / "0123.incomplete"
    unfinished.write_bytes(b"half")
    offline("switch")
    assert run_command(*command) == 0
    os.truncate(cached[2], 4)
    capsys.readouterr()
    assert run_command(*command) == 2
    assert f"{cached[2]}: cut off in the safetensors header" in capsys.readouterr().err
    Path(cached[2]).write_bytes(shards[SHARDS[1]])
    snapshot = str(Path(cached[2]).parent)  # as a folder, which from_pretrained does not complete
    assert run_command("plan", snapshot, *command[2:]) == 2
    assert f"{SHARDS[0]}: no such file" in capsys.readouterr().err


def test_endpoint_of_the_environment(on_hub, tmp_path):
    """A process of its own, which reads HF_ENDPOINT and HF_HOME, and imports no torch."""
    environment = os.environ | {
        "HF_ENDPOINT": on_hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    environment.pop("HF_HUB_CACHE", None)
    code = "import sys; from gemma4_compat import cli; cli.main(); print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code, "adapter", ADAPTER, "--json"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    text, _, torch = ran.stdout.rstrip().rpartition("\n")
    assert json.loads(text)["tensors"] == 2
    assert torch == "False"
