"""Measure decoding with a drafter: a round of drafts and their check, against captured steps.

``python -m benchmarks.drafting CASE SHAPE CACHE`` loads a case of ``cases.py`` and prints a JSON
line.  The drafter has the shape of google/gemma-4-E2B-it-assistant and random weights, so nearly
all its drafts are rejected.  What a round costs does not depend on that; the line gives the speed
for each number of accepted drafts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from .cases import CASES, load
from .decoding import call, timed
from .measure import synchronize

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


def rounds_of(model: Any, drafter: Any) -> tuple[list[float], list[float]]:
    """The seconds of each round, and those of the model's forward in it, without the first two."""
    begins: list[float] = []
    ends: list[float] = []

    def note(times: list[float]) -> None:
        synchronize()
        times.append(time.perf_counter())

    hooks = [
        model.register_forward_pre_hook(lambda *_: note(begins)),
        model.register_forward_hook(lambda *_: note(ends)),
    ]
    try:
        call(model, CONTEXT, TOKENS, "dynamic", assistant_model=drafter)
    finally:
        for hook in hooks:
            hook.remove()
    whole = [after - before for before, after in itertools.pairwise(ends)]
    return whole[2:], [end - begin for begin, end in zip(begins, ends, strict=True)][3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("shape")
    parser.add_argument("cache", type=Path)
    args = parser.parse_args()

    import torch

    import gemma4_compat  # noqa: F401

    model: Any = load(CASES[args.case], args.shape, args.cache / args.shape, None)
    drafter = drafter_of(model)
    whole, forward, captured, eager = [], [], [], []
    for turn in range(ROUNDS + 1):
        times = rounds_of(model, drafter)
        steps = timed(model, CONTEXT, "captured"), timed(model, CONTEXT, "dynamic")
        if turn:  # the first turn warms up
            whole += times[0]
            forward += times[1]
            captured += steps[0]
            eager += steps[1]
    a_round, a_step = statistics.median(whole), statistics.median(captured)
    figures = {
        "case": args.case,
        "drafter, million parameters": sum(p.numel() for p in drafter.parameters()) / 1e6,
        "a round, ms": 1e3 * a_round,
        f"of it, the forward of {DRAFTS + 1} tokens, ms": 1e3 * statistics.median(forward),
        "a captured step, ms": 1e3 * a_step,
        "an eager step, ms": 1e3 * statistics.median(eager),
        "tok/s by accepted drafts": [(n + 1) / a_round for n in range(DRAFTS + 1)],
        "captured tok/s": 1 / a_step,
        "rounds": len(whole) // ROUNDS,
        "torch": torch.__version__,
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
