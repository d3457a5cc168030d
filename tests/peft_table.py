"""Compares PEFT on a split model with PEFT on the same model on one device.

``python tests/peft_table.py [--only PATTERN] [--jobs N] [--json FILE]`` prints a markdown table.

A row is a feature of PEFT on one module of the tiny checkpoint, and that module is offloaded to
disk.  A column is an action.  Each action runs on the whole model and on the split one, from the
same seed, and everything that it returns is compared: logits, adapter tensors, gradients, files.
The tuners come from PEFT's own registry, so a new release adds new rows.

Rows with a difference run again in a second process, without the patches.  There PEFT removes the
offload and is exact.  What is exact without the patches must be exact with them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fnmatch
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

TOWER = "model.vision_tower"
LANGUAGE = "model.language_model"
LAYER = f"{LANGUAGE}.layers.1"
#: by place: the modules that the feature adapts, and the modules that are offloaded
PLACES = {
    "embed_tokens": ([f"{LANGUAGE}.embed_tokens"], [f"{LANGUAGE}.embed_tokens"]),
    "PLE": ([f"{LANGUAGE}.embed_tokens_per_layer"], [f"{LANGUAGE}.embed_tokens_per_layer"]),
    "layer": ([f"{LAYER}.mlp.up_proj", f"{LAYER}.self_attn.q_proj"], [LAYER]),
    "norm": ([f"{LAYER}.input_layernorm"], [LAYER]),
    "lm_head": (["lm_head"], ["lm_head"]),
    "projector": (["model.embed_vision.embedding_projection"], ["model.embed_vision"]),
    "PLE projection": (
        [f"{LANGUAGE}.per_layer_model_projection"],
        [f"{LANGUAGE}.per_layer_model_projection"],
    ),
    "tower": ([f"{TOWER}.encoder.layers.0.self_attn.q_proj.linear"], [TOWER]),
}
#: places for prompt methods, which have no target: only the offloaded modules matter
PROMPT_PLACES = ("embed_tokens", "layer", "tower")
IMAGE = ("projector", "tower")
#: a module that is not offloaded, for features that need another adapter
ELSEWHERE = f"{LANGUAGE}.layers.0.mlp.up_proj"
FOUR_BIT = "layer, nf4"

# Options for a small adapter of each tuner.  A tuner without options only gets its target.
OPTIONS = {
    "LORA": {"r": 4},
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10},
    "ADAMSS": {"r": 8, "num_subspaces": 2},
    "BOFT": {"boft_block_size": 8},
    "C3A": {"block_size": 32},
    "DEFT": {"r": 4},
    "DELORA": {"r": 4},
    "FOURIERFT": {"n_frequency": 50},
    "GLORA": {"r": 4},
    "GRALORA": {"r": 4, "hybrid_r": 0, "gralora_k": 2},
    "HIRA": {"r": 4},
    "HRA": {"r": 4},
    "IA3": {"feedforward_modules": []},
    "LILY": {"r": 4},
    "LOHA": {"r": 4},
    "LOKR": {"r": 4},
    "MISS": {"r": 8},
    "OFT": {"r": 0, "oft_block_size": 8},
    "OSF": {"effective_rank": 8},
    "PEANUT": {"r": 4},
    "POLY": {"r": 4, "n_tasks": 2, "n_skills": 2},
    "PSOFT": {"r": 8},
    "PVERA": {"r": 4},
    "RANDLORA": {"r": 8},
    "SHIRA": {"r": 4},
    "TINYLORA": {"r": 2, "u": 8},
    "TRAINABLE_TOKENS": {"token_indices": [2, 7, 400]},
    "UNILORA": {"r": 4, "theta_d_length": 256},
    "VBLORA": {"r": 4, "num_vectors": 8, "vector_length": 32, "topk": 2},
    "VERA": {"r": 4},
    "WAVEFT": {"n_frequency": 50},
}
LORA_VARIANTS = {
    "DoRA": {"use_dora": True},
    "rsLoRA": {"use_rslora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "PiSSA niter": {"init_lora_weights": "pissa_niter_4"},
    "OLoRA": {"init_lora_weights": "olora"},
    "EVA": {"init_lora_weights": "eva"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "LoftQ": {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
    "LoRA bias": {"lora_bias": True},
    "aLoRA": {"alora_invocation_tokens": [5]},
    "QALoRA": {"use_qalora": True, "qalora_group_size": 8},
    "KaSA": {"kasa_config": None},  # PEFT's own class, made in make_config
    "layer_replication": {"layer_replication": [[0, 3], [2, 6]]},
}
PROMPT_OPTIONS = {
    "PROMPT_TUNING": {},
    "P_TUNING": {"encoder_hidden_size": 16},
    "PREFIX_TUNING": {},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "CARTRIDGE": {},
    "CPT": {
        "cpt_token_ids": [5, 6, 7, 8],
        "cpt_mask": [1, 1, 1, 1],
        "cpt_tokens_type_mask": [1, 2, 3, 4],
        "num_virtual_tokens": None,
    },
}
#: tuners for all places: each represents a way to treat the base weight
FEW = ("LORA", "LN_TUNING", "OFT", "IA3", "VERA", "UNILORA", "DoRA", "PiSSA")
#: Methods without a target: upstream has separate tests with a separate model for them.
WITHOUT_TARGET = ("ADAPTION_PROMPT",)

ACTIONS = (
    "create", "forward", "disable", "save", "train",
    "load", "resave", "second", "delete", "merge", "merge&unload", "save merged", "unload",
    "native load", "native add",
)  # fmt: skip


# ---------------------------------------------------------------- rows


def rows():
    """The names of all rows, "feature @ place"; :func:`make_config` defines the features."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING as TUNERS

    prompts = [*PROMPT_OPTIONS, *WITHOUT_TARGET]
    kinds = [kind.value for kind in TUNERS]
    tuners = [kind for kind in kinds if kind not in prompts]
    found = [(None, place) for place in PLACES]
    for feature in ("modules_to_save", "modules_to_save, tied", "target_parameters"):
        found += [(feature, place) for place in PLACES]
    for feature in ("trainable_token_indices", "trainable_token_indices, tied", "LoRA: tied"):
        found += [(feature, place) for place in ("embed_tokens", "PLE", "lm_head")]
    found += [(kind, place) for kind in tuners if kind in FEW for place in PLACES]
    found += [("modules_to_save", FOUR_BIT)]
    found += [(kind, FOUR_BIT) for kind in tuners]
    found += [(kind, place) for kind in prompts if kind in kinds for place in PROMPT_PLACES]
    found += [(kind, place) for kind in tuners if kind not in FEW for place in _places(kind)]
    found += [(f"LoRA: {name}", place) for name in LORA_VARIANTS for place in _places(name)]
    found += [(f"LoRA: {name}", FOUR_BIT) for name in LORA_VARIANTS]
    return [f"{feature or 'none'} @ {place}" for feature, place in found]


def _places(name):
    """Linear layers outside the decoder are like those inside, so only FEW tuners run on them."""
    if name in FEW:
        return list(PLACES)
    places = ["embed_tokens", "PLE", "layer", "norm"]
    return places if name in LORA_VARIANTS else [*places, "tower"]


def make_config(feature, place, adapter_dirs):
    """A PEFT config for this feature on this place."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS
    from peft.utils.peft_types import PeftType

    # PEFT does not train a copy of a quantized weight.
    four_bit = "norm" if feature.startswith("modules_to_save") else "layer"
    targets = PLACES[four_bit if place == FOUR_BIT else place][0]
    lora = {"r": 4, "lora_alpha": 8, "target_modules": targets}
    leaves = [target.rpartition(".")[2] for target in targets]
    if feature == "LoRA: tied":
        return peft.LoraConfig(**lora, ensure_weight_tying=True)
    if feature == "LoRA: KaSA":
        from peft.tuners.lora import config

        if not hasattr(config, "KasaConfig"):
            raise NotImplementedError("this release of PEFT has no KaSA")
        return peft.LoraConfig(**lora, kasa_config=config.KasaConfig())
    if feature.startswith("LoRA: "):
        return peft.LoraConfig(**lora, **LORA_VARIANTS[feature.removeprefix("LoRA: ")])
    if feature.startswith("modules_to_save"):
        lora |= {"target_modules": [ELSEWHERE], "modules_to_save": targets}
        return peft.LoraConfig(**lora, **_tied(feature))
    if feature.startswith("trainable_token_indices"):
        lora["target_modules"] = [ELSEWHERE]
        tokens = {leaves[0]: [2, 7, 400]}
        return peft.LoraConfig(**lora, trainable_token_indices=tokens, **_tied(feature))
    if feature == "target_parameters":
        lora |= {"target_modules": [], "target_parameters": [f"{name}.weight" for name in targets]}
        return peft.LoraConfig(**lora)
    kind = PeftType(feature)
    if feature in PROMPT_OPTIONS:
        options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4} | PROMPT_OPTIONS[feature]
        return CONFIGS[kind](**{k: v for k, v in options.items() if v is not None})
    if feature == "ADAPTION_PROMPT":
        return CONFIGS[kind](
            adapter_len=4, adapter_layers=2, target_modules="self_attn", task_type="CAUSAL_LM"
        )
    if feature == "XLORA":
        adapters = {str(i): str(folder) for i, folder in enumerate(adapter_dirs)}
        return CONFIGS[kind](
            task_type="CAUSAL_LM", hidden_size=128, adapters=adapters, xlora_size=8,
            xlora_dropout_p=0.0,
        )  # fmt: skip
    return CONFIGS[kind](target_modules=targets, **OPTIONS.get(feature, {}))


def _tied(feature):
    return {"ensure_weight_tying": True} if feature.endswith("tied") else {}


# ---------------------------------------------------------------- models

#: The environment variable with a fault for tests of this tool: see :func:`plant`.
FAULT = "PEFT_TABLE_FAULT"


def plant(model, fault):
    """Plant a fault in an offloaded layer of the split model."""
    hook = model.get_submodule(f"{LAYER}.mlp.up_proj")._hf_hook
    if fault == "weight":
        weight = hook.weights_map["weight"].clone()
        weight[0, 0] += 1
        hook.weights_map = {"weight": weight}
    elif fault == "error":
        hook.weights_map = {}
    else:
        raise SystemExit(f"{FAULT}={fault}: 'weight' or 'error'")


class Bases:
    """The tiny checkpoint, whole and split, loaded once for each place.

    Actions run in forked processes, so they do not change these models.
    """

    def __init__(self, folder):
        from gemma4_compat.tiny import build_checkpoint

        self.path = build_checkpoint(folder / "model")
        self.folder = folder
        self.loaded = {}
        self.pairs = {}
        #: by place: the parameters that a forward moves without any adapter (tied weights)
        self.unsettled = {}

    def copy(self, row):
        """A whole model; without images also without towers, which take most of the time."""
        from tests.support import load_model

        images = row.place in IMAGE
        if (row.kind, images) not in self.loaded:
            model = load_model(self.path, row.kind)
            # For this tool the audio tower is no different from the vision tower.
            model.model.audio_tower = model.model.embed_audio = None
            model.config.audio_config = None
            if not images:
                model.model.vision_tower = model.model.embed_vision = None
                model.config.vision_config = None
            self.loaded[row.kind, images] = model
        return copy.deepcopy(self.loaded[row.kind, images])

    def pair(self, row):
        """The split model and the whole one."""
        from tests.support import split

        if row.place not in self.pairs:
            device_map = {**dict.fromkeys(row.offloaded, "disk"), "": "cpu"}
            parted = split(self.copy(row), tempfile.mkdtemp(dir=self.folder), device_map)
            if FAULT in os.environ:
                plant(parted, os.environ[FAULT])
            self.pairs[row.place] = parted, self.copy(row)
            self.unsettled[row.place] = forked(lambda: moved_by_forward(row, parted)) or []
        parted, whole = self.pairs[row.place]
        return Model(row, parted, True), Model(row, whole, False)


def moved_by_forward(row, parted):
    model = Model(row, parted, True)
    attempt(forward, model)
    now = _placement(model.base)
    return [name for name in now if model.placement[name] != now[name]]


class Model:
    """A model under test, whole or split, with its state before PEFT changed it."""

    def __init__(self, row, base, is_split):
        self.row, self.is_split, self.folder = row, is_split, row.folder
        self.base = self.model = base
        self.placement = _placement(base)
        self.unsettled = row.bases.unsettled.get(row.place, ())
        self.hooks = _offload_hooks(base)

    def inputs(self, labels=False):
        from gemma4_compat.tiny import image_inputs, text_inputs

        make = image_inputs if self.row.place in IMAGE else text_inputs
        inputs = make(self.base.config)
        if self.row.feature in PROMPT_OPTIONS:
            inputs.pop("mm_token_type_ids")
        import torch

        if self.row.feature in ("POLY", "MULTITASK_PROMPT_TUNING") and self.model is not self.base:
            inputs["task_ids"] = torch.zeros(1, dtype=torch.long)
        if labels:
            inputs["labels"] = inputs["input_ids"].clone()
        return inputs

    def logits(self):
        import torch

        with torch.no_grad():
            return self.model(**self.inputs()).logits.float()

    def flags(self):
        """Faults of the split model besides its outputs: moved parameters and lost hooks."""
        if not self.is_split:
            return {}
        now = _placement(self.model)
        before = {n: m for n, m in self.placement.items() if n not in self.unsettled}
        moved = [n for n, meta in now.items() if before.get(n, meta) != meta]
        meta = [n for n, p in _adapter_tensors(self.model).items() if p.is_meta]
        lost = self.hooks - _offload_hooks(self.model)
        found = {"meta": meta, "moved": moved, "hooks": sorted(lost)}
        return {name: names for name, names in found.items() if names}


#: The steps that PEFT's wrappers add to the names of parameters.
_WRAPPERS = {"base_model", "lora_model", "base_layer", "original_module", "token_adapter"}


def _plain(name):
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "model" and parts[1] in ("model", "lm_head"):
        parts = parts[1:]
    return ".".join(parts)


def _placement(model):
    """Whether each parameter of the base model is on meta."""
    return {_plain(name): p.is_meta for name, p in model.named_parameters(remove_duplicate=False)}


def _offload_hooks(model):
    found = set()
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,))):
            found.add(_plain(name))
    return found


def _adapter_tensors(model):
    """Every tensor of an adapter: their names contain the adapter's name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if {"default", "second"} & set(name.split(".")) or ".lora_A." in name or ".lora_B." in name
    }


def _values(tensors):
    return {n: t.detach().clone() for n, t in tensors.items() if not t.is_meta}


def perturb(model, seed):
    """Give every trainable tensor random values: many start without an effect."""
    import torch

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and p.is_floating_point() and not p.is_meta:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
                noise = torch.randn(p.shape, generator=generator)
                size = p.float().std().item() if p.numel() > 1 else 0.0
                p.add_((0.3 * max(size, 0.1) * noise).to(p.dtype))


# ---------------------------------------------------------------- actions
# Each takes a Model and returns the values to compare, by name.


class Row:
    def __init__(self, name, folder, bases):
        self.name, self.folder, self.bases = name, Path(folder), bases
        feature, _, self.place = name.partition(" @ ")
        self.feature = None if feature == "none" else feature
        self.kind = "nf4-nested" if self.place == FOUR_BIT else None
        self.offloaded = PLACES["layer" if self.place == FOUR_BIT else self.place][1]
        #: two adapters with different seeds, saved by the whole model
        self.adapters = [self.folder / "first", self.folder / "second"]
        self.parts = []

    def whole(self):
        return Model(self, self.bases.copy(self), False)

    def config(self):
        import torch

        if self.feature == "XLORA" and not self.parts:
            with torch.random.fork_rng(devices=[]):  # keeps the seed of the first model
                self._make_parts()
        return make_config(self.feature, self.place, self.parts)

    def _make_parts(self):
        from peft import get_peft_model

        lora = get_peft_model(self.bases.copy(self), make_config("LORA", self.place, []))
        for seed in range(2):
            perturb(lora, seed)
            lora.save_pretrained(self.folder / f"part{seed}")
            self.parts.append(self.folder / f"part{seed}")


def create(m):
    from peft import get_peft_model

    m.model = get_peft_model(m.base, m.row.config()).eval()
    found = {"new " + n: t for n, t in _values(_adapter_tensors(m.model)).items()}
    found["logits as created"] = m.logits()
    perturb(m.model, 0)
    return {**found, "logits": m.logits()}


def forward(m):
    return {"first": m.logits(), "again": m.logits()}


def disable(m):
    with m.model.disable_adapter():
        found = {"disabled": m.logits()}
    return {**found, "enabled": m.logits()}


def save(m):
    """The saved file, and the outputs of a whole model with it."""
    from peft import PeftModel

    folder = tempfile.mkdtemp(dir=m.folder)
    m.model.save_pretrained(folder)
    whole = m.row.whole()
    whole.model = PeftModel.from_pretrained(whole.base, folder)
    return {**_files(folder), "reloaded": whole.logits()}


def train(m):
    import torch

    m.model.train()
    trained = {n: p for n, p in m.model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    loss = m.model(**m.inputs(labels=True)).loss
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"grad {n}": p.grad for n, p in trained.items() if p.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    found |= {f"stepped {n}": t for n, t in _values(trained).items()}
    m.model.eval()
    return {**found, "logits": m.logits()}


def load(m):
    from peft import PeftModel

    m.model = PeftModel.from_pretrained(m.base, m.row.adapters[0])
    return {**_values(_adapter_tensors(m.model)), "logits": m.logits(), "again": m.logits()}


def resave(m):
    folder = tempfile.mkdtemp(dir=m.folder)
    m.model.save_pretrained(folder)
    return _files(folder)


def _files(folder):
    from safetensors.torch import load_file

    return {
        f"{file.relative_to(folder)}: {name}": tensor
        for file in sorted(Path(folder).rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def second(m):
    m.model.load_adapter(m.row.adapters[1], "second")
    found = {"first": m.logits()}
    m.model.set_adapter("second")
    found["second"] = m.logits()
    m.model.set_adapter("default")
    return {**found, **_values(_adapter_tensors(m.model)), "first again": m.logits()}


def delete(m):
    m.model.load_adapter(m.row.adapters[1], "second")
    m.model.set_adapter("second")
    found = {"second": m.logits()}
    m.model.delete_adapter("second")
    m.model.set_adapter("default")
    return {**found, "first": m.logits()}


def merge(m):
    m.model.merge_adapter()
    found = {"merged": m.logits()}
    m.model.unmerge_adapter()
    return {**found, "unmerged": m.logits()}


def merge_and_unload(m):
    m.model = m.model.merge_and_unload()
    return {"merged": m.logits(), "again": m.logits()}


def save_merged(m):
    """A merged model, saved and loaded whole."""
    m.model = m.model.merge_and_unload()
    from transformers import Gemma4ForConditionalGeneration as Gemma4

    folder = tempfile.mkdtemp(dir=m.folder)
    m.model.save_pretrained(folder)
    whole = Gemma4.from_pretrained(folder, device_map={"": "cpu"}, dtype="bfloat16")
    return {"reloaded": Model(m.row, whole.eval(), False).logits()}


def unload(m):
    m.model = m.model.unload()
    return {"logits": m.logits()}


def native_load(m):
    m.base.load_adapter(str(m.row.adapters[0]))
    return {**_values(_adapter_tensors(m.model)), "logits": m.logits(), "again": m.logits()}


def native_add(m):
    m.base.add_adapter(m.row.config())
    found = {"new " + n: t for n, t in _values(_adapter_tensors(m.model)).items()}
    perturb(m.model, 0)
    return {**found, "logits": m.logits()}


#: The first action of each session makes the model; each of the others starts with that model.
SESSIONS = (
    (("create", create), ("forward", forward), ("disable", disable), ("save", save),
     ("train", train), ("unload", unload)),
    (("load", load), ("resave", resave), ("second", second), ("delete", delete), ("merge", merge),
     ("merge&unload", merge_and_unload), ("save merged", save_merged)),
    (("native load", native_load),),
    (("native add", native_add),),
)  # fmt: skip
MAKES_ADAPTERS = "create"


# ---------------------------------------------------------------- where the whole model is off
# If PEFT treats the two ends of a tied model as one, it puts one adapter on both ends, or none.
# A reference is the correct result of an action, from whole models without this problem.


def apart(row):
    """Each adapter on its own whole model."""
    from peft import PeftModel

    found = {}
    for name, folder in zip(("first", "second"), row.adapters, strict=True):
        whole = row.whole()
        adapter = "default" if name == "first" else name
        whole.model = PeftModel.from_pretrained(whole.base, folder, adapter_name=adapter)
        found |= {name: whole.logits(), **_values(_adapter_tensors(whole.model))}
    return found


def second_apart(row):
    found = apart(row)
    return {**found, "first again": found["first"]}


def delete_apart(row):
    found = apart(row)
    return {name: found[name] for name in ("first", "second")}


def untied(row):
    """An adapter on a whole model whose head has its own copy of the embeddings' weight."""
    import torch

    whole = row.whole()
    head = whole.base.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    load(whole)
    return whole


def merge_untied(row):
    return merge(untied(row))


def merge_and_unload_untied(row):
    return merge_and_unload(untied(row))


def save_merged_untied(row):
    return {"reloaded": merge_and_unload(untied(row))["merged"]}


REFERENCES = {
    "second": second_apart,
    "delete": delete_apart,
    "merge": merge_untied,
    "merge&unload": merge_and_unload_untied,
    "save merged": save_merged_untied,
}


# ---------------------------------------------------------------- running


def attempt(action, model):
    """``(result, None)``, or ``(None, the error in one line)``."""
    import torch

    torch.manual_seed(0)
    try:
        return action(model), None
    except Exception as error:
        if os.environ.get("PEFT_TABLE_TRACE"):
            traceback.print_exc()
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:300]


def differences(found, expected):
    """The value that differs most, and its difference; ``None`` if all are equal."""
    import torch

    worst, where = 0.0, None
    for name in expected.keys() | found.keys():
        if name not in found or name not in expected:
            return float("inf"), f"{name} is {'missing' if name not in found else 'new'}"
        a, b = found[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf"), f"{name}: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}"
        if torch.equal(a, b):
            continue
        a, b = a.float(), b.float()
        if torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()):
            continue
        size = (a - b).abs().max().item()
        size = float("inf") if size != size else size
        if where is None or size > worst:
            worst, where = size, name
    return None if where is None else (worst, where)


def verdict(split, whole):
    """``(verdict, detail)`` for the results of an action on the split and the whole model."""
    (found, refusal), (expected, failure) = split, whole
    if failure is not None:
        return ("error", failure) if refusal is not None else ("split only", failure)
    if refusal is not None:
        return "REFUSED", refusal
    difference = differences(found, expected)
    if difference is None:
        nan = [n for n, t in expected.items() if t.is_floating_point() and t.isnan().any()]
        return ("=", f"NaN in {nan[0]}") if nan else ("=", "")
    return "WRONG", f"{difference[0]:.3g} {difference[1]}"


def judge(row, action, split, whole):
    """The verdict; it is "whole" if the split model is correct and the whole one is not."""
    kind, detail = verdict(split, whole)
    if kind in ("WRONG", "split only") and action in REFERENCES:
        expected, failure = attempt(REFERENCES[action], row)
        if failure is None:
            difference = differences(split[0], expected)
            if difference is None:
                return "whole", detail
            if kind == "split only":
                return "WRONG", f"{difference[0]:.3g} {difference[1]}; whole: {detail}"
    return kind, detail


def forked(function):
    """The function's result from a forked process, through JSON; ``None`` if the process dies."""
    inlet, outlet = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            import torch

            os.close(inlet)
            gc.freeze()  # collecting what the parent made takes as long as the work
            # A fork has no thread pool, and only one thread may start it.
            torch.set_num_threads(torch.get_num_threads())
            with os.fdopen(outlet, "w") as file:
                file.write(json.dumps(function()))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(outlet)
    with os.fdopen(inlet) as file:
        text = file.read()
    os.waitpid(process, 0)
    return json.loads(text) if text else None


DIED = ("BROKEN", "the process died", {})


def run_row(row):
    """Verdict, detail and flags by action."""
    pair = row.bases.pair(row)
    if row.feature is None:
        return forked(lambda: {"forward": run_action(row, "forward", forward, pair)})
    cells = {}
    for actions in SESSIONS:
        cells |= forked(lambda: run_session(row, pair, actions)) or {actions[0][0]: DIED}  # noqa: B023
        if cells["create"][0] in ("error", "split only", "BROKEN"):
            break  # PEFT does not support this
    return cells


def run_session(row, pair, actions):
    """The first action makes both models; each of the others starts with those."""
    (name, first), *others = actions
    results = [attempt(first, model) for model in pair]
    flags = pair[0].flags() if results[0][1] is None else {}
    cells = {name: (*judge(row, name, *results), flags)}
    if results[1][1] is None and name == MAKES_ADAPTERS:
        save_adapters(row, pair[1])
    if results[0][1] is None and results[1][1] is None:
        for name, action in others:
            run = partial(run_action, row, name, action, pair)
            cells[name] = forked(run) or DIED
    return cells


def run_action(row, name, action, pair):
    results = [attempt(action, model) for model in pair]
    flags = pair[0].flags() if results[0][1] is None else {}
    return *judge(row, name, *results), flags


def save_adapters(row, whole):
    """Save two adapters of the whole model, for both models to load; the model is not changed."""
    import torch

    trained = {n: p for n, p in whole.model.named_parameters() if p.requires_grad}
    before = _values(trained)
    whole.model.save_pretrained(row.adapters[0])
    perturb(whole.model, 1)
    whole.model.save_pretrained(row.adapters[1])
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(before[name])


def work(names):
    """Run rows in this process; one JSON line for each."""
    import logging
    import warnings

    import gemma4_compat  # noqa: F401  first: before any of the libraries that it patches

    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stderr
    import bitsandbytes  # noqa: F401  now, as importing these takes random numbers
    import peft  # noqa: F401
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        bases = Bases(Path(folder))
        for name in names:
            start = time.time()
            print(json.dumps({"begin": name}), file=out, flush=True)
            own = Path(folder) / "row"
            own.mkdir()
            try:
                cells = run_row(Row(name, own, bases))
            except Exception as error:
                traceback.print_exc()
                cells = {"create": ("BROKEN", f"{type(error).__name__}: {error}", {})}
            shutil.rmtree(own, ignore_errors=True)
            gc.collect()
            line = {"row": name, "cells": cells, "seconds": round(time.time() - start, 2)}
            print(json.dumps(line), file=out, flush=True)


def run_worker(names, with_patches, log, record):
    """Run rows in another process; if a row kills it, record that and run the rest."""
    environment = {**os.environ, "GEMMA4_COMPAT": "1" if with_patches else "0"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    results, names = {}, list(names)
    while names:
        command = [sys.executable, __file__, "--worker", json.dumps(names)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        current = None
        for text in process.stdout:
            line = json.loads(text)
            current = line.get("begin")
            if "row" in line:
                results[line["row"]] = line
                print(line["row"], line["seconds"], trouble(line), file=sys.stderr, flush=True)
                print(json.dumps({"patches": with_patches, **line}), file=record, flush=True)
                names.remove(line["row"])
        code = process.wait()
        if not names:
            break
        if current is None:
            raise SystemExit(f"the worker ended with {code} before {names[0]}")
        cells = {"create": ("CRASH", f"the process ended with {code}", {})}
        results[current] = {"row": current, "cells": cells, "seconds": 0}
        names.remove(current)
    return results


# ---------------------------------------------------------------- the table


#: verdicts under which the split model is correct
RIGHT = ("=", "whole", "split only")
LEGEND = """\
=: equal, bit for bit.  error: PEFT raises for both models.  split only: PEFT raises for the whole
model.  whole: the whole model is wrong and the split model is correct, bit for bit.  Merging into a
tied weight changes both ends; the split model equals a whole model whose head has its own weight,
also after saving and loading.  Of two adapters with tied ends PEFT ties only the first, or fails;
the split model equals a whole model with each adapter alone."""


def cell_text(cell, alone):
    """The printed text of ``cell``; ``alone`` is the same cell without the patches."""
    if cell is None:
        return ""
    kind, detail, flags = cell
    text = f"**WRONG** {detail.split()[0]}" if kind == "WRONG" else kind
    if kind in ("REFUSED", "BROKEN", "CRASH", "split only"):
        text = f"**{kind}**" if kind != "split only" else kind
    if detail.startswith("NaN"):
        text += " NaN"
    text += "".join(f" {name}:{len(names)}" for name, names in flags.items())
    if kind not in RIGHT and alone is not None and alone[0] == "=":
        text += " (**= alone**)"
    return text


def table(patched, alone, seconds):
    from importlib.metadata import version

    libraries = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
    lines = [", ".join(f"{name} {version(name)}" for name in libraries), ""]
    lines += [
        "| feature @ place | " + " | ".join(ACTIONS) + " |",
        "|---" * (len(ACTIONS) + 1) + "|",
    ]
    notes, counts = [], Counter()
    for name, line in patched.items():
        cells, others = line["cells"], alone.get(name, {}).get("cells", {})
        texts = [cell_text(cells.get(a), others.get(a)) for a in ACTIONS]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
        flagged, refused = {}, {}
        for action, (kind, detail, flags) in cells.items():
            counts[kind] += 1
            for flag, where in flags.items():
                flagged.setdefault(f"{flag}: {where[0]}", []).append(action)
            if kind == "error":
                refused.setdefault(detail[:160], []).append(action)
            elif kind != "=" or detail:
                other = others.get(action)
                was = f" (without the patches: {other[0]} {other[1][:100]})" if other else ""
                notes.append(f"- `{name}`, {action}: {kind} {detail}{was}")
        for text, actions in [*flagged.items(), *refused.items()]:
            which = "error" if text in refused else "after"
            notes.append(f"- `{name}`, {which} {', '.join(actions)}: {text}")
    lost = lost_cells(patched, alone)
    lines += ["", ", ".join(f"{kind}: {n}" for kind, n in counts.most_common())]
    lines += [f"equal without the patches, not with them: {len(lost)}"]
    lines += [f"{seconds:.0f} s", "", LEGEND, "", *notes]
    return "\n".join(lines)


def trouble(line):
    """Actions with a difference that is not PEFT's own error, or with flags."""
    return [
        action
        for action, (kind, _, flags) in line["cells"].items()
        if kind not in (*RIGHT, "error") or flags
    ]


def lost_cells(patched, alone):
    """The cells that are exact without the patches, but not with them."""
    return [
        (name, action)
        for name, line in patched.items()
        for action, cell in line["cells"].items()
        if cell[0] not in RIGHT and alone.get(name, {}).get("cells", {}).get(action, [""])[0] == "="
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="rows whose name matches, as in '*modules_to_save*'")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return
    names = [n for n in rows() if options.only is None or fnmatch.fnmatch(n, options.only)]
    if options.list:
        print("\n".join(names))
        return
    from concurrent.futures import ThreadPoolExecutor

    start = time.time()

    def run(names, with_patches):
        parts = [names[i :: options.jobs] for i in range(options.jobs)]
        found = {}
        for part in pool.map(lambda part: run_worker(part, with_patches, stream, record), parts):
            found |= part
        return {name: found[name] for name in names}

    name = os.devnull if options.json is None else options.json.with_suffix(".lines")
    with open(name, "w") as record, tempfile.TemporaryFile() as log, \
            ThreadPoolExecutor(options.jobs) as pool:  # fmt: skip
        stream = sys.stderr if os.environ.get("PEFT_TABLE_TRACE") else log
        patched = run(names, True)
        # Rows without a difference need no run without the patches.
        alone = run([name for name in names if trouble(patched[name])], False)
    if options.json:
        options.json.write_text(json.dumps({"patched": patched, "alone": alone}, indent=1))
    print(table(patched, alone, time.time() - start))
    raise SystemExit(1 if any(map(trouble, patched.values())) else 0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
