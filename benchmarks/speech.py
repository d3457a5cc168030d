"""Memory and time of fine-tuning on speech: the recipe of docs/recipes.md, with random weights.

``python -m benchmarks.speech CACHE [--tiny] [--seconds 10] [--rows 4] [--steps 10]``.  CACHE gets
the checkpoint of ``python -m benchmarks.checkpoint CACHE e2b``.  SECONDS of sound are in each row.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from . import checkpoint, measure
from .cases import CASES, load

TARGETS = rf"{checkpoint.TARGETS}|.*embed_audio\.embedding_projection"
#: the tokens of an answer
ANSWER = 40


def batch(model: Any, rows: int, seconds: float) -> dict[str, Any]:
    """Noise of so many seconds in each row, between 16 tokens and an answer."""
    import numpy as np
    import torch
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    config = model.config
    bins = 32 if config.audio_config.hidden_size == checkpoint.TINY_AUDIO["hidden_size"] else 128
    noise = np.random.default_rng(0).standard_normal((rows, round(16000 * seconds)))
    extractor = Gemma4AudioFeatureExtractor(feature_size=bins)
    found = extractor([*noise.astype("float32")], return_tensors="pt")
    soft = math.ceil(math.ceil(found["input_features"].shape[1] / 2) / 2)
    ids = measure.Text(config.text_config.vocab_size).tokens(rows, 16 + soft + ANSWER).cpu()
    ids[:, 8 : 8 + soft] = config.audio_token_id
    labels = ids.clone()
    labels[:, :-ANSWER] = -100
    types = 3 * (ids == config.audio_token_id).long()
    more = {"input_ids": ids, "labels": labels, "mm_token_type_ids": types}
    return {**found, **more, "attention_mask": torch.ones_like(ids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, for a machine without GPU"
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    import gemma4_compat

    shape = "tiny" if options.tiny else "e2b"
    folder = options.cache / shape
    checkpoint.build(shape, folder)
    base = load(CASES["ple"], shape, folder)
    model = get_peft_model(base, LoraConfig(r=16, target_modules=TARGETS, task_type="CAUSAL_LM"))
    inputs = batch(model, options.rows, options.seconds)
    result = {**checkpoint.machine(shape), "resident GiB": measure.resident()}
    arguments = TrainingArguments(
        output_dir=str(folder / "trained"), per_device_train_batch_size=options.rows, bf16=True,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        max_steps=2, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, label_names=["labels"], use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    rows = [*range(options.rows * options.steps)]
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[: options.rows],
        data_collator=lambda _: {name: each.clone() for name, each in inputs.items()},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_metrics=lambda found: {"tokens": found.predictions.size},
    )  # fmt: skip
    trainer.train()  # warms up
    arguments.max_steps = options.steps
    measure.reset_peak()
    result["seconds a step"] = measure.seconds(trainer.train) / options.steps
    result |= {"step peak GiB": measure.peak(), "tokens a row": inputs["input_ids"].shape[1]}
    measure.reset_peak()
    result["evaluation"] = trainer.evaluate()
    result["evaluation peak GiB"] = measure.peak()
    answer = {"max_new_tokens": 32, "min_new_tokens": 32}
    prompt = {n: each.to(gemma4_compat.input_device(model)) for n, each in inputs.items()}
    prompt |= {n: each[:, :-ANSWER] for n, each in prompt.items() if "features" not in n}
    del prompt["labels"]
    model.eval()
    result["seconds of 32 tokens"] = measure.seconds(lambda: model.generate(**prompt, **answer))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
