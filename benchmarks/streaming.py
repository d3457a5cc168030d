"""Measure decoding with decoder layers on the CPU: which share of the link to the GPU it uses.

``python -m benchmarks.streaming SHAPE CACHE [--kind nf4|bf16|int8] [--layers N] [--adapter]`` loads
a model on the GPU, offloads its last N decoder layers, and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import CASES, load
from .checkpoint import layers, offloaded_layers
from .decoding import call, prompt, timed
from .measure import GIB, peak, pinned_bandwidth, reset_peak, resident, seconds


def prefill(model: Any, length: int = 2048) -> float:
    """Seconds of a forward over a prompt [1, length], the median of five."""
    import torch

    ids = prompt(length, end=250_000)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids, logits_to_keep=1, use_cache=True)

    forward()
    return statistics.median(seconds(forward) for _ in range(5))


def block_bytes(model: Any) -> list[int]:
    """Bytes of each streamed layer; they are the same on the host and on the GPU."""
    from gemma4_compat.runtime.host.blocks import streamed_layers

    return [layer.host.nbytes for layer in streamed_layers(model.modules())]


def logits(model: Any, way: str) -> Any:
    import torch

    options = {"return_dict_in_generate": True, "output_logits": True}
    return torch.stack(call(model, prompt(64, 3), 32, way, **options).logits)


def offload(model: Any, shape: str, count: int) -> Any:
    from accelerate import dispatch_model

    names = range(layers(shape) - count, layers(shape))
    return dispatch_model(
        model,
        {"": 0, **{f"model.language_model.layers.{i}": "cpu" for i in names}},
        main_device=0,
        skip_keys=model._skip_keys_device_placement,
    )


def against_accelerate(model: Any, another: Callable[[], Any]) -> dict[str, float]:
    """The speeds of eager and captured decoding ÷ eager without the patches, alternating.

    ``another`` loads and splits the same model.  Without the patches, its weights are not
    page-locked.
    """
    import gemma4_compat

    with gemma4_compat.disabled():
        plain = another()
    times: dict[str, list[float]] = {"eager": [], "captured": [], "unpatched": []}
    for turn in range(3):
        steps = {"eager": timed(model, 64, "dynamic"), "captured": timed(model, 64, "captured")}
        with gemma4_compat.disabled():
            steps["unpatched"] = timed(plain, 64, "dynamic")
        if turn:
            for way, some in steps.items():
                times[way] += some
    eager, captured, unpatched = map(statistics.median, times.values())
    return {"eager ÷ unpatched": unpatched / eager, "captured ÷ unpatched": unpatched / captured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--kind", choices=("nf4", "bf16", "int8"), default="nf4")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    import torch
    from transformers import BitsAndBytesConfig

    import gemma4_compat  # noqa: F401

    folder = args.cache / args.shape
    count = args.layers or len(offloaded_layers(args.shape))
    figures: dict[str, Any] = {"kind": args.kind, "layers": count, "adapter": args.adapter}
    figures["pinned GB/s"] = bandwidth = pinned_bandwidth()
    int8 = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    quantization = int8 if args.kind == "int8" else None

    def loaded() -> Any:
        return load(CASES["gpu"], args.shape, folder, quantization, four_bit=args.kind != "bf16")

    model = loaded()
    if args.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder / "adapter")
    base = model.get_base_model() if args.adapter else model
    expected = logits(model, "eager static")
    whole = prefill(model)
    offload(base, args.shape, count)
    offloaded = logits(model, "captured")
    sizes = block_bytes(base)
    figures["bytes a token"] = sum(sizes)
    figures["largest layer, MiB"] = max(sizes) / 2**20
    figures["steps with equal logits"] = int((offloaded == expected).flatten(1).all(1).sum())
    call(model, 64, 12, "captured")
    figures["resident GiB"] = kept = resident()
    reset_peak()
    steps = [each for _ in range(4) for each in timed(model, 64, "captured")]
    figures["tok/s"] = 1 / statistics.median(steps)
    figures["share of the link"] = sum(sizes) / 1e9 * figures["tok/s"] / bandwidth
    figures["VRAM above the resident part, MiB"] = 1024 * (peak() - kept)
    figures["reserved above the resident part, MiB"] = (
        torch.cuda.memory_reserved() / GIB - kept
    ) * 1024
    steps = [each for _ in range(2) for each in timed(model, 64, "dynamic")]
    figures["eager tok/s"] = 1 / statistics.median(steps)
    if args.kind == "int8":
        try:
            figures |= against_accelerate(model, lambda: offload(loaded(), args.shape, count))
        except TypeError as error:  # older versions cannot load it
            figures["unpatched"] = str(error)
    figures["prefill of 2048 ÷ all on the GPU"] = whole / prefill(model)
    line = json.dumps(figures)
    print(line)
    if args.out:
        args.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
