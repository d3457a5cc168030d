"""``gemma4-compat map``, compared with what transformers and accelerate do with such maps."""

from __future__ import annotations

import json
import re

import pytest
import torch

from gemma4_compat.errors import InputError
from gemma4_compat.inspection.device_map import DeviceMapCheck, check_device_map
from gemma4_compat.model import meta, sizes
from gemma4_compat.model.device_maps import parse_map, read_map
from gemma4_compat.tiny import TOWERS
from tests.shapes import E2B_TEXT, VISION, write_config
from tests.support import assert_same, load_model, logits, offloaded, run_command

pytest.importorskip("bitsandbytes")

MIB = 2**20
SPLIT = {**dict.fromkeys(TOWERS, "cpu"), "": 0}
LAYER = "model.language_model.layers.{}"
PLE = "model.language_model.embed_tokens_per_layer"


@pytest.fixture(scope="module")
def deep_dir(tmp_path_factory):
    """A model with as many layers as E2B, and nothing else."""
    small = {"vocab_size": 512, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    return write_config(tmp_path_factory.mktemp("deep"), {**E2B_TEXT, **small})


@pytest.fixture(autouse=True)
def _everything_armed(pristine):
    pass


def trap(found, name):
    return next((trap for trap in found.traps if trap.name == name), None)


def on(found, device):
    return found.devices[device]


def run(*arguments):
    return run_command("map", *arguments)


# -- the users' maps ------------------------------------------------------------------------------


def test_the_users_map_works(e4b_dir):
    found = check_device_map(e4b_dir, SPLIT)
    assert found.ok
    assert not found.unknown
    assert not found.uncovered
    assert {t.level for t in found.traps} == {"note"}
    # In bfloat16 it saves the towers' parameters; quantized, their quantized size.
    towers = [p for n, p in meta.meta_model(e4b_dir).named_parameters() if n.startswith(TOWERS)]
    assert found.saves["bf16"] == pytest.approx(2 * sum(p.numel() for p in towers), rel=0.01)
    assert 200 * MIB < found.saves["nf4"] < found.saves["int8"] < found.saves["bf16"]
    assert str(found).endswith("\nfine")


def test_the_users_projector(model_dir):
    given = {"model.multi_modal_projector": "cpu", **SPLIT}
    found = check_device_map(model_dir, given)
    assert found.unknown == {"model.multi_modal_projector": "model.embed_vision"}
    assert "model.embed_vision, which is on GPU 0" in " ".join(str(found).split())
    assert not found.ok
    assert found.devices == check_device_map(model_dir, SPLIT).devices
    assert "model.multi_modal_projector is not a module of this model" in str(found)


@pytest.mark.parametrize(
    ("key", "closest"),
    [
        ("vision_tower", "model.vision_tower"),
        ("model.visoin_tower", "model.vision_tower"),
        ("model.audio_projector", "model.embed_audio"),
        ("language_model.layers.3", "model.language_model.layers.3"),
        ("no.such.thing.at.all", None),
    ],
)
def test_nearest_names(model_dir, key, closest):
    assert check_device_map(model_dir, {key: "cpu", "": 0}).unknown == {key: closest}


def test_a_part_that_the_checkpoint_goes_without(tmp_path):
    text = {**E2B_TEXT, "num_hidden_layers": 5, "num_kv_shared_layers": 0}
    text["layer_types"] = E2B_TEXT["layer_types"][:5]
    folder = write_config(tmp_path, text, VISION)
    config = json.loads((folder / "config.json").read_text())
    config["audio_config"] = None
    (folder / "config.json").write_text(json.dumps(config))
    found = check_device_map(folder, SPLIT)
    assert not found.unknown
    assert found.ok
    assert "model.audio_tower is not in this checkpoint" in str(found)


# -- bytes ----------------------------------------------------------------------------------------


def held(model):
    """Bytes on meta, which a hook onloads, and bytes on a device."""
    there = {"meta": 0, "cpu": 0}
    seen = set()
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            there[tensor.device.type] += tensor.numel() * tensor.element_size()
    return there


def test_bytes_are_those_of_a_loaded_model(model_dir, tmp_path):
    """The disk stands in for the CPU, and the CPU for the GPU."""
    given = {"model.vision_tower": "disk", LAYER.format(5): "disk", "": "cpu"}
    found = check_device_map(model_dir, given)
    model = load_model(model_dir, None, given, offload_folder=str(tmp_path))
    assert offloaded(model)
    there = held(model)
    assert on(found, "disk")["bf16"] == there["meta"]
    assert on(found, "CPU")["bf16"] == there["cpu"]


@pytest.mark.parametrize("quant", meta.QUANTS)
def test_entries_and_devices_are_the_whole_model(model_dir, quant):
    given = {PLE: "cpu", "model.vision_tower": "disk", LAYER.format(5): 1, "": 0}
    found = check_device_map(model_dir, given)
    config = meta.bnb_config(quant, offload=True)
    placed = sizes.tensor_sizes(meta.meta_model(model_dir, config, given))
    assert sum(entry[quant] for entry in found.entries.values()) == sum(s.bytes for s in placed)
    assert list(found.entries) == list(given)
    assert list(found.devices) == ["GPU 0", "GPU 1", "CPU", "disk"]
    assert on(found, "CPU")[quant] == 512 * 6 * 128 * 2
    rounded = sum(s.on_cuda for s in placed) - sum(s.bytes for s in placed)
    assert sum(d[quant] for d in found.devices.values()) - sum(s.bytes for s in placed) <= rounded


def test_what_plan_says_of_its_own_map(model_dir):
    """The GPU bytes equal those of the plan that made the map."""
    from gemma4_compat.planning import plan

    whole = plan(model_dir, 2**35, context=16)
    weights = whole.bytes_of("weights")
    for less in (0, weights // 3, weights // 2):
        planned = plan(model_dir, whole.needed[0] - less, context=16)
        found = check_device_map(model_dir, planned.device_map)
        assert found.ok
        assert on(found, "GPU 0")["nf4"] == planned.bytes_of("weights")
    assert len(planned.device_map) > 3


def test_everything_on_one_gpu(model_dir):
    found = check_device_map(model_dir, {"": "cuda:0"})
    assert found.ok
    assert not found.traps
    assert set(found.saves.values()) == {0}
    assert str(found).endswith("\nfine")


def test_everything_on_the_cpu_is_quantized(model_dir):
    found = check_device_map(model_dir, {"": "cpu"})
    assert found.ok
    assert not found.traps
    held = on(found, "CPU")
    assert held["nf4"] < held["int8"] < held["bf16"]


# -- what real loading does -----------------------------------------------------------------------


def test_uncovered_modules(model_dir, tmp_path):
    given = {"model.vision_tower": "disk", "model.language_model.layers": "cpu"}
    found = check_device_map(model_dir, given)
    assert "model.audio_tower" in found.uncovered
    assert "model.language_model.embed_tokens" in found.uncovered
    assert not any(name.startswith("model.language_model.layers") for name in found.uncovered)
    assert not found.ok
    with pytest.raises(ValueError, match="does not give any device for the following parameters"):
        load_model(model_dir, None, given, offload_folder=str(tmp_path))
    assert not check_device_map(model_dir, {**given, "": "cpu"}).uncovered


def test_uncovered_by_a_map_with_one_gpu(model_dir):
    found = check_device_map(model_dir, {"model.vision_tower": 0})
    assert "stay on the CPU without hooks" in " ".join(str(found).split())
    assert str(found).endswith('this map does not work: add "": 0, or another device for the rest')
    assert "loaded" not in str(found)  # uncovered modules have no total


def test_a_parameter_may_have_an_entry(model_dir):
    name = "model.language_model.embed_tokens.weight"
    found = check_device_map(model_dir, {name: 1, "": 0})
    assert not found.unknown
    assert on(found, "GPU 1")["bf16"] == meta.meta_model(model_dir).get_parameter(name).nbytes


def test_the_flag_that_quantized_models_want(model_dir):
    assert trap(check_device_map(model_dir, SPLIT), "offload_flag").level == "note"
    with pytest.raises(ValueError, match="llm_int8_enable_fp32_cpu_offload"):
        load_model(model_dir, "nf4", {"model.vision_tower": "disk", "": "cpu"})


def test_tied_weights_with_one_on_the_gpu(model_dir):
    """Tied weights are one tensor, and the head keeps it on the GPU."""
    found = check_device_map(model_dir, {"model.language_model.embed_tokens": "cpu", "": 0})
    assert trap(found, "tied").level == "warning"
    assert not found.ok
    assert set(found.saves.values()) == {0}
    both = {"model.language_model.embed_tokens": "cpu", "lm_head": "cpu", "": 0}
    assert check_device_map(model_dir, both).saves["bf16"] == 512 * 128 * 2


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tied_on_disk", {"model": "disk", "lm_head": "cpu"}),
        ("read_from_disk", {f"{LAYER.format(1)}.self_attn.q": "disk", "": "cpu"}),
    ],
)
def test_maps_that_raise_with_the_disk(model_dir, tmp_path, name, given):
    assert trap(check_device_map(model_dir, given), name).level == "error"
    with pytest.raises(ValueError, match="on the meta device"):
        logits(load_model(model_dir, None, given, offload_folder=str(tmp_path)))


def test_a_tied_head_on_the_disk(model_dir, tmp_path):
    given = {"lm_head": "disk", "": "cpu"}
    assert trap(check_device_map(model_dir, given), "tied_on_disk") is None
    found = logits(load_model(model_dir, None, given, offload_folder=str(tmp_path)))
    assert_same(found, logits(load_model(model_dir)))


def test_a_quantized_checkpoint(model_dir, tmp_path):
    saved = tmp_path / "quantized"
    load_model(model_dir, "nf4").save_pretrained(saved)
    assert check_device_map(saved, {"": 0}).ok
    given = {"model.vision_tower": "disk", "": "cpu"}
    found = check_device_map(saved, given)
    assert trap(found, "quantized_checkpoint").level == "error"
    from transformers import Gemma4ForConditionalGeneration

    with pytest.raises(ValueError, match="llm_int8_enable_fp32_cpu_offload"):
        Gemma4ForConditionalGeneration.from_pretrained(saved, device_map=given)


# -- traps ----------------------------------------------------------------------------------------


def test_a_layer_over_two_gpus(model_dir):
    found = check_device_map(model_dir, {LAYER.format(3) + ".mlp": 1, "": 0})
    assert LAYER.format(3) in trap(found, "split_layer").text
    found = check_device_map(model_dir, {LAYER.format(3) + ".mlp": "cpu", "": 0})
    assert trap(found, "split_layer") is None  # offloaded modules compute on the GPU


def test_what_the_map_keeps_from_being_quantized(model_dir):
    found = check_device_map(model_dir, SPLIT)
    linear = [
        module.weight.numel() * 2
        for name, module in meta.meta_model(model_dir).named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(TOWERS)
    ]
    assert f"{sum(linear) / MIB:.1f} MiB" in trap(found, "not_quantized").text
    assert on(found, "CPU")["nf4"] == on(found, "CPU")["bf16"]


def test_names_that_transformers_takes_for_patterns(deep_dir):
    """Older versions treat layers.3 as a pattern that also matches layers.30."""
    given = {LAYER.format(3): "cpu", "": 0}
    config = meta.bnb_config("nf4", offload=True)
    placed = meta.meta_model(deep_dir, config, given)
    kept = type(placed.get_submodule(LAYER.format(30) + ".mlp.up_proj")).__name__ == "Linear"
    found = trap(check_device_map(deep_dir, given), "not_quantized_by_name")
    assert (found is not None) is kept
    if kept:
        assert LAYER.format(30) in found.text
    # The root as a name: every name begins with it, in all versions.
    found = check_device_map(deep_dir, {"model.language_model": 0, "": "cpu"})
    assert trap(found, "not_quantized_by_name").level == "warning"
    assert on(found, "GPU 0")["nf4"] == on(found, "GPU 0")["bf16"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="what is there is known only with a GPU")
def test_a_gpu_that_is_not_there(model_dir):
    found = check_device_map(model_dir, {"": torch.cuda.device_count()})
    assert trap(found, "no_such_gpu").level == "error"


# -- other models -------------------------------------------------------------------------------


def test_llama(llama_dir):
    found = check_device_map(llama_dir, {"model.layers.1": "cpu", "": 0})
    assert found.ok
    assert found.architecture == "LlamaForCausalLM"
    unknown = check_device_map(llama_dir, SPLIT | {"model.vision_tower": 0}).unknown
    assert unknown["model.vision_tower"] is None


# -- maps that are none ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "empty"),
        ("auto", "is not a device map"),
        (["cpu"], "is not a device map such as"),
        ({"": None}, '"": None is not a device'),
        ({"": True}, "is not a device"),
        ({"": -1}, "is not a device"),
        ({"": "0"}, "is not a device"),
        ({"": "gpu"}, "is not a device"),
        ({"": "meta"}, "is not a device"),
        ({"": [0]}, "is not a device"),
        ({0: "cpu"}, "module names must be strings"),
    ],
)
def test_no_maps(model_dir, given, message):
    with pytest.raises(InputError, match=message):
        check_device_map(model_dir, given)


TOWER = {"model.vision_tower": "cpu", "": 0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"model.vision_tower": "cpu", "": 0}', TOWER),
        ("{'model.vision_tower': 'cpu', '': 0,}", TOWER),
        ("{\n    'model.vision_tower': 'cpu',  # offloaded\n    '': 0,\n}", TOWER),
        ("model.vision_tower=cpu,=0", TOWER),
        (" model.vision_tower = cpu , = 0 ", TOWER),
        ("model.vision_tower=cpu\n\n=0\n", TOWER),  # in a file
        ("=cuda:1", {"": "cuda:1"}),
    ],
)
def test_forms_of_a_map(text, expected, tmp_path, monkeypatch):
    """As an argument, in a file and from stdin; the order of the entries is kept."""
    assert list(parse_map(text).items()) == list(expected.items())
    for name, encoding in (("my map=1.txt", "utf-8"), ("m.json", "utf-8-sig"), ("m", "utf-16")):
        (tmp_path / name).write_text(text, encoding=encoding)
        assert read_map(str(tmp_path / name)) == expected
    monkeypatch.chdir(tmp_path)
    assert read_map("my map=1.txt") == expected
    with (tmp_path / "m").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert read_map("-") == expected


FORMS = r".*KEY=DEVICE pairs \(.*\), JSON or a Python dict, or name a file .*\(- reads stdin\)$"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'': 0", "^'{'': 0' is not a device map" + FORMS),
        ('{"": 0', "is not a device map" + FORMS),
        ("", "^'' is not a device map" + FORMS),
        (r"C:\my maps\m.json", r"^'C:\\my maps\\m.json' is not a device map" + FORMS),
        ("model.vision_tower", "is not a device map" + FORMS),
        (r"layers\.\d{1,2}=cpu,=0", "is not a device map" + FORMS),
        ("=0,model.vision_tower", "is not a device map" + FORMS),
        ("{**{}}", "is not a device map" + FORMS),
        ("{'': device}", "is not a device map" + FORMS),
        ("{[]: 0}", "is not a device map" + FORMS),
        ("{0: 0}", "module names must be strings"),
        ('{"a": 0, "": 0, "a": "cpu"}', '^"a" is in the device map twice: remove one of the'),
        ("=0,a=1,=cpu", '^"" is in the device map twice'),
        ("{1, 2}", "is not a device map" + FORMS),
        ("=gpu", r"'gpu' is not a device \(did you mean cpu"),
        ("=", "\"\": '' is not a device"),
        ("auto", "'auto' is not a device map" + FORMS),
        ("[]", "is not a device map" + FORMS),
        ("[" * 100_000, r"^'\[{57}\.\.\.' is not a device map"),
        ("{" * 100_000, "is not a device map" + FORMS),
    ],
)
def test_bad_maps(text, message, tmp_path):
    with pytest.raises(InputError, match=message) as raised:
        read_map(text)
    assert len(str(raised.value)) < 400
    assert "\n" not in str(raised.value)


def test_bad_map_files(tmp_path):
    for content, message in (
        (b"", "is not a device map"),
        (b"{", "is not a device map"),
        (b"\xff\x00\xff", "cannot be read: UnicodeDecodeError"),
    ):
        file = tmp_path / "map.json"
        file.write_bytes(content)
        with pytest.raises(InputError, match=message) as raised:
            read_map(str(file))
        assert str(raised.value).startswith(f"{file}")
        assert len(str(raised.value)) < 400


def test_several_maps(model_dir, capsys):
    tower = ("--map", "model.vision_tower=cpu")
    assert run(model_dir, *tower, "--map", "=0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["device_map"] == TOWER


def test_devices_as_torch_knows_them(model_dir):
    found = check_device_map(model_dir, {"": torch.device("cuda:1"), "model.vision_tower": "cuda"})
    assert list(found.devices) == ["GPU 0", "GPU 1"]


# -- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json"),
        ("{", "config.json: not JSON"),
        ("[]", "config.json: not a JSON object"),
        ("{}", "config.json: not a model's config"),
        ('{"model_type": "nothing_like_it"}', "config.json: not understood by transformers"),
    ],
)
def test_folders_that_are_none(tmp_path, content, message, capsys):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        check_device_map(tmp_path, {"": 0})
    assert str(tmp_path) in str(raised.value)
    assert run(tmp_path, "--map", '{"": 0}') == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("gemma4-compat map: ")
    assert str(tmp_path) in line


# -- the command ----------------------------------------------------------------------------------


def test_command(e2b_dir, capsys):
    longest = {PLE: "cpu", **SPLIT}
    assert run(e2b_dir, "--map", json.dumps(longest)) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"{PLE}  CPU") for line in lines), "names are to be copied"
    assert lines[-1] == "fine"
    assert printed.err == ""


def test_exit_codes(model_dir, capsys):
    assert run(model_dir, "--map", '{"model.multi_modal_projector": "cpu", "": 0}') == 1
    assert "model.embed_vision" in capsys.readouterr().out
    assert run(model_dir, "--map", "{'': 0") == 2
    assert capsys.readouterr().err.startswith("gemma4-compat map: --map: ")
    assert run("nowhere", "--map", '{"": 0}') == 2
    assert capsys.readouterr().err == "gemma4-compat map: nowhere: no such folder\n"


def test_json(model_dir, capsys):
    given = {"model.multi_modal_projector": "cpu", **SPLIT}
    assert run(model_dir, "--map", json.dumps(given), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    expected = check_device_map(model_dir, given)
    assert isinstance(expected, DeviceMapCheck)
    assert found == json.loads(json.dumps(expected.as_dict()))
    assert set(found) == {
        "model", "architecture", "device_map", "unknown", "uncovered", "entries", "devices",
        "saves", "traps", "ok",
    }  # fmt: skip
    assert found["ok"] is False
    assert found["unknown"] == {"model.multi_modal_projector": "model.embed_vision"}


@pytest.mark.parametrize("key", ["model.layers[0", "C:\\Users\\me\\model", "("])
def test_keys_that_are_no_patterns(model_dir, key):
    """transformers treats the names as regular expressions when it quantizes."""
    found = check_device_map(model_dir, {key: "cpu", "": 0})
    assert list(found.unknown) == [key]
    assert found.saves == dict.fromkeys(meta.QUANTS, 0)


def trap_names(found):
    return {trap.name for trap in found.traps}


def test_a_quantized_checkpoint_as_it_is(model_dir, tmp_path):
    load_model(model_dir, "nf4").save_pretrained(tmp_path)
    found = check_device_map(tmp_path, {"": 0})
    assert trap(found, "quantized_already").level == "note"
    assert "bitsandbytes" in trap(found, "quantized_already").text
    assert "quantized_already" not in trap_names(check_device_map(model_dir, {"": 0}))
