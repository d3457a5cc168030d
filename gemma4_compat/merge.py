"""Merge an adapter into an unquantised checkpoint, and write it only if it is the same model.

``merge_adapter`` is also the command ``gemma4-compat merge BASE ADAPTER OUT``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError, MergeError

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("bfloat16", "float16", "float32")
PROMPTS = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "def fibonacci(n):\n    ",
)
_NEW_TOKENS = 8
_RANDOM_TOKENS = 16
_LIMIT = 0.5  # further apart is another model, however it reacts to rounding
_MARGIN = 2  # merging may differ by so many times what one more rounding changes
# What goes along with the weights, from BASE and then from ADAPTER.
_COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*processor_config.json", "additional_chat_templates",
)  # fmt: skip


@dataclass(frozen=True)
class Parity:
    """One prompt's comparison of the merged model with the one that has the adapter loaded.

    ``effect`` is what the adapter changes, ``difference`` what merging changes: the 2-norm of the
    change of one position's logits over that of the logits, at the worst position.  ``tolerance``
    is twice what one more rounding of the adapted layers' outputs changes, as measured, and 0.5
    at most.
    ``other_tokens`` counts positions where the merged model's most likely token is another one;
    ``undecided`` those among them where the adapter's own two most likely tokens are closer than
    the tolerance.
    """

    prompt: str
    positions: int
    effect: float
    difference: float
    tolerance: float
    other_tokens: int
    undecided: int

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance and self.other_tokens == self.undecided


@dataclass(frozen=True)
class MergeResult:
    """What was merged, and how well."""

    base: str
    adapter: str
    out: Path
    dtype: str
    parity: tuple[Parity, ...]
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.parity)

    def __str__(self) -> str:
        head = ("prompt", "adapter changes", "merging changes", "tolerance", "other tokens", "")
        rows = [head, *(_cells(row) for row in self.parity)]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            first, *rest = (f"{c:<{w}}" for c, w in zip(row, widths, strict=True))
            lines.append("  ".join([first, *rest]).rstrip())
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _cells(row: Parity) -> tuple[str, ...]:
    undecided = f" ({row.undecided} undecided)" if row.undecided else ""
    return (
        row.prompt if len(row.prompt) <= 36 else f"{row.prompt[:33]}...",
        f"{row.effect:.2g}",
        f"{row.difference:.2g}",
        f"{row.tolerance:.2g}",
        f"{row.other_tokens} of {row.positions}{undecided}",
        "agrees" if row.agrees else "DISAGREES",
    )


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    prompts: Sequence[str] = (),
    device: str = "cpu",
    force: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> MergeResult:
    """Merge a PEFT adapter into its base model and write the result as a checkpoint.

    The base is loaded once, unquantised, and merged in place.  The logits of several prompts (a
    synthetic image and sound too, where the model takes them) are compared with those of the
    model with the adapter loaded; what is written is loaded again, and must give the merged
    model's logits bit for bit.  Only then does ``out`` appear, complete.

    Args:
        base: folder or Hub id of the checkpoint that the adapter is for; not quantised.
        adapter: folder or Hub id of the adapter.
        out: folder to write.  Tokenizer and processor files come along from ``base``, and those
            that ``adapter`` has in place of them.
        dtype: "bfloat16", "float16" or "float32": of computing, and of what is written.
        prompts: texts to compare, in place of a few of ours.
        device: where to compute, such as "cpu" or "cuda:0"; the whole model must fit.
        force: replace an existing ``out``.
        progress: called with a line before each step.

    Raises:
        InputError: an argument cannot work; nothing large was loaded.
        MergeError: the merged model differs, or the adapter does not fit; nothing was written.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    out = Path(out).absolute()
    _check_out(out, force)
    folders = _locate(base, "config.json"), _locate(adapter, "adapter_config.json")
    for folder in folders:
        if out.resolve() in (folder.resolve(), *folder.resolve().parents):
            raise InputError(f"{out}: would replace {folder}, which is to be read")
    _check_base(folders[0])
    _check_adapter(folders[1])
    tokenizers = [folder for folder in reversed(folders) if _has_tokenizer(folder)]
    if prompts and not tokenizers:
        raise InputError(f"{folders[0]}: no tokenizer, which prompts need")

    with _quiet():
        (parity, notes), write = _merge(folders, tokenizers, prompts, dtype, device, progress)
        result = MergeResult(str(base), str(adapter), out, dtype, parity, notes)
        if not result.agrees:
            raise MergeError("the merged model does not agree with the adapter", result)
        with _appearing(out) as partial:
            progress(f"writing {out}")
            write(partial)
            _copy_companions(*folders, partial)
    return result


# -- arguments ----------------------------------------------------------------------------------


def _check_out(out: Path, force: bool) -> None:
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: no such folder")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise InputError(f"{out}: exists and is not a folder")
    if out.exists() and not force:
        raise InputError(f"{out}: exists already (--force replaces it)")


def _locate(name: str | os.PathLike[str], needed: str) -> Path:
    """The local folder, downloaded or in the Hub's cache where ``name`` is a Hub id."""
    folder = Path(name)
    if not folder.is_dir():
        folder = _from_hub(os.fspath(name))
    if not (folder / needed).is_file():
        raise InputError(f"{folder}: no {needed}")
    return folder


def _from_hub(name: str) -> Path:
    if Path(name).exists():
        raise InputError(f"{name}: not a folder")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise InputError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download

    files = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "adapter_model.bin"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{name}: no such folder, and not to be had from the Hub: {why[0]}"
        ) from error


def _check_base(folder: Path) -> None:
    """Refuse weights that are quantised, whatever the config says."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, entry in header.items():
            quantised = name.endswith((".SCB", ".absmax")) or ".quant_state." in name
            floats = ("F64", "F32", "F16", "BF16", "BOOL", "I64")
            if name != "__metadata__" and (quantised or entry["dtype"] not in floats):
                raise InputError(
                    f"{file}: a quantised checkpoint ({name} is {entry['dtype']}); merging into "
                    f"it would not keep the adapter's outputs. Name the unquantised checkpoint "
                    f"that it was made from"
                )


def _check_adapter(folder: Path) -> None:
    if not any((folder / f"adapter_model.{end}").is_file() for end in ("safetensors", "bin")):
        raise InputError(f"{folder}: no adapter_model.safetensors")
    kind = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("peft_type")
    if kind in ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CPT"):
        raise InputError(f"{folder}: {kind} has no weights that could be merged")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / f"tokenizer.{end}").is_file() for end in ("json", "model"))


# -- merging ------------------------------------------------------------------------------------


def _merge(
    folders: tuple[Path, Path],
    tokenizers: Sequence[Path],
    prompts: Sequence[str],
    dtype: str,
    device: str,
    progress: Callable[[str], None],
) -> tuple[tuple[tuple[Parity, ...], tuple[str, ...]], Callable[[Path], None]]:
    """The parity and notes, and a function that writes the merged model to a folder."""
    import torch
    from peft import PeftModel

    base, adapter = folders
    progress(f"loading {base} in {dtype}")
    model = _load(base, dtype, device)
    inputs, notes = _inputs(model, tokenizers, prompts)
    progress(f"loading {adapter}")
    try:
        model = PeftModel.from_pretrained(model, adapter, torch_device=device).eval()
        loaded = model.load_adapter(adapter, "default", torch_device=device)  # says what fitted
    except (ValueError, RuntimeError, KeyError) as error:
        raise MergeError(f"{adapter} does not fit {base}: {error}") from error
    if loaded.unexpected_keys:
        raise MergeError(
            f"{adapter} does not fit {base}, which has no place for {len(loaded.unexpected_keys)} "
            f"of its tensors, such as {loaded.unexpected_keys[0]}"
        )

    rows, rounding = {}, 0.0
    for number, (name, prompt) in enumerate(inputs.items(), start=1):
        progress(f"outputs with the adapter {number}/{len(inputs)}: {name[:40]!r}")
        inputs[name] = prompt = _continued(model, prompt)
        expected = _logits(model, prompt)
        if not expected.isfinite().all():
            raise MergeError(f"with the adapter loaded, the logits for {name!r} are not finite")
        with model.disable_adapter():
            effect = _worst(_logits(model, prompt), expected)
        with _rounded_once_more(model, dtype):
            rounding = max(rounding, _worst(_logits(model, prompt), expected))
        rows[name] = expected, effect
    progress("merging")
    tolerance = min(_MARGIN * rounding, _LIMIT)
    model = model.merge_and_unload()
    _untie(model)

    parity, merged = [], {}
    for number, (name, prompt) in enumerate(inputs.items(), start=1):
        progress(f"outputs merged {number}/{len(inputs)}: {name[:40]!r}")
        merged[name] = _logits(model, prompt)
        expected, effect = rows.pop(name)
        parity.append(_compare(name, merged[name], expected, effect, tolerance))
    if not any(row.effect for row in parity):
        notes.append("the adapter changes nothing: the outputs are those of the base model")
    elif max(row.effect for row in parity) <= tolerance:
        notes.append("the adapter changes these outputs by less than rounding may")

    def write(partial: Path) -> None:
        nonlocal model
        shard = max(_bytes(model) // 8, 2**26)  # a shard is copied while it is written
        model.save_pretrained(partial, max_shard_size=shard)
        if (base / "generation_config.json").is_file():
            shutil.copyfile(base / "generation_config.json", partial / "generation_config.json")
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        progress("reading it back")
        written = _load(partial, dtype, device)
        for name, prompt in inputs.items():
            if not torch.equal(_logits(written, prompt), merged[name]):
                raise MergeError("the written checkpoint does not give the merged model's logits")

    return (tuple(parity), tuple(notes)), write


def _load(folder: Path, dtype: str, device: str) -> Any:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):  # the weights are not quantised: we have looked
        del config.quantization_config
    name = (config.architectures or ["AutoModelForImageTextToText"])[0]
    architecture = getattr(transformers, name, transformers.AutoModelForImageTextToText)
    # For the CPU no map: PEFT takes one as a sign that something is offloaded.
    placed = {} if device == "cpu" else {"device_map": {"": device}}
    model = architecture.from_pretrained(
        folder, config=config, dtype=getattr(torch, dtype), **placed
    )
    return model.eval()


def _untie(model: Any) -> None:
    """Have the config say so where an adapter has untied the embeddings."""
    output = model.get_output_embeddings()
    if output is not None and output.weight is not model.get_input_embeddings().weight:
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            config.tie_word_embeddings = False


def _bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


# -- comparing ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _rounded_once_more(model: Any, dtype: str) -> Iterator[None]:
    """Have the outputs of all layers with an adapter changed as one more rounding changes them.

    Merging rounds each merged weight once more, and saves the rounding of the adapter's outputs.
    How far that carries the logits depends on the model; so it is measured, with random changes
    of up to half the dtype's epsilon.  Sums of float32 products are in float32 themselves, and
    their order counts too; those of the shorter dtypes are rounded only once.
    """
    import torch

    size = torch.finfo(getattr(torch, dtype)).eps * (8 if dtype == "float32" else 1)
    generator = torch.Generator(model.device).manual_seed(0)

    def change(module: Any, args: Any, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator, device=output.device) - 0.5
        return (output.float() * (1 + size * noise)).to(output.dtype)

    layers = [m for m in model.modules() if hasattr(m, "get_base_layer")]
    hooks = [layer.register_forward_hook(change) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _compare(name: str, found: Tensor, expected: Tensor, effect: float, tolerance: float) -> Parity:
    """Compare logits [positions, vocabulary]."""
    difference = _worst(found, expected)
    other = found.argmax(-1) != expected.argmax(-1)
    first, second = expected.topk(2).values.T
    # Either of the two may be off by the tolerance times the usual size of a logit.
    undecided = first - second <= 2 * tolerance * expected.square().mean(-1).sqrt()
    return Parity(
        name,
        len(expected),
        effect,
        difference,
        tolerance,
        int(other.sum()),
        int((other & undecided).sum()),
    )


def _worst(found: Tensor, expected: Tensor) -> float:
    """The relative difference at the worst position; infinite where a value is not finite."""
    if not found.isfinite().all():
        return math.inf
    relative: Tensor = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(relative.max())


def _logits(model: Any, prompt: dict[str, Tensor]) -> Tensor:
    """float32 [positions, vocabulary], on the CPU."""
    import torch

    with torch.inference_mode():
        logits: Tensor = model(**prompt).logits[0]
    return logits.float().cpu()


def _continued(model: Any, prompt: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prompt with the model's greedy answer: where answers depart, logits are compared."""
    import torch

    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=_NEW_TOKENS, do_sample=False)
    new = tokens[:, prompt["input_ids"].shape[1] :]
    added = {"input_ids": new, "attention_mask": torch.ones_like(new)}
    added["mm_token_type_ids"] = torch.zeros_like(new)
    return {k: torch.cat([v, added[k]], dim=1) if k in added else v for k, v in prompt.items()}


def _inputs(
    model: Any, tokenizers: Sequence[Path], prompts: Sequence[str]
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Prompts by name, each a batch of one, on the model's device."""
    import torch

    notes = []
    found: dict[str, dict[str, Tensor]] = {}
    if tokenizers:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizers[0])
        for text in prompts or PROMPTS:
            found[text] = {"input_ids": tokenizer(text, return_tensors="pt")["input_ids"]}
    else:
        notes.append("no tokenizer in the base: prompts are random tokens, from a fixed seed")
        for seed in range(3):
            tokens = _random_tokens(model.config, _RANDOM_TOKENS, seed)
            found[f"random tokens {seed + 1}"] = {"input_ids": tokens[None]}
    found.update(_synthetic(model, notes))
    for prompt in found.values():
        prompt.setdefault("attention_mask", torch.ones_like(prompt["input_ids"]))
        prompt.update({name: tensor.to(model.device) for name, tensor in prompt.items()})
    return found, notes


def _synthetic(model: Any, notes: list[str]) -> dict[str, dict[str, Tensor]]:
    """An image and a sound of noise, among random tokens, for the towers that the model has."""
    from .tiny import audio_inputs, image_inputs

    config = model.config
    towers = {"vision": ("image", image_inputs), "audio": ("sound", audio_inputs)}
    there = [t for t in towers if getattr(config, f"{t}_config", None) is not None]
    if there and type(model).__name__ != "Gemma4ForConditionalGeneration":
        notes.append(f"{type(model).__name__}: the {' and '.join(there)} parts are not compared")
        there = []
    found = {}
    for tower in there:
        name, build = towers[tower]
        prompt = build(config)
        ids = prompt["input_ids"]
        words = ~_is_special(config, ids)
        ids[words] = _random_tokens(config, int(words.sum()), seed=7)
        found[f"{name} (synthetic)"] = prompt
    return found


def _random_tokens(config: Any, count: int, seed: int) -> Tensor:
    """Ordinary tokens: int64 [count]."""
    import torch

    vocabulary = torch.arange(config.get_text_config().vocab_size)
    ordinary = vocabulary[~_is_special(config, vocabulary)]
    generator = torch.Generator().manual_seed(seed)
    return ordinary[torch.randint(len(ordinary), (count,), generator=generator)]


def _is_special(config: Any, tokens: Tensor) -> Tensor:
    import torch

    values = (*vars(config).items(), *vars(config.get_text_config()).items())
    special = [v for k, v in values if "_token_" in k and isinstance(v, int)]
    return torch.isin(tokens, torch.tensor(special))


# -- writing ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes ``out`` if the block succeeds, and else is removed."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    replaced = out.with_name(f".{out.name}.{os.getpid()}.replaced")
    partial.mkdir()
    try:
        yield partial
        if out.exists():
            out.rename(replaced)
        try:
            partial.rename(out)
        except BaseException:
            if replaced.exists():
                replaced.rename(out)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_companions(base: Path, adapter: Path, out: Path) -> None:
    """Tokenizer, processor and chat template: the base's, and over them the adapter's."""
    for folder in (base, adapter):
        for pattern in _COMPANIONS:
            for file in folder.glob(pattern):
                copy = shutil.copytree if file.is_dir() else shutil.copyfile
                if file.is_dir():
                    shutil.rmtree(out / file.name, ignore_errors=True)
                copy(file, out / file.name)
    # A template inside the adapter's tokenizer_config.json would lose against the base's file.
    settings, template = adapter / "tokenizer_config.json", "chat_template.jinja"
    if settings.is_file() and not (adapter / template).is_file():
        if json.loads(settings.read_text(encoding="utf-8")).get("chat_template"):
            (out / template).unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what transformers says about generation and loading off the terminal."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
