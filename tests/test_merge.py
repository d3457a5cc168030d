"""``gemma4-compat merge``: merges into the unquantized base, and proves the result."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gemma4_compat.cli import main
from gemma4_compat.errors import InputError, MergeError
from gemma4_compat.files.checkpoint import read_header
from gemma4_compat.merging import MergeResult, Parity, merge
from tests import damage
from tests.support import assert_same, load_model, logits

peft = pytest.importorskip("peft")


@pytest.fixture
def work(tmp_path):
    """An empty folder for OUT, so that tests see leftovers."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def merged_in_memory(model_dir, adapter_dir):
    model = peft.PeftModel.from_pretrained(load_model(model_dir), adapter_dir)
    return logits(model.merge_and_unload().eval())


def make_adapter(path, model_dir, fill, **options):
    """A LoRA adapter on parts of the language model, with values set by `fill(model)`."""
    config = peft.LoraConfig(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(load_model(model_dir), config)
        with torch.no_grad():
            fill(model)
    model.save_pretrained(path)
    return path


def noise(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn(parameter.shape).to(parameter))


def with_tokenizer(source, path, template=None):
    """A copy of a checkpoint or adapter with a small real tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(source, path)
    words = ["<unk>", "the", "capital", "of", "France", "is", "write", "a", "short", "story"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    if template:
        fast.chat_template = template
    fast.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "which",
    [
        "adapter_dir",
        pytest.param("outer_adapter_dir", marks=pytest.mark.slow),
        pytest.param("language_adapter_dir", marks=pytest.mark.slow),
    ],
)
def test_merges_and_writes(model_dir, which, work, request, capsys):
    adapter = request.getfixturevalue(which)
    out = work / "out"
    assert main(["merge", str(model_dir), str(adapter), str(out)]) == 0
    printed = capsys.readouterr()
    for kind in ("random tokens 1", "image (synthetic)", "sound (synthetic)"):
        (row,) = [line for line in printed.out.splitlines() if line.startswith(kind)]
        assert row.endswith("  agrees")
    assert "prompts are random tokens, from a fixed seed" in printed.out
    assert f"merged into {out}" in printed.out
    assert "reading it back" in printed.err
    assert names(work) == ["out"]
    assert_same(logits(load_model(out)), merged_in_memory(model_dir, adapter))
    assert f"gemma4-compat plan {out} prints code that loads it" in printed.out
    assert (out / "generation_config.json").read_text() == (
        model_dir / "generation_config.json"
    ).read_text()


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"init_lora_weights": "orthogonal"}],
)
def test_kinds_of_adapters(model_dir, options, work, tmp_path):
    adapter = make_adapter(
        tmp_path / "adapter", model_dir, noise,
        target_modules=r".*\.language_model\..*\.mlp\.(up|down)_proj", **options,
    )  # fmt: skip
    result = merge(model_dir, adapter, work / "out")
    assert result.ok
    assert all(row.effect > row.difference for row in result.parity)
    assert_same(logits(load_model(work / "out")), merged_in_memory(model_dir, adapter))


def test_adapter_that_changes_nothing(model_dir, work, tmp_path):
    adapter = make_adapter(
        tmp_path / "adapter", model_dir, lambda model: None,
        target_modules=r".*\.language_model\..*\.up_proj",
    )  # fmt: skip
    result = merge(model_dir, adapter, work / "out")
    assert any("the adapter changes nothing" in note for note in result.notes)
    assert_same(logits(load_model(work / "out")), logits(load_model(model_dir)))


def test_tokenizer_and_prompts(model_dir, language_adapter_dir, work, tmp_path, capsys):
    base = with_tokenizer(model_dir, tmp_path / "base", "base template")
    (base / "processor_config.json").write_text("{}")
    (base / "README.md").write_text("not a part of the model")
    adapter = with_tokenizer(language_adapter_dir, tmp_path / "adapter", "adapter template")
    out = work / 'my "merged" model'
    assert main(["merge", str(base), str(adapter), str(out)]) == 0
    printed = capsys.readouterr().out
    assert "The capit...rance is  " in printed
    rows = [
        line for line in printed.splitlines() if line.startswith(("The cap", "Write a", "def "))
    ]
    assert len(rows) == 3
    assert all("%" in row for row in rows), "a prompt breaks its row"
    assert "random tokens" not in printed
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == "adapter template"
    assert tokenizer("the capital")["input_ids"] == [1, 2]
    assert (out / "processor_config.json").is_file()
    assert not (out / "README.md").exists()


def cancelling(model):
    """The adapter cancels nearly all of the query and value projections.

    With the adapter loaded, the large output of the base layer is rounded to bfloat16 before the
    adapter cancels most of it, so the rest is mostly rounding error.  Merged, the small weight
    itself is rounded.  The norm after the projection makes both large again.
    """
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.lora_A["default"].weight.copy_(torch.eye(128))
            module.lora_B["default"].weight.copy_(-(1 - 2**-14) * module.base_layer.weight.float())


@pytest.fixture
def cancelling_adapter(model_dir, tmp_path):
    return make_adapter(
        tmp_path / "cancelling", model_dir, cancelling,
        target_modules=r".*\.language_model\.layers\.[0-2]\.self_attn\.[qv]_proj",
        r=128, lora_alpha=128,
    )  # fmt: skip


def test_disagreeing_merge_writes_nothing(model_dir, cancelling_adapter, work, capsys):
    (work / "out").mkdir()
    (work / "out" / "old").write_text("kept")
    arguments = [str(model_dir), str(cancelling_adapter), str(work / "out"), "--force"]
    assert main(["merge", *arguments]) == 1
    printed = capsys.readouterr()
    assert "DISAGREES" in printed.out
    assert "does not agree with the adapter; nothing was written" in printed.err
    assert names(work) == ["out"]
    assert names(work / "out") == ["old"]


def test_force_replaces(model_dir, language_adapter_dir, work):
    (work / "out").mkdir()
    (work / "out" / "old").write_text("replaced")
    merge(model_dir, language_adapter_dir, work / "out", force=True)
    assert names(work) == ["out"]
    assert "old" not in names(work / "out")


def test_adapter_for_another_model(model_dir, language_adapter_dir, work, tmp_path):
    from safetensors.torch import load, save_file

    adapter = shutil.copytree(language_adapter_dir, tmp_path / "other")
    file = adapter / "adapter_model.safetensors"
    tensors = load(file.read_bytes())
    tensors = {name.replace(".language_model.", ".text_model."): t for name, t in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    refused(model_dir, adapter, work / "out", f"{adapter} does not fit {model_dir}: ")


@pytest.mark.parametrize(
    ("lacks", "config"),
    [(r"layers\.1\.mlp\.up_proj\.lora_B", {}), ("lora_magnitude_vector", {"use_dora": True})],
)
def test_incomplete_adapter(model_dir, language_adapter_dir, work, tmp_path, lacks, config):
    """PEFT would begin with new tensors, which are not trained, and merge write them."""
    from safetensors.torch import load, save_file

    adapter = shutil.copytree(language_adapter_dir, tmp_path / "adapter")
    edited(adapter / "adapter_config.json", **config)
    file = adapter / "adapter_model.safetensors"
    tensors = load(file.read_bytes())
    kept = {name: t for name, t in tensors.items() if not re.search(lacks, name)}
    save_file(kept, file, metadata={"format": "pt"})
    said = refused(model_dir, adapter, work / "out", f"{adapter}: lacks ")
    assert re.search(lacks, said)


def test_adapter_that_is_not_finite(model_dir, work, tmp_path):
    def spoil(model):
        noise(model)
        next(p for p in model.parameters() if p.requires_grad).fill_(torch.nan)

    adapter = make_adapter(
        tmp_path / "adapter", model_dir, spoil, target_modules=r".*\.language_model\..*\.up_proj"
    )
    with pytest.raises(MergeError, match="not finite"):
        merge(model_dir, adapter, work / "out")
    assert names(work) == []


@pytest.mark.parametrize("step", ["loading", "merging", "writing", "reading it back"])
def test_interrupted(model_dir, language_adapter_dir, work, step):
    def interrupt(line):
        if line.startswith(step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(model_dir, language_adapter_dir, work / "out", progress=interrupt)
    assert names(work) == []


def test_usage_errors_come_before_anything_is_loaded(
    model_dir, language_adapter_dir, work, tmp_path
):
    quantized = tmp_path / "quantized"
    load_model(model_dir, "nf4").save_pretrained(quantized)
    (work / "there").mkdir()
    (work / "file").write_text("")
    base, adapter, out = str(model_dir), str(language_adapter_dir), str(work / "out")
    cases = [
        [["./none", adapter, out], "none: no such folder"],
        [[adapter, adapter, out], f"{adapter}: no config.json"],
        [[base, base, out], f"{base}: no adapter_config.json"],
        [[base, adapter, str(work / "there")], f"{work / 'there'}: exists already"],
        [[base, adapter, str(work / "file"), "--force"], "exists and is not a folder"],
        [[base, adapter, str(work / "no" / "out")], f"{work / 'no'}: no such folder"],
        [[base, adapter, base, "--force"], f"would replace {base}"],
        [[str(quantized), adapter, out], f"{quantized}"],
    ]
    program = (
        "import io, json, sys, contextlib\n"
        "from gemma4_compat.cli import main\n"
        "for arguments, _ in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        code = main(['merge', *arguments])\n"
        "    print(json.dumps([code, said.getvalue(), 'torch' in sys.modules]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, json.dumps(cases)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    for (_, expected), (code, said, loaded) in zip(cases, found, strict=True):
        assert expected in said
        assert code == 2
        assert not loaded
    assert "a quantized checkpoint" in found[7][1]
    assert names(work) == ["file", "there"]


def test_unquantized_weights_with_a_quantization_config(
    model_dir, language_adapter_dir, work, tmp_path
):
    base = shutil.copytree(model_dir, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    merge(base, language_adapter_dir, work / "out")
    assert "quantization_config" not in json.loads((work / "out" / "config.json").read_text())
    assert_same(logits(load_model(work / "out")), merged_in_memory(model_dir, language_adapter_dir))


def test_the_command_hides_what_libraries_print(llama_dir, language_adapter_dir, work):
    """A new process, in which peft imports bitsandbytes."""
    command = [sys.executable, "-m", "gemma4_compat", "merge"]
    paths = map(str, (llama_dir, language_adapter_dir, work / "out"))
    ran = subprocess.run([*command, *paths], capture_output=True, text=True)
    assert ran.returncode == 2
    first, second = ran.stderr.splitlines()
    assert first == "checking base and adapter without their weights ..."
    assert f"{language_adapter_dir} does not fit {llama_dir}: " in second


# -- the result -----------------------------------------------------------------------------------


def test_legend_and_percentages():
    row = Parity("words", 24, 0.7, 0.0316, 0.0742, 2, 2)
    printed = str(MergeResult("base", "lora", Path("out"), (row,), ()))
    head, words, *rest = printed.splitlines()
    assert words.split("  ")[-1] == "agrees"
    assert " ".join(words.split()).startswith("words 70 % 3.2 % 7.4 % 2 of 24 (2 undecided)")
    legend = " ".join(rest)
    for column in ("adapter", "merging", "tolerance", "other tokens"):
        assert column in head
        assert f"{column}: " in legend
    assert str(replace_row(row, effect=12.345)).count("1234 %") == 1
    assert str(replace_row(row, difference=math.inf)).count("inf %") == 1


def replace_row(row, **values):
    rows = (replace(row, **values),)
    return MergeResult("base", "lora", Path("out"), rows, ())


# -- files and arguments that cannot work ---------------------------------------------------------


class Loading(Exception):
    """Raised after the checks, when the merge is about to load weights."""


def stop_at_loading(line):
    if line.startswith("loading "):
        raise Loading


def refused(base, adapter, out, message, **options):
    """Assert an error of one line before weights are loaded, and no leftovers."""
    before = names(out.parent) if out.parent.is_dir() else None
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        merge(base, adapter, out, progress=stop_at_loading, **options)
    assert "\n" not in str(caught.value)
    assert before is None or names(out.parent) == before
    return str(caught.value)


def sharded(model_dir, path):
    load_model(model_dir).save_pretrained(path, max_shard_size="2MB")
    return path


@pytest.fixture(scope="module")
def whole(model_dir, language_adapter_dir, tmp_path_factory):
    """A base in shards and an adapter, with all files that belong to them."""
    folder = tmp_path_factory.mktemp("whole")
    base = with_tokenizer(sharded(model_dir, folder / "sharded"), folder / "base", "a template")
    (base / "processor_config.json").write_text('{"a": "b"}')
    (base / "tokenizer.model").write_text("not used, and copied")
    adapter = with_tokenizer(language_adapter_dir, folder / "adapter")
    return {"base": base, "adapter": adapter}


@pytest.fixture
def copies(whole, tmp_path):
    return {name: shutil.copytree(path, tmp_path / name) for name, path in whole.items()}


JSON_FILES = [
    ("base", "config.json"),
    ("base", "model.safetensors.index.json"),
    ("adapter", "adapter_config.json"),
]
WEIGHTS = [("base", "model-00002-of-*.safetensors"), ("adapter", "adapter_model.safetensors")]
DAMAGED = [
    pytest.param(place, kind, *how, id=f"{'/'.join(place)}-{kind}")
    for files, kinds in (
        (JSON_FILES, damage.JSON),
        (WEIGHTS, {**damage.SAFETENSORS, "cut off": damage.CUT_OFF}),
    )
    for place in files
    for kind, how in kinds.items()
]


@pytest.mark.parametrize(("place", "kind", "change", "message"), DAMAGED)
def test_damaged_file(copies, work, place, kind, change, message):
    folder, name = place
    (file,) = copies[folder].glob(name)
    change(file)
    said = refused(copies["base"], copies["adapter"], work / "out", message)
    assert str(file) in said


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("base", "config.json"), "no config.json"),
        (("base", "model.safetensors.index.json"), "no model.safetensors and no model.safetensors"),
        (("base", "model-00002-of-*.safetensors"), "no such file"),
        (("adapter", "adapter_config.json"), "no adapter_config.json"),
        (("adapter", "adapter_model.safetensors"), "no adapter_model.safetensors"),
    ],
)
def test_missing_file(copies, work, place, message):
    (file,) = copies[place[0]].glob(place[1])
    file.unlink()
    assert str(file.parent) in refused(*copies.values(), work / "out", message)


def edited(file, **entries):
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        (
            "base/config.json",
            {"model_type": "gemma9"},
            "base: transformers",
        ),
        ("base/config.json", {"text_config": {"hidden_size": "many"}}, "base"),
        ("base/config.json", {"text_config": {"num_hidden_layers": 9}}, "base"),
        ("base/tokenizer.json", {"model": 4}, "base: its tokenizer does not work"),
        (
            "adapter/adapter_config.json",
            {"peft_type": None},
            "adapter_config.json: not an",
        ),
        ("adapter/adapter_config.json", {"peft_type": "LORAX"}, "adapter does not fit"),
        ("adapter/adapter_config.json", {"peft_type": "CPT"}, "a CPT adapter has no weights"),
        ("adapter/adapter_config.json", {"r": "8"}, 'adapter_config.json: r cannot be "8"'),
        ("adapter/adapter_config.json", {"r": 2}, "adapter does not fit"),
        ("adapter/adapter_config.json", {"target_modules": ["no_proj"]}, "adapter does not fit"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_content_that_cannot_work(copies, work, file, entries, message):
    edited(copies["base"].parent / file, **entries)
    if file == "base/tokenizer.json":
        (copies["adapter"] / "tokenizer.json").unlink()
    refused(*copies.values(), work / "out", message)


def test_base_without_one_of_its_tensors(model_dir, language_adapter_dir, work, tmp_path):
    """transformers would fill the missing tensor with random numbers, and merge write them."""
    from safetensors.torch import load, save_file

    base = shutil.copytree(model_dir, tmp_path / "base")
    tensors = load((base / "model.safetensors").read_bytes())
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    del tensors[name]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    refused(base, language_adapter_dir, work / "out", f"{base}: its weights lack 1 tensors of")


def test_base_without_tensors_that_are_never_used(model_dir, language_adapter_dir, work, tmp_path):
    """Only the first releases save keys and values of layers that share them."""
    from safetensors.torch import load, save_file

    base = shutil.copytree(model_dir, tmp_path / "base")
    text = json.loads((base / "config.json").read_text())["text_config"]
    shared = range(text["num_hidden_layers"] - text["num_kv_shared_layers"], 99)
    assert text["num_kv_shared_layers"]
    parts = [f"language_model.layers.{n}.self_attn.{k}_" for n in shared for k in "kv"]
    tensors = load((base / "model.safetensors").read_bytes())
    kept = {name: t for name, t in tensors.items() if not any(part in name for part in parts)}
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Loading):
        merge(base, language_adapter_dir, work / "out", progress=stop_at_loading)


@pytest.mark.parametrize("shards", [False, True])
def test_unused_weights_of_the_base_are_kept(
    model_dir, language_adapter_dir, work, tmp_path, monkeypatch, shards
):
    """vLLM before September 2026: Following weights were not initialized from checkpoint."""
    from safetensors.torch import load_file, save_file
    from transformers import PreTrainedModel

    base = shutil.copytree(model_dir, tmp_path / "base")
    text = json.loads((base / "config.json").read_text())["text_config"]
    tensors = load_file(base / "model.safetensors")
    kinds = text["layer_types"]
    own = f"model.language_model.layers.{kinds.index(kinds[-1])}.self_attn."
    last = f"model.language_model.layers.{len(kinds) - 1}.self_attn."
    parts = [f"{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    unused = {last + part: torch.randn_like(tensors[own + part]) for part in parts}
    save_file({**tensors, **unused}, base / "model.safetensors", metadata={"format": "pt"})
    if shards:
        save = PreTrainedModel.save_pretrained
        monkeypatch.setattr(
            PreTrainedModel,
            "save_pretrained",
            lambda model, *args, **kw: save(model, *args, **{**kw, "max_shard_size": "100KB"}),
        )
    assert merge(base, language_adapter_dir, work / "out").ok
    written = {
        n: t for file in (work / "out").glob("*.safetensors") for n, t in load_file(file).items()
    }
    assert written.keys() >= unused.keys()
    for name, tensor in unused.items():
        assert torch.equal(written[name], tensor.to(written[name].dtype))
    assert ((work / "out" / "model.safetensors.index.json").exists()) == shards
    assert_same(logits(load_model(work / "out")), merged_in_memory(model_dir, language_adapter_dir))


def test_an_adapter_on_unused_weights(model_dir, language_adapter_dir, work, tmp_path):
    """Keys of a layer that shares them: no effect, as ``gemma4-compat adapter`` says."""
    from safetensors.torch import load_file, save_file

    adapter = shutil.copytree(language_adapter_dir, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    layers = json.loads((model_dir / "config.json").read_text())["text_config"]["layer_types"]
    own, last = "layers.0.self_attn.q_proj", f"layers.{len(layers) - 1}.self_attn.k_proj"
    unused = {n.replace(own, last): t.clone() for n, t in tensors.items() if own in n}
    assert unused
    save_file({**unused, **tensors}, adapter / "adapter_model.safetensors")
    assert merge(model_dir, adapter, work / "out").ok
    assert_same(logits(load_model(work / "out")), merged_in_memory(model_dir, language_adapter_dir))


MUTATIONS = 40
VALUES = [None, [], {}, "x", -1, 0, 1e308, True, 10**30, ["x"], {"a": 1}, "../../x", "a\nb"]


def places(value, path=()):
    """The path of every entry inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else ()
    inside = list(enumerate(value))[:3] if isinstance(value, list) else inside
    for key, each in inside:
        yield (*path, key)
        yield from places(each, (*path, key))


def mutated(content, chance):
    """Remove, rename or replace one random entry."""
    *path, last = chance.choice(list(places(content)))
    holder = content
    for key in path:
        holder = holder[key]
    what = chance.choice(["removed", "renamed", *["replaced"] * 4])
    if what == "replaced":
        holder[last] = chance.choice(VALUES)
    else:
        value = holder.pop(last)
        if what == "renamed" and isinstance(holder, dict):
            holder[f"{last}x"] = value


@pytest.mark.parametrize("seed", range(MUTATIONS))
def test_mutations(copies, work, seed):
    """Each one raises an error of one line that names the folder, or does not prevent loading."""
    chance = random.Random(seed)
    folder, name = chance.choice([*JSON_FILES, *WEIGHTS, *WEIGHTS])
    (file,) = copies[folder].glob(name)
    if file.suffix == ".json":
        content = json.loads(file.read_text())
        mutated(content, chance)
        file.write_text(json.dumps(content))
    else:
        damage.with_header(lambda header: mutated(header, chance))(file)
    try:
        merge(*copies.values(), work / "out", progress=stop_at_loading)
    except Loading:
        pass
    except InputError as error:
        assert str(copies[folder]) in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
    else:
        pytest.fail("neither loaded nor refused")
    assert names(work) == []


@pytest.mark.parametrize("device", ["cudda", "cuda:99", "meta", "vulkan", ""])
def test_devices(model_dir, language_adapter_dir, work, device):
    message = f"device {device!r}: torch cannot use it; --device cpu merges on the CPU: "
    refused(model_dir, language_adapter_dir, work / "out", message, device=device)


def test_the_cpu_by_its_number(model_dir, language_adapter_dir, work):
    result = merge(model_dir, language_adapter_dir, work / "out", device="cpu:0")
    assert result.ok


@pytest.mark.parametrize("arguments", [["--device", "cudda"], ["--device", "meta"]])
def test_exit_code_of_arguments(model_dir, language_adapter_dir, work, capsys, arguments):
    try:
        paths = map(str, (model_dir, language_adapter_dir, work / "out"))
        code = main(["merge", *paths, *arguments])
    except SystemExit as error:  # raised by argparse
        code = error.code
    assert code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("gemma4-compat merge: ")
    assert arguments[1] in last
    assert "loading" not in last
    assert names(work) == []


def test_exit_code_of_files(copies, work, capsys):
    file = copies["adapter"] / "adapter_config.json"
    file.write_bytes(damage.POINTER)
    assert main(["merge", *map(str, copies.values()), str(work / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"gemma4-compat merge: {file}: a Git LFS pointer, not the file itself: run git lfs pull"
    )


# -- OUT ------------------------------------------------------------------------------------------


def test_out_that_cannot_be_made(model_dir, language_adapter_dir, work):
    message = f"{work}: cannot be written to: OSError: "
    refused(model_dir, language_adapter_dir, work / ("x" * 250), message)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no files, not even from root")
def test_folder_that_takes_no_files(model_dir, language_adapter_dir):
    with pytest.raises(InputError, match="/proc: cannot be written to: ") as refusal:
        merge(model_dir, language_adapter_dir, "/proc/out", progress=stop_at_loading)
    assert "'/proc/out'" in str(refusal.value)  # not the temporary folder
    assert "partial" not in str(refusal.value)


def test_read_only_folder(model_dir, language_adapter_dir, work):
    work.chmod(0o500)
    if os.access(work, os.W_OK):
        pytest.skip("this user writes everywhere; see test_folder_that_takes_no_files")
    message = f"{work}: cannot be written to: PermissionError"
    refused(model_dir, language_adapter_dir, work / "out", message)


def test_no_room(model_dir, language_adapter_dir, work, tmp_path):
    """There is no room for a base of 4 TiB, which is a sparse file."""
    base = shutil.copytree(model_dir, tmp_path / "base")
    huge = {"dtype": "BF16", "shape": [2**41], "data_offsets": [0, 2**42]}
    header = json.dumps({"huge": huge}).encode()
    with (base / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2**42)
    assert shutil.disk_usage(work).free < 2**42
    refused(base, language_adapter_dir, work / "out", "are free, but the merged model needs 4096.0")


def test_no_room_on_a_small_disk(model_dir, language_adapter_dir, work, monkeypatch):
    usage = type(shutil.disk_usage(work))(2**20, 2**20 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    elements = sum(each.numel for each in read_header(model_dir / "model.safetensors").values())
    message = f"{work}: 1000 B are free, but the merged model needs {2 * elements / 2**20:.1f} MiB"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        merge(model_dir, language_adapter_dir, work / "out", progress=stop_at_loading)


def test_out_that_holds_the_current_folder(model_dir, language_adapter_dir, work, monkeypatch):
    """``--force`` would replace the current folder, which an empty shell variable names too."""
    (work / "kept").mkdir()
    monkeypatch.chdir(work / "kept")
    for out in ("", ".", "..", str(work), "/"):
        with pytest.raises(InputError, match="is the current folder or a parent of it"):
            merge(model_dir, language_adapter_dir, out, force=True, progress=stop_at_loading)
    assert names(work) == ["kept"]


def test_out_that_appears_meanwhile(model_dir, language_adapter_dir, work):
    def make(line):
        if line.startswith("reading it back"):
            (work / "out").mkdir()

    with pytest.raises(MergeError, match=r"cannot be replaced or created: .*exists already"):
        merge(model_dir, language_adapter_dir, work / "out", progress=make)
    assert names(work) == ["out"]
    assert names(work / "out") == []


def test_writing_fails(model_dir, language_adapter_dir, work, capsys):
    """As on a full disk: safetensors raises its own error, which is not an OSError."""
    resource = pytest.importorskip("resource")
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, most))
    try:
        code = main(["merge", *map(str, (model_dir, language_adapter_dir, work / "out"))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert code == 1
    said = capsys.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith(f"gemma4-compat merge: writing to {work} failed: ")
    assert last.endswith("; nothing was written")
    assert "Traceback" not in said
    assert names(work) == []
