"""``gemma4-compat plan``: the plans, and whether the printed code loads a model as planned."""

from __future__ import annotations

import json
import re

import pytest
import torch

from gemma4_compat.cli import main
from gemma4_compat.errors import InputError
from gemma4_compat.model import meta, parts, sizes
from gemma4_compat.plan import OUTSIDE, Plan, activations, kv_cache, parse_size, plan
from gemma4_compat.tiny import text_inputs
from tests.shapes import E2B_TEXT, write_config
from tests.support import run_command

pytest.importorskip("bitsandbytes")

GIB = 2**30
PLE = "model.language_model.embed_tokens_per_layer"
TOWERS = ["model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"]


def on_cpu(found):
    return [name for name, device in found.device_map.items() if device == "cpu"]


# -- what is offloaded ----------------------------------------------------------------------------


def test_whole(e2b_dir):
    found = plan(e2b_dir, 12 * GIB, context=8192)
    assert found.device_map == {"": 0}
    assert found.ok
    assert found.weights == sum(part.gpu for part in found.parts)
    assert not any(part.cpu for part in found.parts)
    assert [more.part for more in found.further] == [
        parts.PLE, parts.VISION, parts.AUDIO, parts.LAYERS,
    ]  # fmt: skip
    assert len(found.further[-1].modules) == 35
    assert "enable_fp32_cpu_offload" not in found.code


def test_the_per_layer_embeddings_go_first(e2b_dir):
    found = plan(e2b_dir, 7 * GIB, context=8192)
    assert found.device_map == {PLE: "cpu", "": 0}
    assert found.weights == pytest.approx(1.91 * GIB, rel=0.01)  # measured on a GPU
    table = 262144 * 35 * 256 * 2
    assert plan(e2b_dir, 12 * GIB, context=8192).weights - found.weights == table
    assert "llm_int8_enable_fp32_cpu_offload=True" in found.code


def test_offloads_in_order_and_no_more_than_needed(e2b_dir):
    """With one step of offloading less, the model would not fit."""
    model = meta.meta_model(e2b_dir, meta.bnb_config("nf4"))
    whole = sizes.tensor_sizes(model)
    fixed = kv_cache(model, 8192) + activations(model, 8192) + OUTSIDE
    weights = {n: 2 * p.numel() for n, p in meta.meta_model(e2b_dir).named_parameters()}
    weights = {n: size for n, size in weights.items() if parts.part_of(n) != parts.LAYERS}
    weights |= {s.name: s.on_cuda for s in whole if s.part == parts.LAYERS and not s.buffer}
    layers = [f"model.language_model.layers.{index}" for index in reversed(range(35))]
    order = [PLE, *TOWERS, *layers]
    for tenths in (26, 19):
        found = plan(e2b_dir, tenths * GIB // 10, context=8192)
        assert found.ok
        names = on_cpu(found)
        assert names == order[: len(names)]
        assert found.device_map == {**dict.fromkeys(names, "cpu"), "": 0}
        fewer = names[: -2 if names[-1] in TOWERS else -1]
        kept = sum(s.on_cuda for s in whole if s.buffer or not parts.is_under(s.name, fewer))
        assert kept + fixed + streamed(weights, fewer[1:]) > found.gpu
    assert len(names) > len(order) - 35  # the last plan offloads layers


def streamed(weights, names):
    """GPU bytes of offloaded modules in a forward: three layers, or one other tensor."""
    layers, others = {}, [0]
    for name, size in weights.items():
        if not parts.is_under(name, names):
            continue
        before, dot, after = name.rpartition("layers.")
        if dot:
            layer = before + after.partition(".")[0]
            layers[layer] = layers.get(layer, 0) + size
        else:
            others.append(size)
    return max(max(others), sum(sorted(layers.values())[-3:]))


def test_offloaded_towers_are_in_bfloat16(e2b_dir):
    plain = {s.name: s.bytes for s in sizes.tensor_sizes(meta.meta_model(e2b_dir))}
    found = plan(e2b_dir, 27 * GIB // 10, context=8192)
    names = on_cpu(found)
    assert "model.vision_tower" in names
    assert not [name for name in names if parts.part_of(name) == parts.LAYERS]
    buffers = {n for n, _ in meta.meta_model(e2b_dir).named_buffers()}
    expected = sum(b for n, b in plain.items() if n not in buffers and parts.is_under(n, names))
    assert sum(part.cpu for part in found.parts) == expected


def test_offloaded_layers_are_in_4_bits(e2b_dir):
    found = plan(e2b_dir, 19 * GIB // 10, context=8192)
    whole = sizes.tensor_sizes(meta.meta_model(e2b_dir, meta.bnb_config("nf4")))
    names = [name for name in on_cpu(found) if parts.part_of(name) == parts.LAYERS]
    expected = sum(s.bytes for s in whole if not s.buffer and parts.is_under(s.name, names))
    (cpu,) = (part.cpu for part in found.parts if part.name == parts.LAYERS)
    assert cpu == expected > 0
    bf16 = plan(e2b_dir, 5 * GIB, quant="bf16", context=8192)
    assert max(part.cpu for part in bf16.parts if part.name == parts.LAYERS) > 2 * cpu / len(names)


@pytest.mark.parametrize("quant", meta.QUANTS)
def test_parts_add_up(model_dir, adapter_dir, quant):
    found = plan(model_dir, 100 * GIB, quant=quant, context=64, adapter=adapter_dir)
    assert found.weights == found.adapter + sum(part.gpu for part in found.parts)
    assert found.needed == found.weights + found.kv_cache + found.activations + OUTSIDE
    assert found.adapter == sum(size.on_cuda for size in sizes.adapter_sizes(adapter_dir))


def test_context_takes_memory(e2b_dir):
    short, long = (plan(e2b_dir, 24 * GIB, context=tokens) for tokens in (8192, 131072))
    # Of the 15 layers with a cache, 3 global ones keep all tokens: keys and values of width 512.
    more = 3 * 2 * 512 * 2 * (131072 - 8192)
    assert long.kv_cache - short.kv_cache == more
    assert long.activations > short.activations


def test_without_towers_and_per_layer_embeddings(tmp_path):
    """This model can offload nothing but layers."""
    text = {**E2B_TEXT, "hidden_size_per_layer_input": 0, "num_hidden_layers": 10}
    text |= {"layer_types": E2B_TEXT["layer_types"][:10], "num_kv_shared_layers": 0}
    folder = write_config(tmp_path, text)
    whole = plan(folder, 100 * GIB, context=256)
    assert [more.part for more in whole.further] == [parts.LAYERS]
    found = plan(folder, whole.needed - 1, context=256)
    assert on_cpu(found)[0] == "model.language_model.layers.9"


def test_no_gemma(llama_dir):
    whole = plan(llama_dir, GIB, context=16)
    assert whole.device_map == {"": 0}
    assert {part.name for part in whole.parts} == {parts.LAYERS, parts.EMBEDDINGS, parts.REST}


def test_does_not_fit(e2b_dir, capsys):
    assert main(["plan", str(e2b_dir), "--gpu", "1GiB", "--context", "4096"]) == 1
    printed = capsys.readouterr()
    assert "does NOT fit" in printed.out
    assert "from_pretrained" not in printed.out
    assert printed.err == ""


@pytest.mark.slow
def test_a_shorter_context_that_fits(e2b_dir):
    """The advised context fits; if no context fits, the message says so."""
    found = plan(e2b_dir, 3 * GIB // 2, context=131072)
    assert not found.ok
    assert f"--context {found.shorter} fits." in str(found)
    assert plan(e2b_dir, 3 * GIB // 2, context=found.shorter).ok
    assert not plan(e2b_dir, 3 * GIB // 2, context=2 * found.shorter).ok
    none = plan(e2b_dir, GIB // 2, context=131072)
    assert none.shorter is None
    assert "No --context fits." in str(none)
    assert plan(e2b_dir, 80 * GIB, context=131072).shorter is None


def test_an_adapter_of_another_model(e2b_dir, adapter_dir, capsys):
    assert main(["plan", str(e2b_dir), "--gpu", "12GiB", "--adapter", str(adapter_dir)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "does NOT fit: loading it stops with an error" in printed.err
    assert f"run gemma4-compat adapter {adapter_dir} --model {e2b_dir}" in printed.err


# -- the code -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "offloaded"), [("nf4", 0), ("nf4", 4), ("int8", 1), ("bf16", 3), ("bf16", 4)]
)
def test_pasted_code_loads(model_dir, quant, offloaded):
    """The printed code runs with the CPU in place of GPU 0: its names and options are valid."""
    room = plan(model_dir, 100 * GIB, quant=quant, context=16)
    less = sum(more.saves for more in room.further[:offloaded])
    found = plan(model_dir, room.needed - less, quant=quant, context=16)
    assert len({parts.part_of(name) for name in on_cpu(found)}) >= offloaded
    model = pasted(found)
    layer = model.model.language_model.layers[-1].mlp.up_proj
    assert type(layer).__name__ == {"nf4": "Linear4bit"}.get(quant, type(layer).__name__)
    held = sum(s.bytes for s in sizes.tensor_sizes(model) if not s.buffer)
    assert held >= sum(part.cpu for part in found.parts)
    with torch.no_grad():
        assert model(**text_inputs(model.config)).logits.isfinite().all()
    assert set(found.device_map) <= {name for name, _ in model.named_modules()}


def pasted(found):
    """The model that the printed code loads with the CPU in place of the GPU."""
    namespace = {}
    exec(re.sub(r'": 0,$', '": "cpu",', found.code, flags=re.MULTILINE), namespace)
    return namespace["model"]


def test_pasted_code_loads_the_adapter(model_dir, language_adapter_dir):
    pytest.importorskip("peft")
    model = pasted(plan(model_dir, 100 * GIB, context=16, adapter=language_adapter_dir))
    assert type(model).__name__ == "PeftModelForCausalLM"
    mlp = model.get_submodule("base_model.model.model.language_model.layers.0.mlp")
    assert type(mlp.up_proj.base_layer).__name__ == "Linear4bit"


def test_prompts_can_be_read_in_pieces(model_dir):
    """The estimate of activations assumes chunks; float32, as the order of sums differs."""
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompt = text_inputs(model.config)
    options = {"max_new_tokens": 8, "min_new_tokens": 8}
    whole = model.generate(**prompt, **options)
    assert torch.equal(model.generate(**prompt, **options, prefill_chunk_size=4), whole)


def test_quoting_of_folders(tmp_path, model_dir):
    import shutil

    folder = tmp_path / 'it\'s a "model"'
    folder.mkdir()
    shutil.copy(model_dir / "config.json", folder)
    code = plan(folder, 100 * GIB, quant="bf16", context=16).code
    line = code.split("from_pretrained(\n")[1].splitlines()[0]
    assert eval(line.strip().rstrip(",")) == str(folder)


# -- the command ----------------------------------------------------------------------------------


def test_table_and_code(e2b_dir, capsys):
    assert main(["plan", str(e2b_dir), "--gpu", "3GiB", "--context", "8192"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = [line for line in printed.out.splitlines() if str(e2b_dir) not in line]
    assert max(map(len, lines)) <= 80
    found = plan(e2b_dir, 3 * GIB, context=8192)
    assert str(found) == printed.out.rstrip("\n")
    assert any(re.fullmatch(r"loaded +1\.9\d GiB +4\.38 GiB", line) for line in lines)
    assert found.code in printed.out


def test_json(model_dir, adapter_dir, capsys):
    arguments = ["--gpu", "80 GB", "--quant", "int8", "--context", "100", "--json"]
    assert main(["plan", str(model_dir), *arguments, "--adapter", str(adapter_dir)]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = plan(model_dir, 80 * 10**9, quant="int8", context=100, adapter=adapter_dir)
    assert isinstance(expected, Plan)
    assert found == json.loads(json.dumps(expected.as_dict()))
    assert found["ok"] is True
    assert found["needed"] == expected.needed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12GiB", 12 * 2**30),
        ("12GB", 12 * 10**9),
        ("12 gib", 12 * 2**30),
        ("11.5GiB", int(11.5 * 2**30)),
        ("12288MiB", 12 * 2**30),
        ("1TB", 10**12),
    ],
)
def test_parse_size(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["12", "", "GiB", "-1GiB", "0GiB", "12Gib/s", "12 G", "1e3GB"])
def test_sizes_that_are_none(text, model_dir, capsys):
    with pytest.raises(InputError, match="write 12GiB"):
        parse_size(text)
    assert run_command("plan", model_dir, f"--gpu={text}") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"gemma4-compat plan: --gpu: {text!r} is not a size")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["MODEL", "--context", "0"], "'0' is not a whole number of 1 or more"),
        (["MODEL", "--context", "99999999999999"], "the model supports"),
        (["MODEL", "--adapter", "nowhere"], "nowhere: no such file or folder"),
        (["MODEL", "--adapter", "MODEL"], "no adapter_model.safetensors"),
    ],
    ids=["folder", "context", "long-context", "adapter", "no-adapter"],
)
def test_arguments_that_cannot_work(model_dir, arguments, message, capsys):
    given = [str(model_dir) if each == "MODEL" else each for each in arguments]
    assert run_command("plan", *given, "--gpu", "8GiB") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("gemma4-compat plan: ")
    assert message in line


def test_unknown_quant(model_dir):
    with pytest.raises(InputError, match="quant must be one of nf4, int8, bf16"):
        plan(model_dir, GIB, quant="fp4")
