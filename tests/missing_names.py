"""A program that hides names of the libraries from this package, one at a time.

A hidden name is gone for the code of the package alone, as after a release in which the library
has another name and uses that.  ``tests/test_missing_names.py`` runs it.
"""

from __future__ import annotations

import ast
import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import types
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import gemma4_compat

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "gemma4_compat") + os.sep
#: where the attributes of objects are
OWNERS = {
    "_apply_gate": "transformers.models.gemma4.modeling_gemma4.Gemma4TextExperts",
    "_attn_implementation": "transformers.PreTrainedConfig",
    "_backward_hooks": "torch.nn.Module",
    "_backward_pre_hooks": "torch.nn.Module",
    "_buffers": "torch.nn.Module",
    "_cast_input_dtype": "peft.tuners.tuners_utils.BaseTunerLayer",
    "_check_target_module_exists": "peft.tuners.tuners_utils.BaseTuner",
    "_compiled_call_impl": "torch.nn.Module",
    "_create_and_replace": "peft.tuners.tuners_utils.BaseTuner",
    "_custom_modules": "peft.LoraConfig",
    "_dequantize_weights": "",
    "_experts_implementation": "transformers.PreTrainedConfig",
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_from_config": "transformers.PreTrainedModel",
    "_get_available_adapters": "peft.tuners.tuners_utils.BaseTunerLayer",
    "_gradient_checkpointing_func": "torch.nn.Module",
    "_hf_hook": "torch.nn.Module",
    "_hf_peft_config_loaded": "transformers.PreTrainedModel",
    "_is_fsdp_managed_module": "torch.nn.Module",
    "_is_replica": "torch.nn.Module",
    "_load_from_state_dict": "torch.nn.Module",
    "_load_pretrained_model": "transformers.PreTrainedModel",
    "_load_state_dict_post_hooks": "torch.nn.Module",
    "_mask_length": "transformers.GenerationConfig",
    "_modules": "torch.nn.Module",
    "_norm": "transformers.models.gemma4.modeling_gemma4.Gemma4RMSNorm",
    "_old_forward": "torch.nn.Module",
    "_parameters": "torch.nn.Module",
    "_prepare_adapter_config": "peft.tuners.tuners_utils.BaseTuner",
    "_replace_old_cache_name": "transformers.utils.ModelOutput",
    "_skip_keys_device_placement": "transformers.PreTrainedModel",
    "_supports_flash_attn": "transformers.PreTrainedModel",
    "_supports_flex_attn": "transformers.PreTrainedModel",
    "_supports_sdpa": "transformers.PreTrainedModel",
    "_version": "torch.Tensor",
    "_weight_conversions": "transformers.PreTrainedModel",
}


# -- hiding ----------------------------------------------------------------------------------------


def is_ours(frame):
    return frame.f_code.co_filename.startswith(PACKAGE)


class Hidden:
    """A class attribute, or one of its objects, that the package does not see."""

    def __init__(self, owner, name):
        self.name, self.raw = name, NONE
        for cls in owner.__mro__:
            if name in vars(cls):
                self.raw = vars(cls)[name]
                break

    def __get__(self, instance, owner=None):
        if is_ours(sys._getframe(1)):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}")
        if instance is not None and self.name in vars(instance):
            return vars(instance)[self.name]
        if self.raw is NONE:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}")
        get = getattr(type(self.raw), "__get__", None)
        return get(self.raw, instance, owner) if get else self.raw

    def __set__(self, instance, value):
        if hasattr(type(self.raw), "__set__"):
            type(self.raw).__set__(self.raw, instance, value)
        else:
            vars(instance)[self.name] = value

    def __delete__(self, instance):
        try:
            del vars(instance)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None


NONE = object()


def resolve(name):
    """The owner of a name, and the attribute; ``None`` if there is none."""
    path, _, attribute = name.rpartition(".")
    if not path:
        path = OWNERS.get(attribute, "")
    if not path:
        return None
    parts = path.split(".")
    owner = None
    for count in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            owner = getattr(owner, part, None)
        break
    if owner is None or not isinstance(owner, (types.ModuleType, type)):
        return None
    if isinstance(owner, types.ModuleType) and not hasattr(owner, attribute):
        return None
    return owner, attribute


@contextmanager
def hidden(name):
    owner, attribute = resolve(name)
    if isinstance(owner, type):
        own = vars(owner).get(attribute, NONE)
        setattr(owner, attribute, Hidden(owner, attribute))
        try:
            yield
        finally:
            if own is NONE:
                type.__delattr__(owner, attribute)
            else:
                type.__setattr__(owner, attribute, own)
        return
    kind = type(owner)

    class Lacking(kind):
        def __getattribute__(self, key):
            if key == attribute and is_ours(sys._getframe(1)):
                raise AttributeError(f"module {owner.__name__!r} has no attribute {key!r}")
            return super().__getattribute__(key)

    owner.__class__ = Lacking
    taken = sys.modules.pop(name, None) if f"{name}" in sys.modules else None
    try:
        if taken is not None:
            sys.modules[name] = taken
        yield
    finally:
        owner.__class__ = kind


# -- what a user does ------------------------------------------------------------------------------


@cache
def folders():
    from gemma4_compat.tiny import build_adapter, build_checkpoint

    base = Path(tempfile.mkdtemp())
    model = build_checkpoint(base / "model")
    return base, model, build_adapter(base / "adapter", model)


def numbers(*tensors):
    return [float(each.detach().double().abs().sum()) for each in tensors]


def batch(config, length=24):
    import torch

    ids = torch.randint(3, 120, (2, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :8] = -100
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "mm_token_type_ids": torch.zeros_like(ids),
    }


def load(kind=None, **options):
    from tests.support import load_model

    return load_model(folders()[1], kind, **options)


def labelled(model):
    """Loss, gradients and logits of a labelled step."""
    model.train()
    model.zero_grad()
    output = model(**batch(model.config))
    output.loss.backward()
    named = sorted(model.named_parameters())
    grads = [p.grad for _, p in named if p.grad is not None]
    found = [*numbers(output.loss, output.logits), *map(float, numbers(*grads))]
    model.eval()
    return found


def plain():
    """Forward, a labelled step, generate with two caches, save."""
    import torch

    from gemma4_compat.tiny import image_inputs, text_inputs

    model = load().float()
    found = []
    with torch.no_grad():
        for make in (text_inputs, image_inputs):
            found += numbers(model(**make(model.config)).logits.float())
    found += labelled(model)
    positions = torch.arange(24)[None].expand(2, -1)
    model.train()
    found += numbers(model(**batch(model.config), position_ids=positions).loss)
    model.eval()
    for options in ({}, {"cache_implementation": "static"}):
        ids = model.generate(
            **text_inputs(model.config), max_new_tokens=3, do_sample=False, **options
        )
        found += numbers(ids)
    return found + saved(model)


def saved(model):
    from safetensors.torch import load_file

    folder = Path(tempfile.mkdtemp(dir=folders()[0]))
    model.save_pretrained(folder)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    shutil.rmtree(folder)
    return [float(len(tensors)), *numbers(*(t.float() for _, t in sorted(tensors.items())))]


def offloaded():
    """4 bits, the towers on the disk, an adapter: forward, step, generate, merge, save."""
    import torch
    from peft import PeftModel

    from gemma4_compat.tiny import image_inputs, text_inputs
    from tests.support import split

    model = load("nf4-nested")
    model = split(model, Path(tempfile.mkdtemp(dir=folders()[0])))
    found = []
    with torch.no_grad():
        for _ in range(2):
            found += numbers(model(**image_inputs(model.config)).logits.float())
    found += saved(model)
    model = PeftModel.from_pretrained(model, folders()[2], is_trainable=True)
    found += labelled(model)
    with torch.no_grad():
        found += numbers(model(**image_inputs(model.config)).logits.float())
    ids = model.generate(**text_inputs(model.config), max_new_tokens=3, do_sample=False)
    found += numbers(ids)
    model = model.merge_and_unload()
    with torch.no_grad():
        found += numbers(model(**text_inputs(model.config)).logits.float())
    return found


def dispatched():
    """A map at loading, with most of it on the disk; a prompt in chunks; resized, saved."""
    import torch

    from gemma4_compat.tiny import text_inputs

    folder = tempfile.mkdtemp(dir=folders()[0])
    device_map = {"model.language_model.layers.0": "disk", "model.vision_tower": "disk", "": "cpu"}
    model = load(device_map=device_map, offload_folder=folder)
    found = []
    with torch.no_grad():
        found += numbers(model(**text_inputs(model.config)).logits.float())
    inputs = text_inputs(model.config)
    options = {"max_new_tokens": 3, "do_sample": False, "prefill_chunk_size": 4}
    found += numbers(model.generate(**inputs, **options))
    model.load_state_dict(model.state_dict(), strict=False)
    model.resize_token_embeddings(520)
    return found + saved(model)


def trained():
    """Two steps of Trainer, of two micro batches each, with gradient checkpointing."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = load().float()
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=r".*language_model.*q_proj", init_lora_weights=False)
    model = get_peft_model(model, config)
    rows = batch(model.config)
    data = [{k: v[i % 2].clone() for k, v in rows.items()} for i in range(4)]
    for index, row in enumerate(data):
        row["labels"][: 4 * index] = -100
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=folders()[0]), per_device_train_batch_size=1,
        gradient_accumulation_steps=2, max_steps=2, report_to=[], save_strategy="no", seed=0,
        use_cpu=True, gradient_checkpointing=True, disable_tqdm=True, logging_strategy="no",
        gradient_checkpointing_kwargs={"use_reentrant": True}, learning_rate=0.1,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:2])
    trainer.train()
    named = sorted(model.named_parameters())
    found = numbers(*(p for _, p in named if p.requires_grad))
    return [*found, trainer.evaluate()["eval_loss"]]


def experts():
    """Experts in 4 bits, with an adapter on them."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma4ForCausalLM

    from gemma4_compat.model.meta import bnb_config
    from tests.support import save_random

    folder = folders()[0] / "experts"
    if not folder.exists():
        save_random("Gemma4 experts", folder)
    quantised = bnb_config("nf4", nested=True)
    model = Gemma4ForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=quantised, device_map={"": "cpu"}
    )
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        found = numbers(model(ids).logits.float())
    found += saved(model)
    torch.manual_seed(0)
    config = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"],
    )  # fmt: skip
    model = get_peft_model(model, config)
    return found + labelled(model)


def native():
    """transformers' own adapter methods, on a split model."""
    import torch

    from gemma4_compat.tiny import text_inputs
    from tests.support import split

    model = split(load(), Path(tempfile.mkdtemp(dir=folders()[0])))
    model.load_adapter(str(folders()[2]))
    with torch.no_grad():
        found = numbers(model(**text_inputs(model.config)).logits.float())
    model.delete_adapter("default")
    with torch.no_grad():
        return found + numbers(model(**text_inputs(model.config)).logits.float())


WORK = (plain, offloaded, dispatched, trained, experts, native)


def is_like(found, expected):
    """Whether outcomes are equal, or all numbers but for rounding in bfloat16."""
    if isinstance(found, str) or isinstance(expected, str):
        return found == expected
    pairs = zip(found, expected, strict=False)
    return len(found) == len(expected) and all(abs(a - b) <= 0.05 * abs(b) + 0.05 for a, b in pairs)


def outcome(work):
    import torch

    torch.manual_seed(0)
    try:
        return work()
    except Exception as error:
        import traceback

        last = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
        where = f" [{Path(last[-1].filename).name}:{last[-1].lineno}]" if last else ""
        return f"{type(error).__name__}: {str(error)[:150]}{where}"


# -- which patches and which work a name is for ----------------------------------------------------


@cache
def imports_of(file):
    """The files of the package that a file needs, itself included."""
    found, waiting = set(), [file]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        found.add(each)
        path = Path(PACKAGE) / each
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = path.parents[node.level - 1]
            base = base.joinpath(*(node.module or "").split(".")) if node.module else base
            for option in (base, *(base / alias.name for alias in node.names)):
                if option.with_suffix(".py").exists():
                    waiting.append(option.with_suffix(".py").relative_to(PACKAGE).as_posix())
    return frozenset(found)


def patches_of(files):
    """The patches that need one of these files."""
    for path in sorted(Path(PACKAGE).glob("patches/*/[a-z]*.py")):
        if imports_of(path.relative_to(PACKAGE).as_posix()) & set(files):
            yield path.stem


def files_of(work):
    """The files of the package that run during some work."""
    found = set()

    def profile(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            found.add(name[len(PACKAGE) :].replace(os.sep, "/"))

    sys.setprofile(profile)
    try:
        result = outcome(work)
    finally:
        sys.setprofile(None)
    return found, result


def clear_caches():
    for name, module in list(sys.modules.items()):
        if name.startswith("gemma4_compat"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def listen():
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("gemma4_compat").addHandler(handler)
    return messages


def main(names):
    """Hide each name: {name: (files, work, states, warnings, outcomes)}."""
    import torch  # noqa: F401
    import transformers

    from gemma4_compat.runtime import logits

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    logits.BYTES = 4 * 512 * 24
    messages = listen()
    before = {s.name: s.state.value for s in gemma4_compat.status(import_targets=True)}
    works = {work.__name__: work for work in WORK}
    files, expected = {}, {}
    for name, work in works.items():
        start = time.time()
        files[name], expected[name] = files_of(work)
        print(name, round(time.time() - start, 1), str(expected[name])[:200], file=sys.stderr)
    with gemma4_compat.disabled():
        without = {name: outcome(work) for name, work in works.items()}
    for name in works:
        print("without", name, str(without[name])[:200], file=sys.stderr)
    results = {}
    for name, readers in names.items():
        start = time.time()
        if resolve(name) is None:
            results[name] = "not found"
            continue
        patches = [p for p in patches_of(readers) if before[p] == "applied"]
        wanted = [w for w in works if files[w] & set(readers)]
        messages.clear()
        gemma4_compat._engine._warned.clear()
        if patches:
            gemma4_compat.uninstall(*patches)
        clear_caches()
        try:
            with hidden(name):
                if patches:
                    gemma4_compat.install(*patches)
                states = {s.name: f"{s.state.value}: {s.reason}" for s in gemma4_compat.status()}
                changed = {n: s for n, s in states.items() if not s.startswith(before[n])}
                found = {w: outcome(works[w]) for w in wanted}
        except BaseException as error:
            import traceback

            results[name] = {"crash": traceback.format_exc()[-1500:]}
            print(name, results[name], file=sys.stderr)
            continue
        finally:
            clear_caches()
            if patches:
                gemma4_compat.install(*patches)
        bad = {}
        for w, value in found.items():
            if not any(is_like(value, each) for each in (expected[w], without[w])):
                bad[w] = value if isinstance(value, str) else f"other numbers {value}"
        results[name] = {
            "changed": changed, "bad": bad, "work": wanted, "warnings": list(messages),
            "patches": len(patches), "seconds": round(time.time() - start, 2),
        }  # fmt: skip
        print(name, json.dumps(results[name])[:600], file=sys.stderr, flush=True)
    return results


if __name__ == "__main__":
    from tools.private_names import reads

    names = {}
    for read in reads():
        if read.guard != "replaced":
            names.setdefault(read.name, []).append(read.file)
    if len(sys.argv) > 2:
        names = {n: f for n, f in names.items() if n in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(main(names), indent=1))
