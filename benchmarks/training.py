"""Memory and time of a training step, with and without pieces of the logits.

``python -m benchmarks.training CACHE SHAPE [--rounds N] [--out FILE]``.  CACHE/SHAPE has the
checkpoint of ``python -m benchmarks.checkpoint CACHE SHAPE``, or gets it.  The model is in NF4, and
has the per-layer embeddings on the CPU, LoRA on the decoder, AdamW and gradient checkpointing.

Each row runs with pieces and with whole logits, in turn, in one process.  A line a row: the peak
GiB of each side, the median milliseconds of a step, and the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gemma4_compat.objects import shadowed

from . import checkpoint, measure

ROWS = {
    "loop, 2048 x 1": ("loop", 1),
    "loop, 2048 x 4": ("loop", 4),
    "Trainer(bf16=True), 2048 x 1": ("Trainer", 1),
    "SFTTrainer, 2048 x 1": ("SFTTrainer", 1),
    "evaluation, 2048 x 1": ("evaluation", 1),
}
#: the tokens of a row, on the tiny shape fewer
LENGTH, TINY = 2048, 64


def _adapted(folder: Path, shape: str) -> Any:
    from peft import PeftModel

    from .cases import CASES, load

    model = load(CASES["ple"], shape, folder)
    model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def _inputs(model: Any, rows: int, length: int) -> dict[str, Any]:
    import torch

    text = model.config.get_text_config()
    ids = measure.Text(text.vocab_size).tokens(rows, length)
    zeros = torch.zeros_like(ids)
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids, "mm_token_type_ids": zeros}


def _loop(model: Any, rows: int, length: int) -> Callable[[], Any]:
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    inputs = _inputs(model, rows, length)

    def step() -> None:
        model(**inputs, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _evaluation(model: Any, rows: int, length: int) -> Callable[[], Any]:
    import torch

    inputs = _inputs(model, rows, length)

    def evaluate() -> None:
        with torch.no_grad():
            model(**inputs, use_cache=False).logits.argmax(-1)

    return evaluate


def _trainer(model: Any, rows: int, length: int, *, trl: bool) -> Callable[[], Any]:
    """A step of the trainer, as its loop calls it."""
    import torch

    kind, arguments = _classes(trl)
    inputs = {name: each.cpu() for name, each in _inputs(model, rows, length).items()}
    data = [{name: each[0].tolist() for name, each in inputs.items()}]
    trainer = kind(
        model=model,
        args=arguments(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=rows, bf16=True,
            report_to=[], save_strategy="no", max_steps=1, use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True, remove_unused_columns=False, logging_strategy="no",
        ),
        data_collator=lambda batch: {n: t.clone() for n, t in inputs.items()},
        train_dataset=_dataset(data) if trl else data,
        **({"processing_class": _tokenizer()} if trl else {}),
    )  # fmt: skip
    trainer.train()
    wrapped, optimizer = trainer.model_wrapped, trainer.optimizer

    def step() -> None:
        trainer.training_step(wrapped, {n: t.clone() for n, t in inputs.items()})
        optimizer.step()
        optimizer.zero_grad()

    return step


def _classes(trl: bool) -> tuple[Any, Any]:
    if trl:
        from trl import SFTConfig, SFTTrainer

        def config(**options: Any) -> Any:
            return SFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, **options)

        return SFTTrainer, config
    from transformers import Trainer, TrainingArguments

    return Trainer, TrainingArguments


def _dataset(rows: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


MAKE: dict[str, Callable[[Any, int, int], Callable[[], Any]]] = {
    "loop": _loop,
    "evaluation": _evaluation,
    "Trainer": lambda *arguments: _trainer(*arguments, trl=False),
    "SFTTrainer": lambda *arguments: _trainer(*arguments, trl=True),
}


def compare(step: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Peak GiB and median milliseconds with pieces and without, and the median of the ratios."""
    from gemma4_compat.runtime.loss import head

    def whole() -> Any:
        """The forwards of hooks outlive a patch, so it stays: all logits are one piece."""
        return shadowed(head, BYTES=2**60)

    own: list[float] = []
    other: list[float] = []
    peaks: list[Any] = []
    for context in (nullcontext, whole):
        with context():
            step()
            measure.reset_peak()
            step()
            peaks.append(measure.peak())
    for _ in range(rounds):
        own.append(1000 * measure.seconds(step))
        with whole():
            other.append(1000 * measure.seconds(step))
    return {
        "peak GiB": peaks,
        "ms": [round(statistics.median(times), 1) for times in (own, other)],
        "ratio": round(statistics.median(a / b for a, b in zip(own, other, strict=True)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("shape")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import gemma4_compat  # noqa: F401

    checkpoint.build(options.shape, options.cache / options.shape)
    model = _adapted(options.cache / options.shape, options.shape)
    length = TINY if options.shape == "tiny" else LENGTH
    result: dict[str, Any] = {**checkpoint.machine(options.shape), "resident": measure.resident()}
    for row in options.only:
        way, rows = ROWS[row]
        try:
            result[row] = compare(MAKE[way](model, rows, length), options.rounds)
        except Exception as error:  # the next row may fit
            result[row] = f"{type(error).__name__}: {error}"[:300]
        print(row, json.dumps(result[row]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
