"""Memory and time of fine-tuning on speech: the recipe of docs/recipes.md, with random weights.

``python -m benchmarks.speech CACHE [--tiny] [--seconds 10] [--rows 4]``.  CACHE gets the checkpoint
of ``python -m benchmarks.checkpoint CACHE e2b``.  Each row has SECONDS of sound.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gemma4_compat

from . import checkpoint, measure
from .cases import CASES, load

TARGETS = rf"{checkpoint.TARGETS}|.*embed_audio\.embedding_projection"
STEPS, ANSWER = 10, 40


def batch(config: Any, rows: int, seconds: float) -> dict[str, Any]:
    """Noise of so many seconds in each row, and an answer of ``ANSWER`` tokens."""
    import numpy as np
    import torch
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    noise = np.random.default_rng(0).standard_normal((rows, round(16000 * seconds)))
    extractor = Gemma4AudioFeatureExtractor(config.audio_config.subsampling_conv_channels[0])
    found = extractor([*noise.astype("float32")], return_tensors="pt")
    soft = int(found["input_features_mask"][0, ::2][::2].sum())
    ids = measure.Text(config.text_config.vocab_size).tokens(rows, 16 + soft + ANSWER).cpu()
    ids[:, 8 : 8 + soft] = config.audio_token_id
    types = 3 * (ids == config.audio_token_id).long()
    labels = torch.cat([torch.full_like(ids[:, :-ANSWER], -100), ids[:, -ANSWER:]], dim=1)
    more = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
    return {**found, **more, "input_ids": ids, "labels": labels}


def main() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, which a CPU can train")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=4)
    options = parser.parse_args()
    shape = "tiny" if options.tiny else "e2b"
    checkpoint.build(shape, options.cache / shape)
    base = load(CASES["ple"], shape, options.cache / shape)
    model = get_peft_model(base, LoraConfig(r=16, target_modules=TARGETS, task_type="CAUSAL_LM"))
    inputs = batch(model.config, options.rows, options.seconds)
    result = {**checkpoint.machine(shape), "resident GiB": measure.resident()}
    arguments = TrainingArguments(
        output_dir=str(options.cache / "trained"), per_device_train_batch_size=options.rows,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=True, use_cpu=not torch.cuda.is_available(), max_steps=2, remove_unused_columns=False,
        label_names=["labels"], report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [*range(options.rows)]
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows,
        data_collator=lambda _: {name: each.clone() for name, each in inputs.items()},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_metrics=lambda found: {"tokens": found.predictions.size},
    )  # fmt: skip
    trainer.train()  # warms up
    arguments.max_steps = STEPS
    measure.reset_peak()
    result["seconds a step"] = trainer.train().metrics["train_runtime"] / STEPS
    result |= {"peak GiB of a step": measure.peak(), "tokens a row": inputs["input_ids"].shape[1]}
    measure.reset_peak()
    result |= {**trainer.evaluate(), "peak GiB of evaluation": measure.peak()}
    device = gemma4_compat.input_device(model)
    prompt = {n: t.to(device) for n, t in inputs.items() if n != "labels"}
    prompt |= {n: t[:, :-ANSWER] for n, t in prompt.items() if "features" not in n}
    prompt |= {"max_new_tokens": 32, "min_new_tokens": 32}
    result["seconds of 32 tokens"] = measure.seconds(lambda: model.eval().generate(**prompt))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
