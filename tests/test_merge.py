"""``gemma4-compat merge``: merging into the unquantised base, with proof."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from gemma4_compat.cli import main
from gemma4_compat.errors import InputError, MergeError
from gemma4_compat.merge import merge_adapter
from tests.support import assert_same, load_model, logits

peft = pytest.importorskip("peft")


@pytest.fixture
def work(tmp_path):
    """An empty folder for OUT, so that leftovers are seen."""
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


@pytest.mark.parametrize("which", ["adapter_dir", "outer_adapter_dir", "language_adapter_dir"])
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
    assert (out / "generation_config.json").read_text() == (
        model_dir / "generation_config.json"
    ).read_text()


@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_kinds_of_adapters(model_dir, options, work, tmp_path):
    adapter = make_adapter(
        tmp_path / "adapter", model_dir, noise,
        target_modules=r".*\.language_model\..*\.mlp\.(up|down)_proj", **options,
    )  # fmt: skip
    result = merge_adapter(model_dir, adapter, work / "out")
    assert result.agrees
    assert all(row.effect > row.difference for row in result.parity)
    assert_same(logits(load_model(work / "out")), merged_in_memory(model_dir, adapter))


def test_adapter_that_changes_nothing(model_dir, work, tmp_path):
    adapter = make_adapter(
        tmp_path / "adapter", model_dir, lambda model: None,
        target_modules=r".*\.language_model\..*\.up_proj",
    )  # fmt: skip
    result = merge_adapter(model_dir, adapter, work / "out")
    assert any("the adapter changes nothing" in note for note in result.notes)
    assert_same(logits(load_model(work / "out")), logits(load_model(model_dir)))


def test_tokenizer_and_prompts(model_dir, language_adapter_dir, work, tmp_path, capsys):
    base = with_tokenizer(model_dir, tmp_path / "base", "base template")
    (base / "processor_config.json").write_text("{}")
    (base / "README.md").write_text("not a part of the model")
    adapter = with_tokenizer(language_adapter_dir, tmp_path / "adapter", "adapter template")
    out = work / "out"
    prompts = ["--prompt", "the capital", "--prompt", "a short story"]
    assert main(["merge", str(base), str(adapter), str(out), *prompts]) == 0
    printed = capsys.readouterr().out
    assert "the capital  " in printed
    assert "a short story  " in printed
    assert "random tokens" not in printed
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == "adapter template"
    assert tokenizer("the capital")["input_ids"] == [1, 2]
    assert (out / "processor_config.json").is_file()
    assert not (out / "README.md").exists()


def cancelling(model):
    """Nearly all of the query and value projections is taken away.

    With the adapter loaded, the large output of the base layer is rounded to bfloat16 before most
    of it is taken away; what is left is mostly rounding.  Merged, the small weight itself is
    rounded.  The norm behind the projection makes both large again.
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
    assert "does not agree with the adapter; nothing written" in printed.err
    assert names(work) == ["out"]
    assert names(work / "out") == ["old"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(model_dir, adapter_dir, work, dtype):
    result = merge_adapter(model_dir, adapter_dir, work / "out", dtype=dtype)
    assert result.agrees
    from safetensors import safe_open

    with safe_open(work / "out" / "model.safetensors", "pt") as file:
        found = {str(file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118
    assert f"torch.{dtype}" in found
    assert "torch.bfloat16" not in found


def test_force_replaces(model_dir, language_adapter_dir, work):
    (work / "out").mkdir()
    (work / "out" / "old").write_text("replaced")
    merge_adapter(model_dir, language_adapter_dir, work / "out", force=True)
    assert names(work) == ["out"]
    assert "old" not in names(work / "out")


def test_adapter_for_another_model(model_dir, language_adapter_dir, work, tmp_path):
    from safetensors.torch import load, save_file

    adapter = shutil.copytree(language_adapter_dir, tmp_path / "other")
    file = adapter / "adapter_model.safetensors"
    tensors = load(file.read_bytes())
    tensors = {name.replace(".language_model.", ".text_model."): t for name, t in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(MergeError, match="does not fit"):
        merge_adapter(model_dir, adapter, work / "out")
    assert names(work) == []


def test_adapter_that_is_not_finite(model_dir, work, tmp_path):
    def spoil(model):
        noise(model)
        next(p for p in model.parameters() if p.requires_grad).fill_(torch.nan)

    adapter = make_adapter(
        tmp_path / "adapter", model_dir, spoil, target_modules=r".*\.language_model\..*\.up_proj"
    )
    with pytest.raises(MergeError, match="not finite"):
        merge_adapter(model_dir, adapter, work / "out")
    assert names(work) == []


@pytest.mark.parametrize("step", ["loading", "merging", "writing", "reading it back"])
def test_interrupted(model_dir, language_adapter_dir, work, step):
    def interrupt(line):
        if line.startswith(step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_adapter(model_dir, language_adapter_dir, work / "out", progress=interrupt)
    assert names(work) == []


def test_usage_errors_come_before_anything_is_loaded(
    model_dir, language_adapter_dir, work, tmp_path
):
    quantised = tmp_path / "quantised"
    load_model(model_dir, "nf4").save_pretrained(quantised)
    (work / "there").mkdir()
    (work / "file").write_text("")
    base, adapter, out = str(model_dir), str(language_adapter_dir), str(work / "out")
    cases = [
        [["./none", adapter, out], "./none: no such folder"],
        [[adapter, adapter, out], f"{adapter}: no config.json"],
        [[base, base, out], f"{base}: no adapter_config.json"],
        [[base, adapter, str(work / "there")], f"{work / 'there'}: exists already"],
        [[base, adapter, str(work / "file"), "--force"], "exists and is not a folder"],
        [[base, adapter, str(work / "no" / "out")], f"{work / 'no'}: no such folder"],
        [[base, adapter, base, "--force"], f"would replace {base}"],
        [[str(quantised), adapter, out], f"{quantised}"],
        [[base, adapter, out, "--prompt", "hello"], f"{base}: no tokenizer"],
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
    assert "a quantised checkpoint" in found[7][1]
    assert names(work) == ["file", "there"]


def test_unquantised_weights_with_a_quantization_config(
    model_dir, language_adapter_dir, work, tmp_path
):
    base = shutil.copytree(model_dir, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    merge_adapter(base, language_adapter_dir, work / "out")
    assert "quantization_config" not in json.loads((work / "out" / "config.json").read_text())
    assert_same(logits(load_model(work / "out")), merged_in_memory(model_dir, language_adapter_dir))


def test_dtype_is_checked(model_dir, language_adapter_dir, work):
    with pytest.raises(InputError, match="dtype must be one of bfloat16"):
        merge_adapter(model_dir, language_adapter_dir, work / "out", dtype="int8")
