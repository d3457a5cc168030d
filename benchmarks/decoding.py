"""Decode steps: captured, eager with the same static cache, eager with a dynamic cache.

``python -m benchmarks.decoding CASE SHAPE CACHE [--adapter]`` loads a case of ``cases.py`` and
prints a JSON line whenever it knows more.  The ways alternate in one process; figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .cases import CASES, load

#: how ``generate`` is called
WAYS: dict[str, dict[str, Any]] = {
    "captured": {"cache_implementation": "static"},
    "eager static": {"cache_implementation": "static", "disable_compile": True},
    "dynamic": {},
}
#: tokens of context before the first that is timed
CONTEXTS = (64, 1500)
STEPS = 24
ROUNDS = 6
EQUAL_TOKENS = 1200


class Clock:
    """A streamer that notes when each token arrives on the host."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, tokens: Any) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass

    def steps(self) -> list[float]:
        """Seconds of each step of one token; the prompt's forward and two warm steps left out."""
        # The prompt is put first, then the token of its forward.
        return [after - before for before, after in itertools.pairwise(self.moments[3:])]


def call(model: Any, length: int, count: int, way: str, seed: int = 0, **options: Any) -> Any:
    """Greedily generate ``count`` tokens after a random prompt."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 400, (1, length), generator=generator).cuda()
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        **{**WAYS[way], **options},
    )


def timed(model: Any, length: int, way: str) -> list[float]:
    clock = Clock()
    call(model, length, STEPS, way, streamer=clock)
    return clock.steps()


def gpu_busy(model: Any, length: int, way: str) -> tuple[float, float]:
    """Seconds that the GPU works for a token, and its operations: 12 tokens less 4."""
    from torch.profiler import ProfilerActivity, profile

    found = []
    for count in (4, 12):
        call(model, length, count, way)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call(model, length, count, way)
        events = [e for e in profiler.events() if e.device_type.name == "CUDA"]
        found.append((sum(e.time_range.elapsed_us() for e in events) / 1e6, len(events)))
    (short, few), (long, many) = found
    return (long - short) / 8, (many - few) / 8


def wall(action: Any) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@contextlib.contextmanager
def looked_up_by_the_cpu() -> Iterator[None]:
    """Offloaded embeddings are not read in place, as before there was that."""
    from gemma4_compat.patches.offloading import host_embedding

    original = host_embedding.in_place_of
    host_embedding.in_place_of = lambda hook: None
    try:
        yield
    finally:
        host_embedding.in_place_of = original


def against_before(model: Any, figures: dict[str, Any]) -> None:
    """Default ``generate``, and prefill, in place ÷ through the CPU: speed, alternating."""
    import torch

    both = {"in place": contextlib.nullcontext, "by the CPU": looked_up_by_the_cpu}
    steps: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(6):
        for name, context in both.items():
            with context():
                steps[name] += timed(model, 64, "dynamic")
    token = {name: statistics.median(times) for name, times in steps.items()}
    figures["default generate ÷ before"] = token["by the CPU"] / token["in place"]
    for length in (64, 2048, 8192):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 250_000, (1, length), generator=generator).cuda()
        times: dict[str, list[float]] = {name: [] for name in both}
        for _ in range(6):
            for name, context in both.items():
                with context(), torch.no_grad():
                    times[name].append(
                        wall(lambda i=ids: model(input_ids=i, logits_to_keep=1, use_cache=True))
                    )
        middle = {name: statistics.median(each[1:]) for name, each in times.items()}
        figures[f"prefill of {length} ÷ before"] = middle["by the CPU"] / middle["in place"]


def chat(model: Any, way: str, turns: int = 10, answer: int = 32) -> float:
    """Seconds of a chat whose prompt is all that was said before."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.empty(1, 0, dtype=torch.long, device="cuda")
    start = time.perf_counter()
    for _ in range(turns):
        question = torch.randint(3, 400, (1, 20), generator=generator).cuda()
        ids = torch.cat([ids, question], dim=1)
        ids = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=answer,
            min_new_tokens=answer,
            do_sample=False,
            **WAYS[way],
        )
    ids.cpu()
    return time.perf_counter() - start


def host_memory() -> int:
    """Bytes of memory that this process holds, page-locked included."""
    status = Path("/proc/self/status").read_text()
    kib = {line.split()[0]: int(line.split()[1]) for line in status.splitlines() if "kB" in line}
    return 1024 * kib["RssAnon:"]


def snapshot_ms(model: Any) -> float:
    """How long it takes to see that the model is what it was."""
    from gemma4_compat.patches._decode_graphs import decoding_of

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoding = decoding_of(base)
    return 1e3 * statistics.median(wall(lambda: decoding.version(base)) for _ in range(9))


def measure(model: Any, figures: dict[str, Any], say: Any, before: int) -> None:
    import torch

    mib = 2**20
    call(model, 64, 8, "dynamic")
    call(model, 64, 48, "eager static")
    figures["host GiB after the first token"] = (host_memory() - before) / 2**30
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call(model, 64, 48, "eager static")
    static_peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    first = wall(lambda: call(model, 64, 48, "captured"))
    peak = torch.cuda.max_memory_allocated()
    figures["peak above eager static, MiB"] = (peak - static_peak) / mib
    figures["reserved MiB"] = torch.cuda.memory_reserved() / mib
    again = statistics.median(wall(lambda: call(model, 64, 48, "captured")) for _ in range(3))
    figures["first call of 48 tokens, s, above the next ones"] = [first, first - again]
    # the prompt's token, and two steps
    few: dict[str, list[float]] = {"captured": [], "eager static": []}
    for seed in range(9):
        for way in few:
            few[way].append(wall(lambda w=way, i=seed: call(model, 60 - i, 3, w, seed=i)))
    figures["call of 3 tokens, ms"] = {k: 1e3 * statistics.median(v) for k, v in few.items()}
    figures["snapshot, ms"] = snapshot_ms(model)
    say()
    for length in CONTEXTS:
        steps: dict[str, list[float]] = {way: [] for way in WAYS}
        for way in WAYS:
            call(model, length, STEPS, way)
        for _ in range(ROUNDS):
            for way in WAYS:
                steps[way] += timed(model, length, way)
        token = {way: statistics.median(times) for way, times in steps.items()}
        figures[f"{length}: ms a token"] = {way: 1e3 * each for way, each in token.items()}
        figures[f"{length}: tok/s, captured ÷ dynamic"] = token["dynamic"] / token["captured"]
        busy = {way: gpu_busy(model, length, way) for way in WAYS}
        figures[f"{length}: GPU ms, operations a token"] = {
            way: [1e3 * seconds, operations] for way, (seconds, operations) in busy.items()
        }
        beyond = {way: token[way] - busy[way][0] for way in WAYS}
        figures[f"{length}: beyond GPU work, captured ÷ dynamic"] = (
            beyond["captured"] / beyond["dynamic"]
        )
        figures[f"{length}: GPU work, captured ÷ dynamic"] = (
            busy["captured"][0] / busy["dynamic"][0]
        )
        say()


def measure_calls(model: Any, figures: dict[str, Any]) -> None:
    if "embed_tokens_per_layer" in str(getattr(model, "hf_device_map", "")):
        against_before(model, figures)
    seconds = {way: chat(model, way) for way in ("captured", "dynamic")}
    figures["chat of ten turns, s"] = seconds
    figures["chat, captured ÷ dynamic"] = seconds["captured"] / seconds["dynamic"]


def check_equal(model: Any, figures: dict[str, Any]) -> None:
    """Tokens and logits over more than two sliding windows."""
    import torch

    outputs = [
        call(model, 64, EQUAL_TOKENS, way, seed=3, return_dict_in_generate=True, output_logits=True)
        for way in ("captured", "eager static")
    ]
    same = sum(torch.equal(a, b) for a, b in zip(outputs[0].logits, outputs[1].logits, strict=True))
    figures["steps with equal logits"] = [same, EQUAL_TOKENS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("shape")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--int8", action="store_true", help="in 8 bits, without outliers")
    parser.add_argument("--only", choices=("steps", "calls", "equal"), help="a part of it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    import torch

    import gemma4_compat  # noqa: F401

    folder = args.cache / args.shape
    torch.zeros(1, device="cuda")
    before = host_memory()
    start = time.perf_counter()
    from transformers import BitsAndBytesConfig

    int8 = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0) if args.int8 else None
    model: Any = load(CASES[args.case], args.shape, folder, int8)
    if args.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder / "adapter")
    figures: dict[str, Any] = {"loading, s": time.perf_counter() - start}
    figures["resident GiB"] = torch.cuda.memory_allocated() / 2**30

    def say() -> None:
        figures["max RSS GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        line = json.dumps(
            {"case": args.case, "adapter": args.adapter, "int8": args.int8, **figures}
        )
        print(line, flush=True)
        if args.out:
            args.out.write_text(line + "\n")

    say()
    if args.only in (None, "steps"):
        measure(model, figures, say, before)
    if args.only in (None, "calls"):
        measure_calls(model, figures)
        say()
    if args.only in (None, "equal"):
        check_equal(model, figures)
        say()


if __name__ == "__main__":
    main()
