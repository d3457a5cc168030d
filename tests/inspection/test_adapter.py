"""Inspected adapters, compared with what the real PEFT saves and loads."""

from __future__ import annotations

import json
import re
import struct

import pytest
import torch
from safetensors.torch import load, save_file

import gemma4_compat
from gemma4_compat.errors import InputError
from gemma4_compat.inspection import inspect_adapter
from gemma4_compat.tiny import BROAD_TARGETS
from tests import damage
from tests.files.test_checkpoint import header_only
from tests.shapes import E2B_TEXT, VISION, write_config
from tests.support import load_model, new_model, run_command

peft = pytest.importorskip("peft")

WEIGHTS = "adapter_model.safetensors"
SHARED = "base_model.model.model.language_model.layers.5.self_attn"


def run(*arguments):
    return run_command("adapter", *arguments)


def changed(folder, to, tensors=lambda tensors: tensors, **config):
    """A copy of an adapter with changed tensors and config entries."""
    to.mkdir(exist_ok=True)
    save_file(tensors(load((folder / WEIGHTS).read_bytes())), to / WEIGHTS)
    said = json.loads((folder / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps(said | config))
    return to


def peft_loads(model, folder):
    """The number of tensors in the file that PEFT loads, and of those that it ignores."""
    model = peft.PeftModel.from_pretrained(model, folder)
    left_out = model.load_adapter(folder, "again").unexpected_keys
    # PEFT makes VeRA's matrices from a seed; PEFT < 0.21 reports those in the file as unexpected.
    left_out = [key for key in left_out if ".vera_A" not in key and ".vera_B" not in key]
    return len(load((folder / WEIGHTS).read_bytes())) - len(left_out), len(left_out)


def peft_misses(model, folder):
    """The number of tensors that PEFT expects and the file lacks."""
    model = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(folder))
    tensors = load((folder / WEIGHTS).read_bytes())
    missing = peft.set_peft_model_state_dict(model, tensors).missing_keys
    return sum(".default" in key for key in missing)


def without(folder, to, lacks):
    """A copy of an adapter without the tensors whose names this expression matches."""

    def cut(tensors):
        return {name: each for name, each in tensors.items() if not re.search(lacks, name)}

    return changed(folder, to, cut)


def counts(fit, kind):
    return sum(group.count for group in fit.groups if group.kind == kind)


def reasons(fit):
    return " / ".join(f"{group.kind} {group.count}: {group.reason}" for group in fit.groups)


# -- the header ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["inner", "outer"])
def test_what_it_holds(adapter_dir, outer_adapter_dir, model_dir, layout):
    folder = adapter_dir if layout == "inner" else outer_adapter_dir
    tensors = load((folder / WEIGHTS).read_bytes())
    found = inspect_adapter(folder)
    assert found.kind == "LoRA"
    assert found.tensors == len(tensors) == sum(tower["tensors"] for tower in found.towers.values())
    assert found.parameters == sum(t.numel() for t in tensors.values())
    assert found.bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    assert found.dtypes == {"F32": len(tensors)}
    assert found.ranks == {4: len(tensors) // 2}
    assert found.rank == 4
    assert found.base_model == str(model_dir)
    assert found.target_modules == tuple(sorted(BROAD_TARGETS))
    for name, part in (("language", "language_model"), ("vision", "vision_"), ("audio", "audio_")):
        assert found.towers[name]["tensors"] == sum(part in key for key in tensors)
    assert found.towers["audio"]["layers"] == 6
    assert found == inspect_adapter(folder / WEIGHTS)


def test_ranks_and_dtypes(model_dir, tmp_path):
    config = peft.LoraConfig(
        r=4, target_modules=r".*language_model.*\.[qo]_proj", rank_pattern={"o_proj": 8}
    )
    model = peft.get_peft_model(new_model(model_dir), config)
    model.get_submodule("base_model.model.model.language_model.layers.0").bfloat16()
    model.save_pretrained(tmp_path)
    found = inspect_adapter(tmp_path)
    assert found.ranks == {4: 6, 8: 6}
    assert found.dtypes == {"BF16": 4, "F32": 20}


@pytest.mark.usefixtures("native_adapters")
@pytest.mark.parametrize("prefix", [True, False])
def test_saved_by_transformers(model_dir, tmp_path, prefix):
    """transformers loads its own format, too; PEFT does not."""
    model = new_model(model_dir)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=r".*language_model.*\.q_proj"))
    model.save_pretrained(tmp_path, save_peft_format=prefix)
    found = inspect_adapter(tmp_path, model_dir)
    assert found.towers == {"language": {"tensors": 12, "layers": 6}}
    assert found.ok == prefix
    assert (found.loads, counts(found, "ignored")) == ((12, 0) if prefix else (0, 12))
    new_model(model_dir).load_adapter(tmp_path)


def test_names_that_peft_ignores(language_adapter_dir, model_dir, tmp_path):
    """PEFT loads none of these tensors, without an error; the named way out works."""

    def without_prefix(tensors):
        return {name.removeprefix("base_model.model."): t for name, t in tensors.items()}

    def with_prefix(tensors):
        return {f"base_model.model.{name}": t for name, t in tensors.items()}

    folder = changed(language_adapter_dir, tmp_path / "bare", without_prefix)
    found = inspect_adapter(folder, model_dir)
    assert peft_loads(new_model(model_dir), folder) == (0, found.tensors)
    assert (found.loads, counts(found, "ignored"), counts(found, "missing")) == (0, 72, 0)
    assert "PEFT ignores names that do not begin with 'base_model.model.'" in reasons(found)
    assert found.verdict == "does NOT fit: none of its tensors would load"
    folder = changed(folder, tmp_path / "again", with_prefix)
    assert inspect_adapter(folder, model_dir).ok
    assert peft_loads(new_model(model_dir), folder) == (72, 0)


def test_e2b_adapter(e2b_dir, tmp_path):
    """The counts are the users'; a file that is cut off is refused."""
    from transformers import Gemma4ForConditionalGeneration

    from gemma4_compat.model import meta

    with torch.device("meta"):
        config = peft.LoraConfig(r=2, target_modules=BROAD_TARGETS)
        model = peft.get_peft_model(meta.meta_model(e2b_dir), config)
    assert isinstance(model.get_base_model(), Gemma4ForConditionalGeneration)
    tensors = {
        name.replace(".default.", "."): torch.zeros(parameter.shape)
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    for layer in range(15, 35):  # as trained with transformers 5.5.0
        heads = 512 if layer % 5 == 4 else 256
        for name in "kv":
            key = SHARED.replace("layers.5", f"layers.{layer}") + f".{name}_proj"
            tensors[f"{key}.lora_A.weight"] = torch.zeros(2, 1536)
            tensors[f"{key}.lora_B.weight"] = torch.zeros(heads, 2)
    save_file(tensors, tmp_path / WEIGHTS)
    config.save_pretrained(tmp_path)
    header_only(tmp_path / WEIGHTS)
    found = inspect_adapter(tmp_path)
    assert {name: tower["tensors"] for name, tower in found.towers.items()} == {
        "language": 490, "vision": 224, "audio": 72,
    }  # fmt: skip
    damage.CUT_OFF[0](tmp_path / WEIGHTS)
    with pytest.raises(InputError, match=damage.CUT_OFF[1]):
        inspect_adapter(tmp_path)


KINDS = {
    "DoRA": (peft.LoraConfig, {"r": 4, "use_dora": True}),
    "LOHA": (peft.LoHaConfig, {"r": 4}),
    "LOKR": (peft.LoKrConfig, {"r": 4}),
    "IA3": (peft.IA3Config, {"feedforward_modules": []}),
    "OFT": (peft.OFTConfig, {"r": 0, "oft_block_size": 32}),
    "BOFT": (peft.BOFTConfig, {}),
    "HRA": (peft.HRAConfig, {"r": 4}),
    "VERA": (peft.VeraConfig, {"r": 4}),
    "ADALORA": (peft.AdaLoraConfig, {"init_r": 4, "total_step": 9}),
    "FOURIERFT": (peft.FourierFTConfig, {"n_frequency": 9}),
    "VBLORA": (peft.VBLoRAConfig, {"num_vectors": 8, "vector_length": 32}),
}


if hasattr(peft, "LilyConfig"):
    KINDS["LILY"] = (peft.LilyConfig, {"r": 4})


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds(model_dir, tmp_path, kind):
    config, options = KINDS[kind]
    config = config(target_modules=r".*language_model.*\.per_layer_input_gate", **options)
    peft.get_peft_model(new_model(model_dir), config).save_pretrained(tmp_path)
    found = inspect_adapter(tmp_path, model_dir)
    tensors = load((tmp_path / WEIGHTS).read_bytes())
    assert found.kind == kind
    assert found.tensors == len(tensors)
    assert found.ok, reasons(found)
    assert (found.loads, 0) == peft_loads(new_model(model_dir), tmp_path)
    folder = without(tmp_path, tmp_path / "cut", r"layers\.1\.")
    fit = inspect_adapter(folder, model_dir)
    # PEFT also misses what it does not save, such as the ranks of AdaLoRA.
    misses = [peft_misses(new_model(model_dir), each) for each in (folder, tmp_path)]
    assert counts(fit, "missing") == misses[0] - misses[1] > 0


def test_whole_tensors_come_along(model_dir, tmp_path):
    saved = "per_layer_projection_norm"
    config = peft.LoraConfig(r=4, target_modules=["per_layer_input_gate"], modules_to_save=[saved])
    peft.get_peft_model(new_model(model_dir), config).save_pretrained(tmp_path)
    found = inspect_adapter(tmp_path, model_dir)
    assert found.ok
    assert (found.loads, 0) == peft_loads(new_model(model_dir), tmp_path)


# -- with a model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["inner", "outer"])
def test_fits_with_the_patch(adapter_dir, outer_adapter_dir, model_dir, layout):
    folder = adapter_dir if layout == "inner" else outer_adapter_dir
    fit = inspect_adapter(folder, model_dir)
    assert fit.ok
    assert fit.needs == ("clippable_linear",)
    assert (fit.loads, counts(fit, "ignored")) == peft_loads(new_model(model_dir), folder)
    assert fit.verdict == "fits, with the patch clippable_linear"


def test_fits_without(language_adapter_dir, model_dir):
    fit = inspect_adapter(language_adapter_dir, new_model(model_dir))
    assert (fit.ok, fit.needs, fit.groups) == (True, (), ())
    assert (fit.loads, 0) == peft_loads(new_model(model_dir), language_adapter_dir)


#: the targets that a user wrote into the config of such an adapter, to avoid the wrappers
USERS_TARGETS = (
    r".*(?:model\.language_model\.layers\.\d+\.(?:self_attn|mlp)\.(?:q_proj|k_proj|v_proj|o_proj|"
    r"gate_proj|up_proj|down_proj)|model\.vision_tower\.encoder\.layers\.\d+\.(?:self_attn|mlp)\."
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)\.linear|model\.audio_tower\."
    r"layers\.\d+\.self_attn\.(?:q_proj|k_proj|v_proj)\.linear)$"
)


@pytest.mark.parametrize("layout", ["inner", "outer"])
@pytest.mark.parametrize(
    "targets",
    [BROAD_TARGETS, USERS_TARGETS, r".*\.(q|k|v|o|gate|up|down)_proj(\.linear)?"],
    ids=["broad", "users", "both"],
)
def test_names_the_patch_where_it_is_needed(
    adapter_dir, outer_adapter_dir, model_dir, tmp_path, layout, targets
):
    """Without a needed patch PEFT raises or ignores tensors; if none is needed, it does not."""
    folder = adapter_dir if layout == "inner" else outer_adapter_dir
    folder = changed(folder, tmp_path, target_modules=targets)
    found = inspect_adapter(folder, model_dir)
    assert found.ok
    assert (found.loads, 0) == peft_loads(new_model(model_dir), folder)
    assert bool(found.needs) == (layout == "outer" or targets != USERS_TARGETS)
    with gemma4_compat.disabled("clippable_linear"):
        if targets != USERS_TARGETS:
            with pytest.raises(ValueError, match=r"(?s)Target module .*ClippableLinear.* is not"):
                peft_loads(new_model(model_dir), folder)
        else:
            left_out = peft_loads(new_model(model_dir), folder)[1]
            assert bool(left_out) == bool(found.needs)


def test_language_adapter_with_broad_targets(language_adapter_dir, model_dir, tmp_path):
    """PEFT creates adapters on the towers too, though the file has no tensors for them."""
    folder = changed(language_adapter_dir, tmp_path, target_modules=BROAD_TARGETS)
    fit = inspect_adapter(folder, model_dir)
    assert fit.ok
    assert fit.needs == ("clippable_linear",)
    assert (fit.loads, counts(fit, "ignored")) == peft_loads(new_model(model_dir), folder)


def test_layers_that_share_keys_and_values(adapter_dir, model_dir, tmp_path):
    extra = {
        f"{SHARED}.k_proj.lora_A.weight": torch.ones(4, 128),
        f"{SHARED}.k_proj.lora_B.weight": torch.ones(128, 4),
    }
    folder = changed(adapter_dir, tmp_path, lambda tensors: tensors | extra)
    found = inspect_adapter(folder, model_dir)
    assert found.ok
    ignored = counts(found, "ignored")
    assert (found.loads, ignored) == peft_loads(new_model(model_dir), folder)
    assert "layers 3 to 5 reuse the keys and values of earlier layers" in reasons(found)


def text_only(folder):
    """The same model without towers, as its text-only class."""
    from transformers import Gemma4ForCausalLM

    with torch.random.fork_rng(devices=[]):
        return Gemma4ForCausalLM(load_model(folder).config.text_config)


def test_trained_on_the_text_only_class(model_dir, tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    peft.get_peft_model(text_only(model_dir), config).save_pretrained(tmp_path)
    found = inspect_adapter(tmp_path, model_dir)
    assert (found.loads, 0) == peft_loads(new_model(model_dir), tmp_path) == (12, 0)
    assert found.ok
    assert found.needs == ("clippable_linear", "text_model_adapter")
    assert "fits, with the patch clippable_linear, text_model_adapter" in str(found)


def test_for_the_text_only_class(language_adapter_dir, model_dir, tmp_path):
    """An adapter of the whole model, inspected for its text-only class."""
    model = text_only(model_dir)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    folder = changed(language_adapter_dir, tmp_path, target_modules=names)
    fit = inspect_adapter(folder, model)
    assert (fit.loads, counts(fit, "ignored")) == peft_loads(model, folder)
    assert fit.ok
    assert fit.needs == ("text_model_adapter",)


def test_for_the_text_only_class_with_other_targets(language_adapter_dir, model_dir, tmp_path):
    model = text_only(model_dir)
    folder = changed(language_adapter_dir, tmp_path, target_modules=["q_proj", "k_proj"])
    fit = inspect_adapter(folder, model)
    assert not fit.ok
    assert "refused 54: adapter_config.json does not ask for them" in reasons(fit)
    with pytest.raises(ValueError, match="target_modules do not match model"):
        peft_loads(model, folder)


def test_broad_adapter_for_the_text_only_class(adapter_dir, model_dir):
    model = text_only(model_dir)
    fit = inspect_adapter(adapter_dir, model)
    assert (fit.loads, counts(fit, "ignored")) == peft_loads(model, adapter_dir)
    assert {group.reason for group in fit.groups if group.kind == "ignored"} == {
        "vision: the model has no such layers", "audio: the model has no such layers",
    }  # fmt: skip
    assert fit.verdict == "fits only in PART"


def test_for_more_layers_and_other_towers(adapter_dir, tmp_path):
    """A model of four layers, without sound."""
    text = {
        "vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size": 128,
        "hidden_size_per_layer_input": 16, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "global_head_dim": 128,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    text["layer_types"] = [*text["layer_types"][:3], "full_attention"]
    vision = {
        "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    }  # fmt: skip
    write_config(tmp_path, text, vision)
    found = inspect_adapter(adapter_dir, tmp_path)
    told = reasons(found)
    assert "ignored 20: language: the model has no such layers" in told
    assert "ignored 12: audio: the model has no such layers" in told
    assert not found.ok
    assert counts(found, "ignored") == 12 + 2 * 5 * 2


def test_for_other_widths(adapter_dir, e2b_dir, tmp_path):
    """PEFT raises for such an adapter."""
    narrow = write_config(tmp_path, {**E2B_TEXT, "hidden_size": 512}, VISION)
    fit = inspect_adapter(adapter_dir, e2b_dir)
    assert fit.verdict.startswith("does NOT fit: loading it fails; use the model")
    group = next(group for group in fit.groups if group.kind == "refused")
    assert group.reason.startswith("PEFT creates other shapes")
    assert ": shape (4, 128), not (4, " in group.example
    assert not inspect_adapter(adapter_dir, narrow).ok


def test_stops_as_peft_does(language_adapter_dir, model_dir, tmp_path):
    def cut(tensors):
        return {
            name: t[:, :64].contiguous() if name.endswith("0.self_attn.q_proj.lora_A.weight") else t
            for name, t in tensors.items()
        }

    folder = changed(language_adapter_dir, tmp_path, cut)
    fit = inspect_adapter(folder, model_dir)
    assert [(group.kind, group.count) for group in fit.groups] == [("refused", 1)]
    assert "shape (4, 64), not (4, 128)" in fit.groups[0].example
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft_loads(new_model(model_dir), folder)


def test_rank_that_the_config_does_not_say(language_adapter_dir, model_dir, tmp_path):
    folder = changed(language_adapter_dir, tmp_path, r=16)
    found = inspect_adapter(folder, model_dir)
    assert f"refused {found.tensors}: PEFT creates other shapes" in reasons(found)
    assert found.loads == 0
    assert not found.ok
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft_loads(new_model(model_dir), folder)


def test_targets_that_leave_tensors_out(language_adapter_dir, model_dir, tmp_path):
    folder = changed(language_adapter_dir, tmp_path, target_modules=r".*language_model.*\.q_proj")
    fit = inspect_adapter(folder, model_dir)
    assert (fit.loads, counts(fit, "ignored")) == peft_loads(new_model(model_dir), folder)
    assert "adapter_config.json does not ask for them" in reasons(fit)
    assert fit.verdict == "fits only in PART"


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"lora_bias": True}, {"trainable_token_indices": [3, 5]}],
    ids=["magnitudes", "biases", "tokens"],
)
def test_tensors_that_the_config_does_not_ask_for(model_dir, tmp_path, options):
    config = peft.LoraConfig(r=4, target_modules=r".*language_model.*\.[qo]_proj", **options)
    peft.get_peft_model(new_model(model_dir), config).save_pretrained(tmp_path / "whole")
    assert inspect_adapter(tmp_path / "whole", model_dir).ok
    folder = changed(tmp_path / "whole", tmp_path / "cut", **dict.fromkeys(options))
    fit = inspect_adapter(folder, model_dir)
    left_out = peft_loads(new_model(model_dir), folder)
    assert (fit.loads, counts(fit, "ignored")) == left_out
    assert left_out[1] == (1 if "trainable_token_indices" in options else 12)
    assert "adapter_config.json does not ask for them" in reasons(fit)
    assert fit.verdict == "fits only in PART"


def test_targets_that_peft_chooses(language_adapter_dir, model_dir, tmp_path):
    folder = changed(language_adapter_dir, tmp_path, target_modules=None)
    fit = inspect_adapter(folder, model_dir)
    if "PEFT raises" in reasons(fit):  # it knows no targets for Gemma 4
        with pytest.raises(ValueError, match="specify `target_modules`"):
            peft_loads(new_model(model_dir), folder)
    else:
        assert (fit.loads, counts(fit, "ignored")) == peft_loads(new_model(model_dir), folder)
        assert fit.verdict == "fits only in PART"


def test_whole_tensors_that_the_config_does_not_ask_for(model_dir, tmp_path):
    """PEFT loads them into the model itself, if it has such a tensor."""
    config = peft.LoraConfig(
        r=4, target_modules=["per_layer_input_gate"], modules_to_save=["per_layer_projection_norm"]
    )
    peft.get_peft_model(new_model(model_dir), config).save_pretrained(tmp_path / "whole")
    folder = changed(tmp_path / "whole", tmp_path / "cut", modules_to_save=None)
    fit = inspect_adapter(folder, model_dir)
    assert fit.ok
    assert (fit.loads, 0) == peft_loads(new_model(model_dir), folder)

    def renamed(tensors):
        return {name.replace("norm.weight", "norm.bias"): t for name, t in tensors.items()}

    folder = changed(folder, tmp_path / "bias", renamed)
    fit = inspect_adapter(folder, model_dir)
    assert counts(fit, "ignored") == 1
    assert (fit.loads, 1) == peft_loads(new_model(model_dir), folder)


def test_excluded_layers_in_wrappers(adapter_dir, model_dir, tmp_path):
    """The targets name the wrappers, which get no adapter if the layers inside are excluded."""
    folder = changed(adapter_dir, tmp_path, exclude_modules=["linear"])
    fit = inspect_adapter(folder, model_dir)
    assert (fit.loads, counts(fit, "ignored")) == peft_loads(new_model(model_dir), folder)
    assert counts(fit, "ignored") == 40
    assert fit.verdict == "fits only in PART"


@pytest.mark.parametrize("zeros", ["lora_B", "layers.0.", "lora_A"])
def test_before_training(language_adapter_dir, model_dir, tmp_path, zeros):
    """It fits; the note is there if every ``lora_B`` is 0."""

    def zeroed(tensors):
        return {name: each * (zeros not in name) for name, each in tensors.items()}

    fit = inspect_adapter(changed(language_adapter_dir, tmp_path, zeroed), model_dir)
    assert fit.ok
    assert fit.loads == fit.tensors
    assert fit.verdict == "fits"
    assert counts(fit, "no effect") == (fit.tensors if zeros == "lora_B" else 0)
    assert ("as before training" in " ".join(str(fit).split())) == (zeros == "lora_B")


@pytest.mark.parametrize("lacks", ["lora_B", r"layers\.0\."])
def test_missing_tensors(language_adapter_dir, model_dir, tmp_path, lacks):
    folder = without(language_adapter_dir, tmp_path, lacks)
    fit = inspect_adapter(folder, model_dir)
    assert counts(fit, "missing") == peft_misses(new_model(model_dir), folder) > 5
    assert fit.verdict == "fits only in PART"
    assert "the file lacks them" in reasons(fit)
    assert not fit.ok


def test_missing_tensors_beside_trainable_tokens(model_dir, tmp_path):
    config = peft.LoraConfig(
        r=4, target_modules=r".*language_model.*\.q_proj",
        trainable_token_indices={"embed_tokens": [5, 6]},
    )  # fmt: skip
    model = peft.get_peft_model(new_model(model_dir), config)
    model.save_pretrained(tmp_path / "whole", save_embedding_layers=False)
    assert inspect_adapter(tmp_path / "whole", model_dir).ok

    fit = inspect_adapter(without(tmp_path / "whole", tmp_path / "cut", "lora_B"), model_dir)
    assert counts(fit, "missing") == 6
    assert not fit.ok


@pytest.mark.parametrize(
    ("options", "lacks"),
    [({"use_dora": True}, "lora_magnitude_vector"), ({"lora_bias": True}, r"lora_B\.bias")],
)
def test_missing_tensors_of_options(model_dir, tmp_path, options, lacks):
    config = peft.LoraConfig(r=4, target_modules=r".*language_model.*\.[qo]_proj", **options)
    peft.get_peft_model(new_model(model_dir), config).save_pretrained(tmp_path / "whole")
    assert inspect_adapter(tmp_path / "whole", model_dir).ok
    folder = without(tmp_path / "whole", tmp_path / "cut", lacks)
    fit = inspect_adapter(folder, model_dir)
    assert counts(fit, "missing") == peft_misses(new_model(model_dir), folder) > 5
    assert fit.verdict == "fits only in PART"
    assert lacks.replace("\\", "") in str(fit)


@pytest.mark.parametrize(("lacks", "count"), [("experts", 12), (r"experts\.base_layer", 6)])
def test_missing_tensors_of_parameters(moe_dir, tmp_path, lacks, count):
    """PEFT wraps the experts twice: ``base_layer`` is in the names of one of the parameters."""
    from transformers import Gemma4ForCausalLM

    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    model = Gemma4ForCausalLM.from_pretrained(moe_dir)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "whole")
    assert inspect_adapter(tmp_path / "whole", moe_dir).ok
    folder = without(tmp_path / "whole", tmp_path / "cut", lacks)
    fit = inspect_adapter(folder, moe_dir)
    model = Gemma4ForCausalLM.from_pretrained(moe_dir)
    assert counts(fit, "missing") == peft_misses(model, folder) == count
    assert "experts.base_layer.lora_" in str(fit)


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["per_layer_projection_norm"]},
        {"modules_to_save": ["embed_tokens"]},
        {"trainable_token_indices": [3, 5]},
    ],
    ids=["module", "embeddings", "tokens"],
)
def test_missing_tensors_without_which_peft_raises(model_dir, tmp_path, options):
    config = peft.LoraConfig(r=4, target_modules=["per_layer_input_gate"], **options)
    peft.get_peft_model(new_model(model_dir), config).save_pretrained(tmp_path / "whole")
    assert inspect_adapter(tmp_path / "whole", model_dir).ok
    folder = without(tmp_path / "whole", tmp_path / "cut", "^((?!lora_).)*$")
    fit = inspect_adapter(folder, model_dir)
    assert reasons(fit) == "refused 1: PEFT does not find them in the file, and raises KeyError"
    assert fit.verdict.startswith("does NOT fit: loading it fails")
    with pytest.raises(KeyError, match=re.escape(fit.groups[0].example)):
        peft_loads(new_model(model_dir), folder)


def test_tied_embeddings(model_dir, tmp_path):
    """PEFT adapts the head with the embeddings, and saves the adapter of the embeddings alone."""
    if "ensure_weight_tying" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip("this PEFT does not tie adapters")
    config = peft.LoraConfig(
        r=4, target_modules=["embed_tokens", "per_layer_input_gate"], init_lora_weights=False,
        ensure_weight_tying=True,
    )  # fmt: skip
    model = peft.get_peft_model(new_model(model_dir), config).eval()
    model.save_pretrained(tmp_path)
    assert inspect_adapter(tmp_path, model_dir).ok
    again = peft.PeftModel.from_pretrained(new_model(model_dir), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(*(each(torch.arange(3, 9)[None]).logits for each in (model, again)))


def test_method_that_needs_the_weights(model_dir, tmp_path):
    config = peft.ShiraConfig(r=4, target_modules=["per_layer_input_gate"])
    peft.get_peft_model(new_model(model_dir), config).save_pretrained(tmp_path)
    fit = inspect_adapter(tmp_path, model_dir)
    assert fit.verdict.startswith(
        "fits; only names are checked: PEFT cannot create SHIRA without weights"
    )


def test_weights_without_their_config(language_adapter_dir, model_dir, tmp_path):
    (changed(language_adapter_dir, tmp_path) / "adapter_config.json").unlink()
    fit = inspect_adapter(tmp_path / WEIGHTS, model_dir)
    assert fit.verdict == "fits; only names are checked: there is no adapter_config.json"


def test_targets_that_peft_refuses(language_adapter_dir, model_dir, tmp_path):
    targets = ["q_proj", "input_layernorm"]
    folder = changed(language_adapter_dir, tmp_path, target_modules=targets)
    fit = inspect_adapter(folder, model_dir)
    assert f"refused {fit.tensors}: PEFT raises ValueError: Target module" in reasons(fit)
    with pytest.raises(ValueError, match="Target module"):
        peft_loads(new_model(model_dir), folder)


def test_llama(model_dir, llama_dir, tmp_path):
    from transformers import LlamaForCausalLM

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(llama_dir), config)
    model.save_pretrained(tmp_path)
    found = inspect_adapter(tmp_path, model_dir)
    assert found.base_model == str(llama_dir)
    assert not found.ok
    assert (found.loads, counts(found, "refused")) == (0, 8)
    assert "PEFT creates other shapes for this model" in reasons(found)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft_loads(new_model(model_dir), tmp_path)
    assert inspect_adapter(tmp_path, llama_dir).ok


def test_names_with_an_adapters_name(language_adapter_dir, model_dir, tmp_path):
    def named(tensors):
        return {name.replace(".weight", ".default.weight"): t for name, t in tensors.items()}

    folder = changed(language_adapter_dir, tmp_path, named)
    found = inspect_adapter(folder, model_dir)
    ignored = counts(found, "ignored")
    assert (found.loads, ignored) == peft_loads(new_model(model_dir), folder)


def test_quantized_model(adapter_dir, model_dir, tmp_path):
    """A checkpoint that was saved in 4 bits, without the data of its tensors."""
    pytest.importorskip("bitsandbytes")
    new_model(model_dir, "nf4").save_pretrained(tmp_path)
    header_only(tmp_path / "model.safetensors")
    plain, quantized = (inspect_adapter(adapter_dir, each) for each in (model_dir, tmp_path))
    assert quantized.ok
    assert (quantized.loads, quantized.groups) == (plain.loads, plain.groups)


# -- the command ----------------------------------------------------------------------------------


def test_command(adapter_dir, model_dir, capsys):
    assert run(adapter_dir) == 0
    assert run(adapter_dir, "--model", model_dir) == 0
    printed = capsys.readouterr().out
    assert "\nfits, with the patch clippable_linear\n" in printed
    assert "\033" not in printed
    lines = [line for line in printed.splitlines() if str(model_dir.parent) not in line]
    assert max(map(len, lines)) <= 80


def test_command_says_no(adapter_dir, llama_dir, capsys):
    assert run(adapter_dir, "--model", llama_dir) == 1
    assert capsys.readouterr().out.endswith("does NOT fit: none of its tensors would load\n")


def test_command_json(adapter_dir, model_dir, capsys):
    assert run(adapter_dir, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "file", "kind", "base_model", "tensors", "parameters", "bytes", "dtypes", "towers",
        "ranks", "rank", "target_modules", "model", "architecture", "loads", "needs",
        "groups", "unchecked", "condition", "ok", "verdict",
    }  # fmt: skip
    assert found["model"] is None
    assert found["ranks"] == {"4": found["tensors"] // 2}
    assert run(adapter_dir, "--model", model_dir, "--json") == 0
    fit = json.loads(capsys.readouterr().out)
    assert fit["model"] == str(model_dir)
    assert fit["loads"] == fit["tensors"]
    assert fit["needs"] == ["clippable_linear"]


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("target_modules", [1]),
        ("rank_pattern", {"q_proj": "8"}),
        ("alpha_pattern", {"q_proj": "8"}),
        ("trainable_token_indices", ["8"]),
        ("r", "8"),
        ("base_model_name_or_path", ["a"]),
        ("target_parameters", 0.5),
        ("modules_to_save", "norm"),
    ],
)
def test_config_of_another_kind(adapter_dir, model_dir, tmp_path, entry, value):
    folder = changed(adapter_dir, tmp_path, **{entry: value})
    with pytest.raises(InputError, match=rf"adapter_config\.json: {entry} cannot be"):
        inspect_adapter(folder, model_dir)


def test_targets_that_are_no_expression(adapter_dir, model_dir, tmp_path):
    expressions = {"target_modules": "(q_proj", "exclude_modules": "(q_proj"}
    patterns = {"rank_pattern": {"(q_proj": 2}, "alpha_pattern": {"(q_proj": 2}}
    for entry, value in (expressions | patterns).items():
        folder = changed(adapter_dir, tmp_path, **{entry: value})
        with pytest.raises(InputError, match=r"'\(q_proj' is not a regular expression"):
            inspect_adapter(folder, model_dir)


def test_command_names_what_is_wrong(adapter_dir, model_dir, tmp_path, capsys):
    def damaged(name, weights=None, config=None):
        folder = changed(adapter_dir, tmp_path / name)
        if weights is not None:
            (folder / WEIGHTS).write_bytes(weights)
        if config is not None:
            (folder / "adapter_config.json").write_text(config)
        return folder

    truncated = damaged("truncated", struct.pack("<Q", 999) + b'{"base_model')
    bad = damaged("bad", config='{"r": 4,')
    numbers = damaged("numbers", config='{"peft_type": "LORA", "target_modules": 4}')
    bare = damaged("bare")
    (bare / "adapter_config.json").unlink()
    for path, message in (
        (tmp_path / "nowhere", f"{tmp_path / 'nowhere'}: no such file or folder"),
        (truncated, f"{truncated / WEIGHTS}: cut off in the safetensors header"),
        (bad, f"{bad / 'adapter_config.json'}: not JSON"),
        (numbers, f"{numbers / 'adapter_config.json'}: target_modules cannot be 4"),
        (bare, f"{bare}: no adapter_config.json"),
        (model_dir, f"{model_dir}: no {WEIGHTS} (is it the folder of a model?)"),
        (model_dir / "model.safetensors", f"{model_dir / 'model.safetensors'}: none of its"),
    ):
        assert run(path) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith(f"gemma4-compat adapter: {message}")
    assert run(adapter_dir, "--model", tmp_path) == 2
    assert f"{tmp_path}: no config.json" in capsys.readouterr().err
    with pytest.raises(InputError, match="not a safetensors file"):
        inspect_adapter(model_dir / "config.json")


@pytest.mark.parametrize("peft_type", ["FOO", None])
def test_types_that_peft_does_not_know(adapter_dir, model_dir, tmp_path, peft_type):
    folder = changed(adapter_dir, tmp_path, peft_type=peft_type)
    fit = inspect_adapter(folder, model_dir)
    assert (fit.loads, fit.ok) == (0, False)
    assert f"peft_type {peft_type!r}" in reasons(fit)
    with pytest.raises((ValueError, KeyError)):
        peft_loads(new_model(model_dir), folder)
