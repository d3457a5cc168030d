"""Measure decoding with a drafter: a round of drafts and their check, against captured steps.

``python -m benchmarks.drafting CASE SHAPE CACHE [--adapter]`` loads a case of ``cases.py`` and
prints a JSON line.  The drafter has the shape of google/gemma-4-E2B-it-assistant and random
weights, so nearly all its drafts are rejected.  What a round costs does not depend on that; the
line gives the speed for each number of accepted drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from .cases import CASES, load
from .decoding import call, timed
from .measure import token_seconds

DRAFTS = 3
CONTEXT = 64
TOKENS = 48
ROUNDS = 3


def drafter_of(model: Any) -> Any:
    """A drafter of about 78 million parameters, in bfloat16 on the GPU."""
    import torch
    from transformers import (
        Gemma4AssistantConfig,
        Gemma4AssistantForCausalLM,
        Gemma4TextConfig,
    )

    text = model.config.get_text_config()
    own = Gemma4TextConfig(
        vocab_size=text.vocab_size,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_kv_shared_layers=4,
        layer_types=[*3 * ["sliding_attention"], "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=text.sliding_window,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    config = Gemma4AssistantConfig(
        text_config=own, backbone_hidden_size=text.hidden_size, use_ordered_embeddings=True
    )
    drafter = Gemma4AssistantForCausalLM(config).eval().to("cuda", torch.bfloat16)
    drafter.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    drafter.generation_config.num_assistant_tokens = DRAFTS
    return drafter


def rounds_of(model: Any, drafter: Any, way: str) -> list[float]:
    """The seconds of each round, without the first ones, of which some are captured."""

    def generate(count: int, **options: Any) -> Any:
        return call(model, CONTEXT, count, way, assistant_model=drafter, **options)

    return token_seconds(generate, TOKENS)[4:-3]  # accepted drafts leave fewer rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("shape")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--adapter", action="store_true")
    args = parser.parse_args()

    import torch

    import gemma4_compat  # noqa: F401

    folder = args.cache / args.shape
    model: Any = load(CASES[args.case], args.shape, folder)
    drafter = drafter_of(model)
    if args.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder / "adapter")
    found: dict[str, list[float]] = {"drafts": [], "eager drafts": [], "steps": []}
    for turn in range(ROUNDS + 1):
        times = {
            "drafts": rounds_of(model, drafter, "captured"),
            "eager drafts": rounds_of(model, drafter, "dynamic"),
            "steps": timed(model, CONTEXT, "captured"),
        }
        for name in found if turn else ():  # the first turn warms up
            found[name] += times[name]
    milliseconds = {name: 1e3 * statistics.median(times) for name, times in found.items()}
    speeds = [1e3 * (n + 1) / milliseconds["drafts"] for n in range(DRAFTS + 1)]
    step = milliseconds["steps"]
    figures = {
        "case": args.case,
        "adapter": args.adapter,
        "drafter, million parameters": sum(p.numel() for p in drafter.parameters()) / 1e6,
        "ms": milliseconds,
        "tok/s by accepted drafts": speeds,
        "captured tok/s": 1e3 / step,
        "gain by accepted drafts": [speed * step / 1e3 for speed in speeds],
        "rounds": len(found["drafts"]),
        "torch": torch.__version__,
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
