"""Measure experts in 4 bits against experts in bfloat16, with the true widths of 26B-A4B.

``python -m benchmarks.experts DIR [--layers N] [--out FILE]`` writes a random checkpoint to DIR,
unless it is there, loads it both ways on one GPU, and prints one JSON line after each part.  All
other layers are in 4 bits both times.  The two models alternate in one process; figures are
medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import checkpoint
from .checkpoint import _fill, machine
from .decoding import call, prompt, timed
from .measure import GIB, peak, pinned_bandwidth, reset_peak, resident, seconds

LAYERS_OF_26B = checkpoint.layers("26b")
#: The widths of 26B-A4B; the vocabulary is smaller.
TEXT: dict[str, Any] = {
    **checkpoint.TEXT["26b"],
    "vocab_size": 32768,
    "vocab_size_per_layer_input": 32768,
    "tie_word_embeddings": True,
}
_TYPES = TEXT.pop("layer_types")
TINY = {
    **TEXT, "vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size": 128,
    "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 32, "top_k_experts": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_global_key_value_heads": 1,
    "head_dim": 64, "global_head_dim": 128,
}  # fmt: skip
KEPT = ["lm_head", "router.proj"]  # the router of the real checkpoint is small, and chooses
ROUNDS = 4


def build(folder: Path, sizes: dict[str, Any], layers: int) -> None:
    """Write a random checkpoint of the text model, one file for each layer."""
    import torch
    from safetensors.torch import save_file
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    if (folder / "complete").exists():
        return
    config = Gemma4TextConfig(**sizes, num_hidden_layers=layers, layer_types=_TYPES[-layers:])
    config.architectures, config.dtype = ["Gemma4ForCausalLM"], "bfloat16"
    with torch.device("meta"):
        model = Gemma4ForCausalLM(config).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[str]] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes.pop("lm_head.weight", None)  # tied
    for name in shapes:
        layer = next((part for part in name.split(".") if part.isdigit()), "rest")
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, names in files.items():
        tensors = {name: _fill(name, shapes[name]) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    (folder / "complete").touch()


def load(folder: Path, *, four_bit: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=KEPT if four_bit else [*KEPT, "experts"],
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=quantization,
        dtype=torch.bfloat16,
        device_map={"": 0},
        experts_implementation="grouped_mm",
    )
    return model.eval()


def experts_of(model: Any) -> list[Any]:
    return [layer.experts for layer in model.model.layers]


def tensors_of(experts: Any) -> list[Any]:
    """The tensors of an experts module, with those of its quant states."""
    tensors = []
    for parameter in experts.parameters():
        tensors.append(parameter)
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors.append(state.absmax)
            tensors += [state.state2.absmax] if state.nested else []
    return tensors


def nbytes(model: Any) -> int:
    return sum(t.numel() * t.element_size() for e in experts_of(model) for t in tensors_of(e))


def alternate(
    actions: dict[str, Callable[[], list[float]]], rounds: int = ROUNDS
) -> dict[str, float]:
    """The median of the seconds that each action returns; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name in sorted(actions, reverse=bool(turn % 2)):
            taken = actions[name]()
            if turn:
                times[name] += taken
    return {name: statistics.median(each) for name, each in times.items()}


def prefill(model: Any, length: int = 2048) -> list[float]:
    import torch

    ids = prompt(length)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids, logits_to_keep=1, use_cache=True)

    return [seconds(forward)]


def on_gpu(model: Any) -> dict[str, float]:
    """GPU time of the experts for one token: of all kernels, and of a CUDA graph of all layers.

    The layers follow each other, so that no layer's experts are in the L2 cache.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    layers = experts_of(model)
    config = model.config
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, config.hidden_size, generator=generator).to(torch.bfloat16).cuda()
    chosen = [
        torch.randperm(config.num_experts, generator=generator)[None, : config.top_k_experts].cuda()
        for _ in layers
    ]
    weights = torch.full((1, config.top_k_experts), 1 / config.top_k_experts).cuda()

    def token() -> None:
        for experts, indices in zip(layers, chosen, strict=True):
            experts(states, indices, weights)

    with torch.no_grad():
        for _ in range(3):
            token()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            token()
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token()
        graph.replay()
        replays = 50
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type.name == "CUDA"]
    kernels = sum(e.time_range.elapsed_us() for e in events)
    return {
        "kernels, µs a layer": kernels / len(layers),
        "kernels a layer": len(events) / len(layers),
        "captured, µs a layer": 1e3 * start.elapsed_time(end) / replays / len(layers),
    }


def memory_bandwidth() -> float:
    """GB/s that a copy inside the GPU's memory reads and writes."""
    import torch

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    taken = statistics.median(seconds(lambda: target.copy_(source)) for _ in range(9))
    return 2 * source.numel() / 1e9 / taken


def logits(model: Any, tokens: int = 64) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=prompt(tokens, 3)).logits.float().cpu()


def as_linear_layers(model: Any) -> None:
    """Round each expert of a model in bfloat16 as bitsandbytes rounds an ``nn.Linear``."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for experts in experts_of(model):
        for parameter in experts.parameters():
            for matrix in parameter.data:
                packed, state = quantize_4bit(matrix, quant_type="nf4", compress_statistics=True)
                matrix.copy_(dequantize_4bit(packed, state))


def cosine(a: Any, b: Any) -> float:
    import torch

    return float(torch.cosine_similarity(a.flatten().double(), b.flatten().double(), 0))


def measure_both(folder: Path, figures: dict[str, Any], say: Callable[[], None]) -> Any:
    """Load both models, compare them, and return the one with 4-bit experts."""
    import torch

    reset_peak()
    four = load(folder, four_bit=True)
    kept, layers = resident(), len(experts_of(four))
    figures["4 bit: resident GiB"] = kept
    figures["4 bit: peak while loading - resident, GiB"] = peak() - kept
    figures["max RSS while loading, GiB"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    )
    figures["4 bit: experts, GiB"] = nbytes(four) / GIB
    say()
    sixteen = load(folder, four_bit=False)
    both = resident()
    figures["bf16: experts, GiB"] = nbytes(sixteen) / GIB
    rest = both - kept - nbytes(sixteen) / GIB
    figures["4 bit: experts by memory_allocated, GiB"] = measured = kept - rest
    figures["experts, 4 bit ÷ bf16"] = measured / figures["bf16: experts, GiB"]
    figures["experts of 30 layers, GiB"] = measured * LAYERS_OF_26B / layers
    models = {"4 bit": four, "bf16": sixteen}
    found = {name: logits(model) for name, model in models.items()}
    figures["cosine of the logits to bf16"] = cosine(found["4 bit"], found["bf16"])
    say()

    bandwidth = figures["GPU memory, GB/s"] = memory_bandwidth()
    share = four.config.top_k_experts / four.config.num_experts / layers
    for name, model in models.items():
        figures[f"{name}: experts on the GPU"] = work = on_gpu(model)
        read = nbytes(model) * share
        work["bytes read a layer"] = read
        ideal = 1e6 * read / 1e9 / bandwidth
        work["kernels ÷ (bytes ÷ bandwidth)"] = work["kernels, µs a layer"] / ideal
    say()
    for length in (64, 1500):
        token = alternate(
            {k: lambda m=m, n=length: timed(m, n, "captured") for k, m in models.items()}
        )
        figures[f"{length}: captured, tok/s"] = {name: 1 / each for name, each in token.items()}
        figures[f"{length}: captured, 4 bit ÷ bf16"] = token["bf16"] / token["4 bit"]
        say()
    times = alternate({name: lambda m=model: prefill(m) for name, model in models.items()}, 6)
    figures["prefill of 2048, s"] = times
    figures["prefill of 2048, 4 bit ÷ bf16"] = times["4 bit"] / times["bf16"]
    reset_peak()
    prefill(four)
    figures["prefill of 2048: peak above resident, GiB"] = peak() - both
    say()
    as_linear_layers(sixteen)
    figures["cosine, as nn.Linear"] = cosine(logits(sixteen), found["bf16"])
    del sixteen, models
    torch.cuda.empty_cache()
    say()
    return four


def measure_offloaded(model: Any, figures: dict[str, Any]) -> None:
    """The same model with all experts on the CPU."""
    from accelerate import dispatch_model

    count = len(experts_of(model))
    routed = nbytes(model) * model.config.top_k_experts / model.config.num_experts
    expected = logits(model)
    names = {f"model.layers.{i}.experts": "cpu" for i in range(count)}
    model = dispatch_model(
        model, {"": 0, **names}, main_device=0, skip_keys=model._skip_keys_device_placement
    )
    found = logits(model)
    figures["offloaded: equal logits"] = bool((found == expected).all())
    figures["offloaded: resident GiB"] = resident()
    figures["pinned GB/s"] = link = pinned_bandwidth()
    call(model, 64, 12, "captured")
    reset_peak()
    steps = [each for _ in range(ROUNDS) for each in timed(model, 64, "captured")]
    figures["offloaded: peak while decoding, GiB"] = peak()
    figures["offloaded: tok/s"] = speed = 1 / statistics.median(steps)
    figures["offloaded: routed bytes a token"] = routed
    figures["offloaded: share of the link"] = speed * routed / 1e9 / link
    times = [prefill(model)[0] for _ in range(4)][1:]
    figures["offloaded: prefill of 2048, s"] = statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="small widths, to try the program")
    parser.add_argument("--only", choices=("gpu", "cpu"), help="where the experts are")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    import torch

    import gemma4_compat  # noqa: F401

    folder = args.folder / f"experts-{args.layers}{'-tiny' if args.tiny else ''}"
    build(folder, TINY if args.tiny else TEXT, args.layers)
    torch.zeros(1, device="cuda")
    figures: dict[str, Any] = {**machine("26B-A4B"), "layers": args.layers}

    def say() -> None:
        line = json.dumps(figures)
        print(line, flush=True)
        if args.out:
            args.out.write_text(line + "\n")

    if args.only == "cpu":
        model = load(folder, four_bit=True)
    else:
        model = measure_both(folder, figures, say)
    if args.only != "gpu":
        measure_offloaded(model, figures)
        say()


if __name__ == "__main__":
    main()
