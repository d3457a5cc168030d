"""Adapters on Gemma4ClippableLinear: a pattern that matches the wrapper targets the inner layer.

The reference is PEFT without the patch, with targets that name the inner layers.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import warnings

import peft
import pytest
import torch
from packaging.version import Version
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

import gemma4_compat
from gemma4_compat.tiny import BROAD_TARGETS, image_inputs
from tests.support import INPUTS, assert_same, load_model, logits

NEWEST_PEFT = Version(peft.__version__) >= Version("0.21")
BROAD = "|".join(BROAD_TARGETS)
OUTER_TOWERS = rf".*_tower\..*\.({BROAD})"
INNER_TOWERS = rf"{OUTER_TOWERS}\.linear"
#: the same targets as BROAD_TARGETS, written for PEFT without the patch
INNER = rf".*language_model.*\.({BROAD})|{INNER_TOWERS}"

#: options that a method requires in general, or for a layer of 128 x 128
OPTIONS = {
    "ADALORA": {"total_step": 10},
    "BOFT": {"boft_block_size": 4},
    "BONE": {"r": 8},
    "C3A": {"block_size": 32},
    "FOURIERFT": {"n_frequency": 20},
    "GRALORA": {"r": 8},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "MISS": {"r": 8},
    "OFT": {"oft_block_size": 8},
    "OSF": {"effective_rank": 8},
    "RANDLORA": {"r": 8},
    "VBLORA": {"vector_length": 32, "num_vectors": 16, "topk": 2},
    "WAVEFT": {"n_frequency": 20, "proportional_parameters": True},
}
VARIANTS = {
    "LORA-dora": {"use_dora": True},
    "LORA-rslora": {"use_rslora": True, "r": 4},
    "LORA-pissa": {"init_lora_weights": "pissa"},
    "LORA-olora": {"init_lora_weights": "olora"},
    "LORA-orthogonal": {"init_lora_weights": "orthogonal"},
    "LOKR-rank": {"rank_pattern": {"q_proj": 2}, "r": 4, "decompose_both": True},
}
#: methods that adapt whole attention or decoder layers, modules of any kind, or embeddings
NOT_FOR_LINEAR = {"ADAPTION_PROMPT", "LN_TUNING", "TRAINABLE_TOKENS", "SHADOW"}
KINDS = [
    kind.value
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    if "target_modules" in {field.name for field in dataclasses.fields(config)}
    and kind.value not in NOT_FOR_LINEAR
]


@pytest.fixture(scope="module")
def loaded(model_dir):
    # In float32, results that are compared with a tolerance differ by a few ulp of the logits.
    return load_model(model_dir).float()


@pytest.fixture
def base(loaded):
    """A fresh copy of the tiny model."""
    return copy.deepcopy(loaded)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread: the tensors are too small for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def unpatched():
    return gemma4_compat.disabled("clippable_linear")


def config_of(kind, targets, **options):
    name = kind.partition("-")[0]
    options = {**OPTIONS.get(name, {}), **VARIANTS.get(kind, {}), **options}
    return PEFT_TYPE_TO_CONFIG_MAPPING[name](target_modules=targets, **options)


def with_inner_layers(names):
    """These targets, and the same for methods that search for their targets themselves."""
    return [*names, *(f"{name}.linear" for name in names)]


def adapted(model, targets, kind="LORA", **options):
    torch.manual_seed(0)
    return peft.get_peft_model(copy.deepcopy(model), config_of(kind, targets, **options)).eval()


def randomized(model, seed=1, scale=0.05):
    """Change every trainable value, so that the adapter has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model


def tuned(model):
    """The names of the layers with an adapter, without PEFT's own prefix."""
    layers = [n for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)]
    return {name.removeprefix("base_model.model.") for name in layers}


def in_towers(names):
    return {name for name in names if "_tower." in name}


def wrappers(model):
    return {n for n, m in model.named_modules() if type(m).__name__.endswith("ClippableLinear")}


def outputs(model, kind):
    if not kind.startswith("POLY"):
        return logits(model)
    with torch.no_grad():
        task = torch.zeros(1, dtype=torch.long)
        return {
            name: model.base_model(**inputs(model.config), task_ids=task).logits
            for name, inputs in INPUTS.items()
        }


def outcome(function, *args):
    """The result of the function, or the name of its exception's type."""
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__


def assert_same_state(found, expected):
    found, expected = found.state_dict(), expected.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_same_outcome(found, expected):
    if isinstance(expected, str):
        assert found == expected
    else:
        assert_same(found, expected)


def saved_keys(path):
    return set(load_file(path / "adapter_model.safetensors"))


# -- every method ----------------------------------------------------------------------------

#: The messages differ between methods; OSF skips the towers without a message.
REFUSED = (
    r"Gemma4ClippableLinear.*not supported|does not support target modules of type"
    r"|Gemma4ClippableLinear.*is not a plain torch.nn.Linear|No layer types compatible with FRoD"
    r"|UnboundLocalError: .*'new_module'|KeyError: 'model.vision_tower|OSF left out the towers"
)


@pytest.mark.regression("clippable_linear", REFUSED)
@pytest.mark.parametrize("kind", [*KINDS, *VARIANTS])
def test_every_method(base, kind, tmp_path):
    if kind == "ADAMSS":
        pytest.importorskip("sklearn")
    reloads = kind != "ADAMSS" or NEWEST_PEFT  # PEFT 0.19 saves AdaMSS incompletely
    targets, inner = BROAD_TARGETS, INNER
    if kind == "FROD":  # needs one shape per kind of layer; the language model has several
        targets, inner = OUTER_TOWERS, INNER_TOWERS
    options = feedforward(kind)
    if kind == "LOKR-rank":
        options = {"rank_pattern": {r"q_proj(\.linear)?": 2}}
    if kind == "LILY":  # layers whose names end in the same entry of a list share weights
        targets = inner = with_inner_layers(BROAD_TARGETS)
        options = {"exclude_modules": r".*_tower\..*_proj"}
    with unpatched():
        expected = adapted(base, inner, kind, **options)
    found = adapted(base, targets, kind)

    assert in_towers(tuned(found)), "OSF left out the towers"
    assert found.base_model.targeted_module_names == expected.base_model.targeted_module_names
    assert_same_state(found, expected)
    assert {n for n, p in found.named_parameters() if p.requires_grad} == {
        n for n, p in expected.named_parameters() if p.requires_grad
    }

    # RandLora amplifies its few parameters; larger values would saturate the attention.
    randomized(found, scale=0.001 if kind == "RANDLORA" else 0.05)
    expected.load_state_dict(found.state_dict())
    live = outputs(found, kind)
    assert_same(live, outputs(expected, kind))
    plain = logits(base)
    for modality in ("image", "audio"):
        assert (live[modality] - plain[modality]).abs().max() > 1e-2, "the adapter does nothing"

    found.save_pretrained(tmp_path / "found")
    expected.save_pretrained(tmp_path / "expected")
    keys = saved_keys(tmp_path / "found")
    assert keys == saved_keys(tmp_path / "expected")
    layered = {key for key in keys if "_tower." in key}
    assert all(".linear." in key for key in layered)
    if reloads:
        again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "found").eval()
        assert_same(outputs(again, kind), live)

    merged = outcome(lambda: logits(found.merge_and_unload()))
    assert_same_outcome(merged, outcome(lambda: logits(expected.merge_and_unload())))
    if not isinstance(merged, str):
        assert_same(merged, live, tolerance=2e-4)  # float32, logits up to 30


@pytest.mark.parametrize("quantized", ["nf4-nested", "int8"])
@pytest.mark.parametrize("kind", ["LORA", "LORA-dora", "ADALORA", "IA3", "VERA", "OFT", "ROAD"])
def test_quantized(model_dir, kind, quantized):
    base = load_model(model_dir, quantized)
    with unpatched():
        expected = outcome(lambda: randomized(adapted(base, INNER, kind, **feedforward(kind))))
    found = outcome(lambda: randomized(adapted(base, BROAD_TARGETS, kind)))
    if isinstance(expected, str):
        assert found == expected
        return
    assert {n for n, _ in found.named_parameters()} == {n for n, _ in expected.named_parameters()}
    live, reference = outcome(logits, found), outcome(logits, expected)
    assert_same_outcome(live, reference)
    if not isinstance(live, str):
        assert (live["image"] - logits(base, ["image"])["image"]).abs().max() > 1e-2


# -- methods that search for their targets themselves -----------------------------------------


def test_eva(base):
    """The names of the inner layers beside those of the wrappers select all layers."""
    from peft.tuners.lora.eva import get_eva_state_dict

    def eva(targets):
        config = peft.LoraConfig(
            target_modules=targets, exclude_modules=r".*audio_tower.*", r=2,
            init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0, use_label_mask=False),
        )  # fmt: skip
        return get_eva_state_dict(
            base, [image_inputs(base.config)], config, prepare_model_inputs_fn=None,
            prepare_layer_inputs_fn=lambda layer_input, *_: layer_input[0].flatten(0, -2),
            show_progress_bar=False,
        )  # fmt: skip

    with unpatched():
        expected = eva(r".*language_model.*\.q_proj|.*_tower\..*\.q_proj\.linear")
    found = eva(with_inner_layers(["q_proj"]))
    assert in_towers(found)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.skipif(not hasattr(lora, "LoraGAConfig"), reason="this PEFT has no LoRA-GA")
def test_lora_ga(base):
    """The names of the inner layers beside those of the wrappers select all layers."""

    def initialized(targets):
        model = copy.deepcopy(base)
        torch.manual_seed(0)
        config = peft.LoraConfig(
            target_modules=targets, r=2,
            init_lora_weights="lora_ga", lora_ga_config=lora.LoraGAConfig(),
        )  # fmt: skip
        batch = image_inputs(model.config)

        def step():
            model(**batch, labels=batch["input_ids"]).loss.backward()

        lora.preprocess_loraga(model, config, step)
        return peft.get_peft_model(model, config).eval()

    with unpatched():
        expected = initialized(r".*language_model.*\.q_proj|.*_tower\..*\.q_proj\.linear")
    found = initialized(with_inner_layers(["q_proj"]))
    assert in_towers(tuned(found))
    assert_same_state(found, expected)


# -- patterns --------------------------------------------------------------------------------


def ranks(model):
    return {
        name.removeprefix("base_model.model."): (module.r["default"], module.lora_alpha["default"])
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"q_proj": 2}, {r"q_proj(\.linear)?": 2}),
        ({"q_proj.linear": 2}, {"q_proj.linear": 2}),
        ({"vision_tower.*q_proj": 2}, {r"vision_tower.*q_proj\.linear": 2}),
        ({r"^model\.vision_tower\..*v_proj$": 2}, {r"^model\.vision_tower\..*v_proj\.linear$": 2}),
        # the first key that matches wins
        ({"vision_tower.*q_proj": 2, "q_proj": 3}, {r"vision.*linear": 2, r"q_proj(\.linear)?": 3}),
        ({"q_proj.linear": 2, "q_proj": 3}, {"q_proj.linear": 2, "q_proj": 3}),
        (
            {"layers.1.self_attn.(q|v)_proj": 2, "(k|v)_proj": 3},
            {r"layers.1.self_attn.(q|v)_proj(\.linear)?": 2, r"(k|v)_proj(\.linear)?": 3},
        ),
    ],
)
def test_rank_and_alpha_patterns(base, outer, inner):
    targets = ["q_proj", "k_proj", "v_proj"]
    regex = r".*(language_model.*\.[qkv]_proj|_tower\..*\.[qkv]_proj\.linear)"
    if "vision.*linear" in inner:
        inner = {r"vision_tower.*q_proj\.linear": 2, r"q_proj(\.linear)?": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = adapted(base, targets, rank_pattern=outer, alpha_pattern=outer)
        with unpatched():
            expected = adapted(base, regex, rank_pattern=inner, alpha_pattern=inner)
    assert ranks(found) == ranks(expected)
    assert_same_state(found, expected)
    config = found.peft_config["default"]
    assert config.rank_pattern == outer
    assert config.alpha_pattern == outer


def test_rank_and_alpha_by_different_names(base):
    found = adapted(
        base, ["q_proj"], rank_pattern={"q_proj.linear": 2}, alpha_pattern={"q_proj": 5}, r=4
    )
    for name, (rank, alpha) in ranks(found).items():
        assert (rank, alpha) == ((2, 5) if "_tower." in name else (4, 5))


def test_patterns_of_inner_targets_stay(base):
    """PEFT matches them against the inner name; adapters trained that way must load as before."""
    options = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 5}}
    with unpatched():
        expected = adapted(base, INNER, **options)
    found = adapted(base, INNER, **options)
    assert ranks(found) == ranks(expected)


@pytest.mark.skipif(not NEWEST_PEFT, reason="this PEFT does not warn of useless patterns")
def test_useless_pattern_warns(base):
    with pytest.warns(RuntimeWarning, match=r"ignored: \['no_such_proj'\]\."):
        adapted(base, ["q_proj"], rank_pattern={"q_proj": 2, "no_such_proj": 3})


@pytest.mark.parametrize("kind", ["FOURIERFT", "C3A", "DELORA", "OSF", "LOHA"])
def test_patterns_of_other_methods(base, kind):
    attribute, value = {
        "FOURIERFT": ("n_frequency_pattern", 7),
        "C3A": ("block_size_pattern", 16),
        "DELORA": ("lambda_pattern", 3),
        "OSF": ("rank_pattern", 3),
        "LOHA": ("rank_pattern", 3),
    }[kind]
    with unpatched():
        expected = adapted(base, INNER, kind, **{attribute: {r"q_proj(\.linear)?": value}})
    found = adapted(base, BROAD_TARGETS, kind, **{attribute: {"q_proj": value}})
    assert_same_state(found, expected)
    randomized(found)
    expected.load_state_dict(found.state_dict())
    assert_same(logits(found), logits(expected))


def feedforward(kind):
    if kind != "IA3":
        return {}
    return {"feedforward_modules": r".*\.down_proj|.*_tower.*\.down_proj\.linear"}


@pytest.mark.parametrize(
    "names", [["down_proj"], r".*\.down_proj", ["down_proj", "down_proj.linear"]]
)
def test_feedforward_modules(base, names):
    with unpatched():
        expected = adapted(base, INNER, "IA3", **feedforward("IA3"))
    # PEFT requires that feedforward_modules is a subset of the targets
    targets = rf".*\.({BROAD})" if isinstance(names, str) else {*BROAD_TARGETS, *names}
    found = adapted(base, targets, "IA3", feedforward_modules=names)
    assert_same_state(found, expected)
    layers = {n: m.is_feedforward for n, m in found.named_modules() if hasattr(m, "is_feedforward")}
    assert layers
    assert all(value is ("down_proj" in name) for name, value in layers.items())
    saved = found.peft_config["default"].feedforward_modules
    assert saved == names if isinstance(names, str) else set(saved) == set(names)


@pytest.mark.parametrize(
    "exclude",
    [
        ["vision_tower.encoder.layers.0.self_attn.q_proj"],
        ["vision_tower.encoder.layers.0.self_attn.q_proj.linear"],
        r".*vision_tower\.encoder\.layers\.0\.self_attn\.q_proj",
        r".*vision_tower\.encoder\.layers\.0\.self_attn\.q_proj\.linear",
    ],
)
def test_exclude_modules(base, exclude):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="You have passed exclude_modules")
        found = adapted(base, ["q_proj"], exclude_modules=exclude)
    everything = tuned(adapted(base, ["q_proj"]))
    assert everything - tuned(found) == {
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear"
    }


def test_wrapper_excluded_inner_targeted(base):
    """Without the patch, PEFT accepts a pattern that matches both if the wrapper is excluded."""
    options = {"exclude_modules": r".*_tower\..*_proj"}
    targets = r".*\.q_proj(\.linear)?"
    with unpatched():
        expected = tuned(adapted(base, targets, **options))
    assert tuned(adapted(base, targets, **options)) == expected
    assert in_towers(expected)


@pytest.mark.parametrize(
    "options",
    [
        {"layers_to_transform": 1},
        {"layers_to_transform": [0], "layers_pattern": "layers"},
        {"layers_to_transform": [1], "layers_pattern": ["no_such", "layers"]},
    ],
)
def test_layers_to_transform(base, options):
    found = tuned(adapted(base, ["q_proj", "v_proj"], **options))
    index = options["layers_to_transform"]
    wanted = f".layers.{index if isinstance(index, int) else index[0]}."
    everything = tuned(adapted(base, ["q_proj", "v_proj"]))
    assert found == {name for name in everything if wanted in name}
    assert in_towers(found)


def test_all_linear(base):
    with unpatched():
        expected = adapted(base, "all-linear")
    found = adapted(base, "all-linear")
    assert_same_state(found, expected)
    assert found.peft_config["default"].target_modules == (
        expected.peft_config["default"].target_modules
    )
    assert {f"{name}.linear" for name in wrappers(base)} <= tuned(found)


@pytest.mark.parametrize(
    "targets",
    [
        r".*(q_proj|v_proj)(\.linear)?",
        ["q_proj", "q_proj.linear", "v_proj", "v_proj.linear"],
        r".*(q_proj|v_proj)",
        ["q_proj", "v_proj"],
    ],
)
def test_one_adapter_for_each_wrapper(base, targets):
    found = adapted(base, targets)
    names = found.base_model.targeted_module_names
    assert len(names) == len(set(names))
    assert set(names) == tuned(found)
    expected = {f"{n}.linear" for n in wrappers(base) if n.endswith(("q_proj", "v_proj"))}
    assert in_towers(tuned(found)) == expected


def test_long_lists_of_full_names(base):
    """PEFT shortens lists of 20 or more names."""
    outer = sorted(n for n in wrappers(base) if n.endswith(tuple(BROAD_TARGETS)))
    language = [f"model.language_model.layers.{i}.self_attn.q_proj" for i in range(6)]
    expected = {f"{name}.linear" for name in outer} | set(language)
    inner = [f"{name}.linear" for name in outer]
    assert len(outer) >= 20
    for targets in (outer + language, inner + language, outer + inner + language):
        assert tuned(adapted(base, targets)) == expected
    some = [name for name in outer if ".layers.0." not in name] * 2
    other = [n for n in wrappers(base) if n not in outer]
    assert tuned(adapted(base, some + other)) == {f"{name}.linear" for name in {*some, *other}}


def test_every_wrapper(base):
    """Some names occur in one tower only, and some layers have other names in the other tower."""
    names = {name.rpartition(".")[2] for name in wrappers(base)}
    assert tuned(adapted(base, sorted(names))) >= {f"{name}.linear" for name in wrappers(base)}


def test_modules_to_save(base, tmp_path):
    found = adapted(base, ["q_proj"], modules_to_save=["mlp"])
    randomized(found)
    assert not any(".mlp." in name for name in tuned(found))
    expected = logits(found)
    found.save_pretrained(tmp_path)
    keys = saved_keys(tmp_path)
    assert "base_model.model.model.vision_tower.encoder.layers.0.mlp.up_proj.input_max" in keys
    assert_same(logits(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)), expected)
    # In newer versions, transformers' own loader supports modules_to_save.
    with unpatched():
        plain = copy.deepcopy(base)
        config = peft.LoraConfig.from_pretrained(tmp_path)
        config.target_modules = r".*language.*\.q_proj|.*_tower.*\.q_proj\.linear"
        plain.load_adapter(
            peft_config=config, adapter_state_dict=load_file(tmp_path / "adapter_model.safetensors")
        )
    base.load_adapter(str(tmp_path))
    assert_same(logits(base), logits(plain))


def test_matched_modules(base):
    model = adapted(base, ["q_proj"])
    matched = peft.tuners.tuners_utils.inspect_matched_modules(model.base_model)["matched"]
    assert set(matched) == tuned(model)


# -- classes ---------------------------------------------------------------------------------


def test_subclass(base):
    kind = type(base.model.vision_tower.encoder.layers[0].self_attn.q_proj)

    class Mine(kind):
        pass

    for module in base.modules():
        if type(module) is kind:
            module.__class__ = Mine
    found = adapted(base, ["q_proj"])
    assert len(in_towers(tuned(found))) == sum(n.endswith("q_proj") for n in in_towers(
        n for n, m in base.named_modules() if type(m) is Mine))  # fmt: skip


def test_the_users_own_adapter_layer(base):
    """PEFT creates it for the wrapper, as it does without the patch."""
    wrapper = type(base.model.vision_tower.encoder.layers[0].self_attn.q_proj)

    class Own(torch.nn.Module, peft.tuners.lora.LoraLayer):
        def __init__(self, layer, adapter_name, **kwargs):
            super().__init__()
            peft.tuners.lora.LoraLayer.__init__(self, layer)

    config = peft.LoraConfig(target_modules=OUTER_TOWERS)
    config._register_custom_module({wrapper: Own})
    model = peft.get_peft_model(copy.deepcopy(base), config)
    own = {name: type(each.base_layer) for name, each in model.named_modules() if type(each) is Own}
    assert set(own.values()) == {wrapper}
    assert not any(isinstance(each, peft.tuners.lora.Linear) for each in model.modules())


def test_diffusion_gemma():
    module = pytest.importorskip("transformers.models.diffusion_gemma.modeling_diffusion_gemma")

    class Config:
        use_clipped_linears = True

    model = torch.nn.ModuleDict({"q_proj": module.DiffusionGemmaClippableLinear(Config(), 8, 8)})
    assert tuned(adapted(model, ["q_proj"])) == {"q_proj.linear"}


class Plain(torch.nn.Module):
    """A model without wrappers, with module names that look like a wrapper's."""

    def __init__(self):
        super().__init__()
        self.q_proj = torch.nn.Sequential()
        self.q_proj.add_module("linear", torch.nn.Linear(8, 8))
        self.v_proj = torch.nn.Linear(8, 8)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("make", [Plain, llama])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["linear", "v_proj"], "all-linear"])
def test_other_models_are_untouched(make, targets):
    model = make()

    def adapter():
        model_with = adapted(model, targets, rank_pattern={"q_proj": 2})
        return model_with, torch.random.get_rng_state()

    found = outcome(adapter)
    with unpatched():
        expected = outcome(adapter)
    if isinstance(expected, str):
        assert found == expected
        return
    assert_same_state(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_language_targets_are_untouched(base):
    for targets in (None, r".*language_model.*\.q_proj"):
        with unpatched():
            expected = outcome(adapted, base, targets)
        found = outcome(adapted, base, targets)
        if isinstance(expected, str):
            assert found == expected
        else:
            assert_same_state(found, expected)


def test_ln_tuning_is_untouched(base):
    """LN tuning accepts modules of any kind, including the wrappers."""
    with unpatched():
        expected = adapted(base, ["q_proj"], "LN_TUNING")
    assert_same_state(adapted(base, ["q_proj"], "LN_TUNING"), expected)


# -- the life of an adapter ------------------------------------------------------------------


def test_second_adapter(base):
    plain = logits(base)
    model = randomized(adapted(base, BROAD_TARGETS))
    first = logits(model)
    model.add_adapter("second", config_of("LORA", OUTER_TOWERS, r=2))
    assert_same(logits(model), first)
    model.set_adapter("second")
    second = logits(randomized(model, seed=2))
    assert (second["image"] - first["image"]).abs().max() > 1e-2
    assert_same({"text": second["text"]}, {"text": plain["text"]})  # the towers alone have it
    model.set_adapter("default")
    assert_same(logits(model), first)
    with model.disable_adapter():
        assert_same(logits(model), plain)
    model.delete_adapter("default")
    model.set_adapter("second")
    assert_same(logits(model), second)
    assert_same(logits(model.unload()), plain)


def test_weighted_adapter(base):
    model = randomized(adapted(base, BROAD_TARGETS))
    first = logits(model)
    model.add_adapter("second", config_of("LORA", ["q_proj", "v_proj.linear"]))
    model.add_weighted_adapter(["default", "second"], [1.0, 0.5], "sum", combination_type="cat")
    model.set_adapter("sum")
    # "second" still has its initial value, zero.
    assert_same(logits(model), first, tolerance=2e-4)
    assert {name for name, m in model.named_modules() if "sum" in getattr(m, "lora_A", ())} == {
        f"base_model.model.{name}" for name in tuned(model)
    }


def test_unload_gives_the_model_back(base):
    names = [name for name, _ in base.named_modules()]
    state = {name: value.clone() for name, value in base.state_dict().items()}
    model = peft.get_peft_model(base, config_of("LORA", BROAD_TARGETS))
    assert base is model.unload()
    assert [name for name, _ in base.named_modules()] == names
    assert all(torch.equal(value, state[name]) for name, value in base.state_dict().items())
    again = peft.get_peft_model(base, config_of("LORA", BROAD_TARGETS))
    assert in_towers(tuned(again))


def test_merge_bfloat16(model_dir, adapter_dir):
    model = peft.PeftModel.from_pretrained(load_model(model_dir), adapter_dir).eval()
    live = logits(model)
    merged = logits(model.merge_and_unload(safe_merge=True))
    # The merged weights are rounded to bfloat16 (8 bits); the tiny model amplifies the error.
    for kind, value in live.items():
        assert (merged[kind] - value).norm() / value.norm() < 0.15


def test_mixed(base):
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(base), config_of("LORA", ["q_proj"]), mixed=True)
    model.add_adapter("other", config_of("LOHA", ["q_proj", "v_proj"]))
    model.set_adapter(["default", "other"])
    randomized(model)
    expected = {f"{n}.linear" for n in wrappers(base) if n.endswith(("q_proj", "v_proj"))}
    layers = {name.removesuffix(".base_layer") for name in tuned(model.eval())}
    assert in_towers(layers) == expected
    live = logits(model)
    assert_same(logits(model.merge_and_unload()), live, tolerance=2e-4)


def test_copies(base):
    model = randomized(adapted(base, BROAD_TARGETS, rank_pattern={"q_proj": 2}))
    expected = logits(model)
    assert_same(logits(copy.deepcopy(model)), expected)
    # Only the tower: transformers' output capturing leaves closures that cannot be pickled.
    again = pickle.loads(pickle.dumps(model.base_model.model.model.vision_tower))
    assert tuned(again) == {
        name.removeprefix("model.vision_tower.") for name in tuned(model) if "vision_" in name
    }
    for leftover in ("_check_target_module_exists", "_create_and_replace"):
        assert leftover not in vars(model.base_model)


def test_training_reaches_all_tower_adapters(base):
    model = randomized(adapted(base, BROAD_TARGETS)).train()
    for inputs in INPUTS.values():
        batch = inputs(model.config)
        model(**batch, labels=batch["input_ids"]).loss.backward()
    layers = {n: p for n, p in model.named_parameters() if "lora_" in n and "_tower." in n}
    assert layers
    for name, parameter in layers.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    frozen = [n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    assert not frozen


def test_compiled_wrapper(base):
    model = randomized(adapted(base, ["q_proj"]))
    wrapper = model.base_model.model.model.vision_tower.encoder.layers[0].self_attn.q_proj
    assert hasattr(wrapper.linear, "lora_A")
    x = 3 * torch.randn(2, 5, wrapper.linear.in_features)
    compiled = torch.compile(wrapper, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = wrapper(x)
        assert expected.max() <= wrapper.output_max
        assert torch.equal(compiled(x), expected)


# -- loading ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(loaded, adapter_dir, tmp_path_factory):
    """Logits with the adapter, from PEFT without the patch: inner keys and inner targets."""
    path = tmp_path_factory.mktemp("explicit")
    copy_adapter(adapter_dir, path, target_modules=INNER)
    with unpatched():
        model = peft.PeftModel.from_pretrained(copy.deepcopy(loaded), path).eval()
    return logits(model)


def copy_adapter(source, path, **changes):
    config = json.loads((source / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    (path / "adapter_model.safetensors").write_bytes(
        (source / "adapter_model.safetensors").read_bytes()
    )
    return path


@pytest.fixture(params=["inner", "outer"])
def layout(request, adapter_dir, outer_adapter_dir):
    """The folder of an adapter whose keys for the towers have ``.linear`` or lack it."""
    return adapter_dir if request.param == "inner" else outer_adapter_dir


@pytest.mark.regression(
    "clippable_linear", r"Target module Gemma4ClippableLinear\(.*is not supported"
)
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_from_pretrained(base, layout, reference, low_cpu_mem_usage, tmp_path):
    if low_cpu_mem_usage and hasattr(base.model.language_model.layers[-1].self_attn, "k_proj"):
        pytest.skip("this version has unused layers, for which the adapter has nothing to load")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(
            copy.deepcopy(base), layout, low_cpu_mem_usage=low_cpu_mem_usage
        )
    assert not [warning for warning in caught if "_tower." in str(warning.message)]
    assert_same(logits(model.eval()), reference)
    model.save_pretrained(tmp_path)
    assert all(".linear.lora_" in key for key in saved_keys(tmp_path) if "_tower." in key)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    assert_same(logits(again), reference)


@pytest.mark.regression("clippable_linear", r"logits differ by up to")
@pytest.mark.parametrize("native", [False, True])
def test_outer_keys_are_not_lost_in_silence(
    base, outer_adapter_dir, reference, tmp_path, native, request
):
    """Without the patch, PEFT accepts these targets and then ignores the keys."""
    if native:
        request.getfixturevalue("native_loading")
    path = copy_adapter(outer_adapter_dir, tmp_path, target_modules=INNER)
    model = copy.deepcopy(base)
    if native:
        model.load_adapter(str(path))
    else:
        model = peft.PeftModel.from_pretrained(model, path).eval()
    assert_same(logits(model), reference)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_peft_load_adapter(base, layout, second_adapter_dir, reference, low_cpu_mem_usage):
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), second_adapter_dir)
    result = model.load_adapter(layout, "one", low_cpu_mem_usage=low_cpu_mem_usage)
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if ".one." in key and "_tower." in key]
    model.set_adapter("one")
    assert_same(logits(model.eval()), reference)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_inject_and_set_state(base, layout, reference, low_cpu_mem_usage, with_state):
    config = peft.LoraConfig.from_pretrained(layout)
    state = {
        key.removeprefix("base_model.model."): value
        for key, value in load_file(layout / "adapter_model.safetensors").items()
    }
    model = copy.deepcopy(base)
    names = {key.rpartition(".lora_")[0] for key in state}
    if with_state:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="While injecting the PEFT adapters")
            # PEFT warns if these targets and the state dict name different layers.
            config.target_modules = [name.removesuffix(".linear") for name in names]
            peft.inject_adapter_in_model(
                config, model, low_cpu_mem_usage=low_cpu_mem_usage, state_dict=state
            )
    else:
        peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=low_cpu_mem_usage)
    result = peft.set_peft_model_state_dict(model, state, low_cpu_mem_usage=low_cpu_mem_usage)
    assert not result.unexpected_keys
    assert_same(logits(model.eval()), reference)
    if with_state:
        assert tuned(model) == {
            name if "_tower." not in name else name.removesuffix(".linear") + ".linear"
            for name in names
        }


@pytest.mark.usefixtures("native_adapters")
@pytest.mark.regression(
    "clippable_linear", r"Target module Gemma4ClippableLinear\(.*is not supported"
)
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_native_load_adapter(base, layout, reference, low_cpu_mem_usage, caplog):
    model = copy.deepcopy(base)
    plain = logits(model)
    model.load_adapter(str(layout), low_cpu_mem_usage=low_cpu_mem_usage)
    assert_same(logits(model), reference)
    assert not [record for record in caplog.records if "_tower." in record.getMessage()]
    state = model.get_adapter_state_dict()
    assert any(".linear.lora_A" in key for key in state)
    assert all(".linear.lora_" in key for key in state if "_tower." in key)

    model.load_adapter(
        peft_config=peft.LoraConfig.from_pretrained(layout),
        adapter_state_dict=load_file(layout / "adapter_model.safetensors"),
        adapter_name="again",
    )
    model.set_adapter("again")
    assert_same(logits(model), reference)
    model.disable_adapters()
    assert_same(logits(model), plain)
    model.enable_adapters()
    model.delete_adapter("again")
    model.set_adapter("default")
    assert_same(logits(model), reference)


@pytest.mark.usefixtures("native_adapters")
def test_native_add_adapter(base, tmp_path):
    torch.manual_seed(0)
    model = copy.deepcopy(base)
    model.add_adapter(config_of("LORA", BROAD_TARGETS))
    expected = logits(randomized(model).eval())
    assert {f"{n}.linear" for n in wrappers(base) if n.endswith("q_proj")} <= tuned(model)
    model.save_pretrained(tmp_path)
    assert all(".linear." in key for key in saved_keys(tmp_path) if "_tower." in key)
    base.load_adapter(str(tmp_path))
    assert_same(logits(base), expected)


@pytest.mark.parametrize("kind", ["LOHA", "IA3", "OFT"])
def test_outer_keys_of_other_methods(base, tmp_path, kind):
    model = randomized(adapted(base, BROAD_TARGETS, kind))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = {key.replace(".linear.", "."): value for key, value in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    assert_same(logits(again), expected)


def test_hotswap(base, adapter_dir, second_adapter_dir, reference):
    from peft.utils.hotswap import hotswap_adapter

    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), second_adapter_dir).eval()
    hotswap_adapter(model, adapter_dir, "default", torch_device="cpu")
    assert_same(logits(model), reference)
