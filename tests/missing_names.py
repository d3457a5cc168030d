"""A program that hides names of the libraries from this package, one at a time.

A hidden name is gone for the code of the package alone, as after a release in which the library
has another name and uses that.  ``tests/test_missing_names.py`` runs it.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
import types
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import gemma4_compat
from gemma4_compat.engine import slots
from tools import private_names

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "gemma4_compat") + os.sep
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
#: attributes that not all releases have, and that are not on a module
ASKED = {"_custom_modules": "peft.LoraConfig", "_mask_length": "transformers.GenerationConfig"}
ASKED["_replace_old_cache_name"] = "transformers.utils.ModelOutput"


def resolve(name):
    """The owner of a name, and the attribute; ``None`` if these releases have none."""
    path, _, attribute = name.replace("()", "").rpartition(".")
    parts = (path or ASKED.get(attribute, "torch.nn.Module")).split(".")
    for count in range(len(parts), 0, -1):
        with suppress(ImportError):
            owner = importlib.import_module(".".join(parts[:count]))
            break
    else:
        return None
    for part in parts[count:]:
        owner = getattr(owner, part, None)
    if isinstance(owner, types.ModuleType) and not hasattr(owner, attribute):
        return None
    kinds = (types.ModuleType, type, types.FunctionType)
    return (owner, attribute) if isinstance(owner, kinds) else None


@contextmanager
def hidden(name):
    import torch

    owner, attribute = resolve(name)
    if isinstance(owner, types.ModuleType):
        with lacking(owner, attribute):
            yield
        return
    sets = slots._sets
    if not isinstance(owner, type):  # a function that sets the attribute of a module
        owner = torch.nn.Module
        slots._sets = lambda function, name: name != attribute and sets(function, name)
    own = vars(owner).get(attribute, NONE)
    setattr(owner, attribute, Hidden(owner, attribute))
    try:
        yield
    finally:
        slots._sets = sets
        if own is NONE:
            type.__delattr__(owner, attribute)
        else:
            type.__setattr__(owner, attribute, own)


@contextmanager
def lacking(module, attribute):
    """Give a module a class that hides an attribute from the package."""
    kind = type(module)

    class Lacking(kind):
        def __getattribute__(self, key):
            if key == attribute and is_ours(sys._getframe(1)):
                raise AttributeError(f"module {module.__name__!r} has no attribute {key!r}")
            return super().__getattribute__(key)

    types.ModuleType.__setattr__(module, "__class__", Lacking)
    try:
        yield
    finally:
        types.ModuleType.__setattr__(module, "__class__", kind)


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


def labeled(model):
    """Loss, gradients and logits of a labeled step."""
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
    """Forward, a labeled step, generate with two caches, save."""
    import torch

    from gemma4_compat.tiny import image_inputs, text_inputs

    model = load().float()
    found = []
    with torch.no_grad():
        for make in (text_inputs, image_inputs):
            found += numbers(model(**make(model.config)).logits.float())
    found += labeled(model)
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
    found += labeled(model)
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
    quantized = bnb_config("nf4", nested=True)
    model = Gemma4ForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=quantized, device_map={"": "cpu"}
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
    return found + labeled(model)


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

        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
        where = f" [{Path(last[-1].filename).name}:{last[-1].lineno}]" if last else ""
        return f"{type(error).__name__}: {str(error)[:150]}{where}"


# -- one name after another --------------------------------------------------------------------


def files_of(work):
    """The files of the package that run during some work."""
    found = set()

    def called(frame, event, argument):
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            found.add(name[len(PACKAGE) :].replace(os.sep, "/"))

    sys.settrace(called)  # unlike a profiler, not called for C functions and returns
    try:
        result = outcome(work)
    finally:
        sys.settrace(None)
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


def is_noticed(name):
    try:
        slots.look_up(name)
    except AttributeError:
        return True
    return False


def states():
    return {each.name: each.state.value for each in gemma4_compat.status()}


def main(works, known=()):
    """What happens with each name hidden, in some of the works.

    Returns {name: {"patches": their states, "errors": by work, ...}}.  If there are ``known``
    names, only these run the works; for others that are listed, it returns whether that is noticed.
    """
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers

    from gemma4_compat.runtime.loss import head

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    head.BYTES = 4 * 512 * 24
    gemma4_compat.status(import_targets=True)
    gc.freeze()  # else each installation looks at all objects, which takes a second
    messages, before = listen(), states()
    works = {work.__name__: work for work in WORK if work.__name__ in works}
    files, expected = {}, {}
    for name, work in works.items():
        files[name], expected[name] = files_of(work)
    with gemma4_compat.disabled():
        without = {name: outcome(work) for name, work in works.items()}
    results = {}
    for name, (readers, patches, is_listed) in sorted(read_names().items()):
        if (found := resolve(name)) is None or isinstance(
            getattr(*found, None), types.ModuleType
        ):  # the names in a module are in the table, too
            continue
        if known and name not in known:
            if is_listed:
                with hidden(name):
                    results[name] = is_noticed(name)
            continue
        patches = [patch for patch in patches if before[patch] == "applied"]
        wanted = [w for w in works if files[w] & readers]
        if not wanted and not patches:
            continue
        messages.clear()
        gemma4_compat._engine._warned.clear()
        if patches:
            gemma4_compat.uninstall(*patches)
        clear_caches()
        try:
            with hidden(name):
                if patches:
                    gemma4_compat.install(*patches)
                now = states()
                found = {w: outcome(works[w]) for w in wanted}
        finally:
            clear_caches()
            after = states()
            if changed := [each for each in before if after[each] != before[each]]:
                gemma4_compat.install(*changed)
        changed = {n: s for n, s in now.items() if s != before[n]}
        errors = {
            w: str(value)[:300]
            for w, value in found.items()
            if not any(is_like(value, each) for each in (expected[w], without[w]))
            and not (isinstance(value, str) and isinstance(without[w], str) and changed)
        }
        results[name] = {
            "listed": is_listed, "patches": {p: now[p] for p in patches}, "errors": errors,
            "works": wanted, "others": {n: s for n, s in changed.items() if n not in patches},
            "warned": [text for text in messages if "is not applied" in text],
        }  # fmt: skip
    return results


def read_names():
    """{name: (the files that read it, the patches, whether a list guards it)}."""
    guards = ("listed", "probe", "factory", "asked", "caught", "open")
    found = {}
    for read in private_names.reads():
        if read.guard in guards:
            name = private_names.full(read.name)
            found.setdefault(name, (set(), [], []))[0].add(read.file)
            found[name][2].append(read.guard)
    for patch, names in private_names.by_patch(*guards).items():
        for name in names:
            found[name][1].append(patch)
    return {n: (f, p, set(g) <= {"listed", "probe", "factory"}) for n, (f, p, g) in found.items()}


if __name__ == "__main__":
    print(json.dumps(main(*json.loads(sys.argv[1]))))
