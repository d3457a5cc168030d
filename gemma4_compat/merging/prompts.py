"""The prompts to compare the models on: texts, and an image and a sound of noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from ..errors import failures_of
from ..tiny import audio_inputs, image_inputs

PROMPTS = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "def fibonacci(n):\n    ",
)


def text_tokens(tokenizer: Path) -> dict[str, Tensor]:
    """The tokens of each text: int64 [1, tokens].

    Raises:
        InputError: the tokenizer cannot be loaded.
    """
    with failures_of(f"{tokenizer}: its tokenizer does not work"):
        loaded = AutoTokenizer.from_pretrained(tokenizer)
        return {text: loaded(text, return_tensors="pt")["input_ids"] for text in PROMPTS}


def all_inputs(
    model: Any, tokens: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """The prompts by name, each a batch of one on the model's device; and notes for the user."""
    notes = []
    prompts = {text: {"input_ids": ids} for text, ids in tokens.items()}
    if not prompts:
        notes.append("no tokenizer in the base: prompts are random tokens, from a fixed seed")
        for seed in range(3):
            ids = _random_tokens(model.config, 16, seed)
            prompts[f"random tokens {seed + 1}"] = {"input_ids": ids[None]}
    prompts.update(_synthetic(model, notes))
    for prompt in prompts.values():
        prompt.setdefault("attention_mask", torch.ones_like(prompt["input_ids"]))
        prompt.update({name: tensor.to(model.device) for name, tensor in prompt.items()})
    return prompts, notes


def _synthetic(model: Any, notes: list[str]) -> dict[str, dict[str, Tensor]]:
    """An image and a sound of noise, between random tokens, for the towers that the model has."""
    config = model.config
    towers = {"vision": ("image", image_inputs), "audio": ("sound", audio_inputs)}
    present = [t for t in towers if getattr(config, f"{t}_config", None) is not None]
    if present and type(model).__name__ != "Gemma4ForConditionalGeneration":
        notes.append(f"{type(model).__name__}: the {' and '.join(present)} parts are not compared")
        present = []
    prompts = {}
    for tower in present:
        name, build = towers[tower]
        prompt = build(config)
        ids = prompt["input_ids"]
        words = ~_is_special(config, ids)
        ids[words] = _random_tokens(config, int(words.sum()), seed=7)
        prompts[f"{name} (synthetic)"] = prompt
    return prompts


def _random_tokens(config: Any, count: int, seed: int) -> Tensor:
    """Random tokens without special ones: int64 [count]."""
    vocabulary = torch.arange(config.get_text_config().vocab_size)
    ordinary = vocabulary[~_is_special(config, vocabulary)]
    generator = torch.Generator().manual_seed(seed)
    return ordinary[torch.randint(len(ordinary), (count,), generator=generator)]


def _is_special(config: Any, tokens: Tensor) -> Tensor:
    values = (*vars(config).items(), *vars(config.get_text_config()).items())
    special = [v for k, v in values if "_token_" in k and isinstance(v, int)]
    return torch.isin(tokens, torch.tensor(special))
