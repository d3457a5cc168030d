"""Adapters in vLLM: what it applies, and the copies for it, compared with the real PEFT.

The counts of layers are those of ``LoRAModelManager.modules`` of vLLM 0.32 for the same configs.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from gemma4_compat.engine.gate import holds
from gemma4_compat.errors import InputError
from gemma4_compat.inspection.adapter import inspect_adapter
from gemma4_compat.inspection.served import PROJECTIONS, Served, check_served, export_for_peft
from gemma4_compat.inspection.targets import base_model_of
from tests.support import load_model, run_command, save_random

peft = pytest.importorskip("peft")

WEIGHTS = "adapter_model.safetensors"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def tensors_of(folder):
    return load_file(folder / WEIGHTS)


def renamed(folder, to, old, new, **config):
    """A copy of an adapter with other names of tensors."""
    to.mkdir()
    save_file({k.replace(old, new): v for k, v in tensors_of(folder).items()}, to / WEIGHTS)
    said = json.loads((folder / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps(said | config))
    return to


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory):
    """26B-A4B in small: fused experts, and layers whose k_proj also computes the values."""
    folder = tmp_path_factory.mktemp("experts")
    save_random("Gemma4 experts", folder, attention_k_eq_v=True, num_global_key_value_heads=1)
    return folder


def experts_adapter(experts_dir, to, **options):
    """A random adapter for all linear layers and experts; the model that has it loaded."""
    from transformers import Gemma4ForCausalLM

    if holds("peft<0.19"):
        pytest.skip("this PEFT takes the inputs of experts for their outputs; vLLM refuses that")
    base = Gemma4ForCausalLM.from_pretrained(experts_dir, dtype=torch.float32)
    options = {"target_parameters": EXPERTS, **options}
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(to)
    return model


def reasons(found):
    return " / ".join(f"{group.kind} {group.count}: {group.reason}" for group in found.groups)


# -- what vLLM does --------------------------------------------------------------------------------


def test_layers_are_those_of_vllm(model_dir, experts_dir):
    layers = Served.of(base_model_of(model_dir)).layers
    starts = ("language_model.", "vision_tower.", "audio_tower.", "embed_")
    assert [sum(n.startswith(start) for n in layers) for start in starts] == [49, 15, 24, 2]
    found = Served.of(base_model_of(experts_dir))
    # seven projections and a router in each of six layers, and 32 experts of three projections
    assert len(found.layers) == 6 * (7 + 1 + 32 * 3)
    assert found.layers["model.layers.5.self_attn.v_proj"] == (128, 128)


def test_language_adapter(language_adapter_dir, model_dir):
    found = check_served(language_adapter_dir, model_dir)
    assert found.ok
    assert found.applied == found.tensors == len(tensors_of(language_adapter_dir))
    assert found.options == found.groups == ()


def test_towers_need_an_option(adapter_dir, model_dir):
    found = check_served(adapter_dir, model_dir)
    assert found.ok
    assert found.options == ("--enable-tower-connector-lora",)
    assert "--enable-lora --enable-tower-connector-lora --lora-modules" in str(found)


@pytest.mark.parametrize(
    ("old", "new"),
    [(".model.model.language_model.", new) for new in (".model.language_model.", ".model.")],
)
def test_names_that_vllm_leaves_out(language_adapter_dir, model_dir, tmp_path, old, new):
    """Adapters of Gemma4Model and of Gemma4TextModel."""
    folder = renamed(language_adapter_dir, tmp_path / "in", old, new)
    found = check_served(folder, model_dir)
    assert not found.ok
    assert found.applied == 0
    assert [group.kind for group in found.groups] == ["ignored"]
    assert "raises no error; --export FOLDER" in found.verdict
    copy = check_served(folder, model_dir, export=tmp_path / "out")
    assert copy.ok
    assert copy.written == tmp_path / "out"
    found, expected = tensors_of(tmp_path / "out"), tensors_of(language_adapter_dir)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_names_of_the_text_only_class(language_adapter_dir, model_dir, tmp_path):
    folder = renamed(language_adapter_dir, tmp_path / "in", "model.language_model.", "model.")
    assert check_served(folder, model_dir).ok


def test_names_of_vllm(language_adapter_dir, model_dir, tmp_path):
    own = "model.language_model.", "language_model.model."
    folder = renamed(language_adapter_dir, tmp_path / "in", *own)
    assert check_served(folder, model_dir).ok
    export_for_peft(folder, model_dir, tmp_path / "out")
    assert inspect_adapter(tmp_path / "out", model_dir).ok


def test_wrappers_without_their_layer(outer_adapter_dir, model_dir, tmp_path):
    found = check_served(outer_adapter_dir, model_dir)
    assert [group.kind for group in found.groups] == ["ignored"]
    assert check_served(outer_adapter_dir, model_dir, export=tmp_path / "out").ok


def test_names_with_an_adapters_name(language_adapter_dir, model_dir, tmp_path):
    folder = renamed(language_adapter_dir, tmp_path / "in", ".weight", ".default.weight")
    found = check_served(folder, model_dir)
    assert [group.kind for group in found.groups] == ["refused"]
    assert check_served(folder, model_dir, export=tmp_path / "out").ok


def test_layers_that_share_keys_and_values(language_adapter_dir, model_dir, tmp_path):
    folder = renamed(language_adapter_dir, tmp_path / "in", "", "")
    tensors = tensors_of(folder)
    start = "base_model.model.model.language_model.layers.5.self_attn.k_proj.lora_"
    tensors |= {f"{start}A.weight": torch.zeros(4, 128), f"{start}B.weight": torch.zeros(128, 4)}
    save_file(tensors, folder / WEIGHTS)
    found = check_served(folder, model_dir)
    assert found.ok
    assert reasons(found).startswith("ignored 2: layers 3 to 5 reuse")


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"bias": "lora_only"},
        {"modules_to_save": ["embed_tokens"]},
        {"init_lora_weights": "pissa"},
        {"peft_type": "LOHA"},
        {"r": 1024},
    ],
)
def test_config_that_vllm_refuses(language_adapter_dir, model_dir, tmp_path, config):
    folder = renamed(language_adapter_dir, tmp_path / "in", "", "", **config)
    found = check_served(folder, model_dir)
    assert f"{next(iter(config))} is" in reasons(found)
    assert found.verdict == "vLLM 0.33.0 refuses it; serve the merged model instead: " + (
        "gemma4-compat merge"
    )


def test_high_rank(language_adapter_dir, model_dir, tmp_path):
    folder = renamed(language_adapter_dir, tmp_path / "in", "", "", rank_pattern={"q_proj": 40})
    assert check_served(folder, model_dir).options == ("--max-lora-rank 64",)


def test_other_tensors_and_widths(language_adapter_dir, model_dir, tmp_path):
    folder = renamed(language_adapter_dir, tmp_path / "in", "", "")
    start = "base_model.model.model.language_model."
    embedding = {f"{start}embed_tokens.lora_embedding_A": torch.zeros(4, 512)}
    wide = {f"{start}layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 256)}
    other = {f"{start}layers.0.mlp.else.lora_A.weight": torch.zeros(4, 128)}
    save_file(tensors_of(folder) | embedding | wide | other, folder / WEIGHTS)
    found = check_served(folder, model_dir)
    assert [group.kind for group in found.groups] == ["refused"] * 3
    assert not found.exportable


@pytest.mark.parametrize(("lacks", "has"), ["AB", "BA"])
def test_half_of_a_pair(language_adapter_dir, model_dir, tmp_path, lacks, has):
    folder = renamed(language_adapter_dir, tmp_path / "in", "", "")
    tensors = tensors_of(folder)
    del tensors[f"base_model.model.model.language_model.layers.0.mlp.up_proj.lora_{lacks}.weight"]
    save_file(tensors, folder / WEIGHTS)
    found = check_served(folder, model_dir)
    assert f"refused 1: the file has no lora_{lacks} for them" in reasons(found)
    assert f"up_proj.lora_{has}" in found.groups[0].example
    assert not found.exportable


def test_sglang(language_adapter_dir, model_dir):
    found = check_served(language_adapter_dir, model_dir, "sglang")
    assert found.applied == 0
    assert "gemma4-compat merge" in found.verdict


def text_model(folder):
    from transformers import Gemma4ForCausalLM

    return Gemma4ForCausalLM.from_pretrained(folder)


# -- the copy --------------------------------------------------------------------------------------


def update(tensors, layer, scaling):
    """What vLLM adds to a layer's weight."""
    left, right = (tensors[f"base_model.model.{layer}.lora_{which}.weight"] for which in "BA")
    return scaling * left @ right


def scaling_in_vllm(config, layer):
    """The scaling of a layer, with the patterns read as vLLM's PEFTHelper reads them."""
    import re

    def first(pattern, default):
        found = (v for k, v in pattern.items() if re.match(rf"(.*\.)?({k})$", layer))
        return next(found, default)

    rank = first(config["rank_pattern"], config["r"])
    alpha = first(config["alpha_pattern"], config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {
            "rank_pattern": {"k_proj": 4, "experts.gate_up_proj": 3},
            "alpha_pattern": {"k_proj": 16, r"layers.[01].experts.down_proj": 1},
        },
        {"target_parameters": ["experts.gate_up_proj"]},
        {"target_parameters": ["experts.down_proj"]},
    ],
    ids=["plain", "rslora", "patterns", "gate_up", "down"],
)
def test_copy_has_the_updates_of_peft(experts_dir, tmp_path, options):
    model = experts_adapter(experts_dir, tmp_path / "in", **options)
    before = check_served(tmp_path / "in", experts_dir)
    assert {group.kind for group in before.groups} == {"in part", "refused"}
    assert before.exportable
    copy = check_served(tmp_path / "in", experts_dir, export=tmp_path / "out")
    assert copy.ok
    tensors = tensors_of(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())

    def same(layer, expected):
        found = update(tensors, layer, scaling_in_vllm(config, layer))
        torch.testing.assert_close(found, expected)  # the products are summed in another order

    seen = 0
    for path, module in model.get_base_model().named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        layer = path.replace(".base_layer", "")
        delta = module.get_delta_weight("default").detach()
        for number in range(len(delta)) if delta.ndim == 3 else ():
            parts = {"down_proj": delta[number]}
            if module.parameter_name == "gate_up_proj":
                parts = dict(zip(PROJECTIONS, delta[number].chunk(2), strict=False))
            for projection, expected in parts.items():
                same(f"{layer}.{number}.{projection}", expected)
                seen += 1
        if delta.ndim == 2:
            same(layer, delta)
            seen += 1
            if layer.endswith("layers.2.self_attn.k_proj"):
                same(layer.replace("k_proj", "v_proj"), delta)
                seen += 1
    assert seen >= 6 * 8 - 1
    zeros = [n for n in tensors if ".experts." in n and not tensors[n].any()]
    assert bool(zeros) == ("target_parameters" in options)


PATTERNS = {
    "wrappers": (load_model, {"q_proj": 32}),
    "the model of text": (text_model, {"model.layers.0.self_attn.q_proj": 32}),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_patterns_that_miss_the_names_in_a_file(model_dir, tmp_path, case):
    load, pattern = PATTERNS[case]
    torch.manual_seed(0)
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(r=4, lora_alpha=8, alpha_pattern=pattern, **options)
    model = peft.get_peft_model(load(model_dir).float(), config)
    model.save_pretrained(tmp_path / "in")
    before = check_served(tmp_path / "in", model_dir)
    if case == "wrappers":
        assert "in part" in reasons(before)
        assert "alpha_pattern names the wrapper" in reasons(before)
        assert before.exportable
    assert check_served(tmp_path / "in", model_dir, export=tmp_path / "out").ok
    export_for_peft(tmp_path / "out", model_dir, tmp_path / "back")
    found = tensors_of(tmp_path / "out")
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    again = load_model(model_dir).float()
    again = peft.PeftModel.from_pretrained(again, tmp_path / "back").get_base_model()
    seen = 0
    for path, module in model.get_base_model().named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        layer = path
        if case != "wrappers":
            layer = path.replace("model.", "model.language_model.", 1)
        delta = module.get_delta_weight("default").detach()
        torch.testing.assert_close(update(found, layer, scaling_in_vllm(said, layer)), delta)
        assert torch.equal(again.get_submodule(layer).get_delta_weight("default"), delta)
        seen += 1
    assert seen > 8


@pytest.mark.parametrize("options", [{}, {"rank_pattern": {"experts.gate_up_proj": 3}}])
def test_there_and_back(experts_dir, tmp_path, options):
    from transformers import Gemma4ForCausalLM

    model = experts_adapter(experts_dir, tmp_path / "in", **options).eval()
    check_served(tmp_path / "in", experts_dir, export=tmp_path / "out")
    assert not inspect_adapter(tmp_path / "out", experts_dir).ok
    export_for_peft(tmp_path / "out", experts_dir, tmp_path / "back")
    assert inspect_adapter(tmp_path / "back", experts_dir).ok
    found, expected = tensors_of(tmp_path / "back"), tensors_of(tmp_path / "in")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    base = Gemma4ForCausalLM.from_pretrained(experts_dir, dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(*(each(torch.arange(3, 20)[None]).logits for each in (model, again)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.2.self_attn.v_proj.lora_B", "one weight computes keys and values"),
        ("layers.0.experts.3.up_proj.lora_A", "PEFT has one lora_A for gate_proj and up_proj"),
    ],
)
def test_what_peft_cannot_hold(experts_dir, tmp_path, name, message):
    experts_adapter(experts_dir, tmp_path / "in")
    check_served(tmp_path / "in", experts_dir, export=tmp_path / "out")
    tensors = tensors_of(tmp_path / "out")
    tensors[f"base_model.model.model.{name}.weight"] += 1
    save_file(tensors, tmp_path / "out" / WEIGHTS)
    with pytest.raises(InputError, match=message):
        export_for_peft(tmp_path / "out", experts_dir, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_experts_that_lack_one(experts_dir, tmp_path):
    experts_adapter(experts_dir, tmp_path / "in")
    check_served(tmp_path / "in", experts_dir, export=tmp_path / "out")
    tensors = tensors_of(tmp_path / "out")
    for which in "AB":
        del tensors[f"base_model.model.model.layers.0.experts.3.up_proj.lora_{which}.weight"]
    save_file(tensors, tmp_path / "out" / WEIGHTS)
    found = check_served(tmp_path / "out", experts_dir)
    assert reasons(found) == "refused 4: an expert lacks one of its three projections"
    assert found.exportable
    with pytest.raises(InputError, match="not the same tensors for all experts"):
        export_for_peft(tmp_path / "out", experts_dir, tmp_path / "back")


# -- the command -----------------------------------------------------------------------------------


def test_command(language_adapter_dir, model_dir, tmp_path, capsys):
    own = "model.model.language_model.", "model.language_model."
    folder = renamed(language_adapter_dir, tmp_path / "in", *own)
    arguments = ("adapter", folder, "--model", model_dir, "--for", "vllm")
    assert run_command(*arguments) == 1
    assert "and raises no error; --export FOLDER" in capsys.readouterr().out.replace("\n", " ")
    assert run_command(*arguments, "--export", tmp_path / "out") == 0
    assert f"NAME={tmp_path / 'out'}" in capsys.readouterr().out
    back = ("adapter", tmp_path / "out", "--model", model_dir, "--export", tmp_path / "back")
    assert run_command(*back) == 0
    capsys.readouterr()
    assert run_command(*arguments, "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_command_names_what_is_wrong(language_adapter_dir, model_dir, llama_dir, tmp_path, capsys):
    for arguments, message in (
        (("--for", "vllm"), "--for and --export need --model"),
        (("--for", "vllm", "--model", model_dir, "--export", tmp_path), "cannot be written"),
        (
            ("--for", "vllm", "--model", model_dir, "--export", tmp_path / "a/b"),
            "cannot be written",
        ),
        (
            ("--for", "sglang", "--model", model_dir, "--export", tmp_path / "c"),
            "vllm and for peft",
        ),
        (("--for", "vllm", "--model", llama_dir), "a LlamaForCausalLM, and not one of"),
    ):
        assert run_command("adapter", language_adapter_dir, *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
