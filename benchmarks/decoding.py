"""Measure decode steps: captured, eager with the same static cache, eager with a dynamic cache.

``python -m benchmarks.decoding CASE SHAPE CACHE [--adapter]`` loads a case of ``cases.py`` and
prints a JSON line after each part.  The ways alternate in one process; figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gemma4_compat

from .cases import CASES, load
from .measure import host_memory, peak, reset_peak, seconds, token_seconds

#: the arguments of ``generate`` for each way to decode
WAYS: dict[str, dict[str, Any]] = {
    "captured": {"cache_implementation": "static"},
    "eager static": {"cache_implementation": "static", "disable_compile": True},
    "dynamic": {},
}
#: tokens of context before the first timed token
CONTEXTS = (64, 1500)
STEPS = 24
ROUNDS = 6
EQUAL_TOKENS = 1200


def prompt(length: int, seed: int = 0, end: int = 400) -> Any:
    """Random tokens on the GPU: int64 [1, length]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, end, (1, length), generator=generator).cuda()


def call(model: Any, ids: Any, count: int, way: str, **options: Any) -> Any:
    """Greedily generate ``count`` tokens after ``ids``: a prompt, or the length of a random one.

    ``min_new_tokens`` would add kernels to each step, so a token that does not occur ends the text.
    """
    import torch

    if isinstance(ids, int):
        ids = prompt(ids)
    end = model.config.get_text_config().vocab_size - 1
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        **{"eos_token_id": end, "pad_token_id": 0, **WAYS[way], **options},
    )


def timed(model: Any, length: int, way: str) -> list[float]:
    """Seconds of each step of one token, without the first two."""
    return token_seconds(lambda n, **options: call(model, length, n, way, **options), STEPS)[2:]


def gpu_busy(model: Any, length: int, way: str) -> tuple[float, float]:
    """GPU seconds and GPU operations for a token: the difference of 12 and 4 tokens, by token.

    Kernels that begin early run, or wait, beside others: the GPU is busy while any of them runs.
    """
    from torch.profiler import ProfilerActivity, profile

    measured = []
    for count in (4, 12):
        call(model, length, count, way)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call(model, length, count, way)
        events = [e for e in profiler.events() if e.device_type.name == "CUDA"]
        busy, last = 0.0, 0.0
        for begin, end in sorted((e.time_range.start, e.time_range.end) for e in events):
            busy, last = busy + max(0.0, end - max(begin, last)), max(last, end)
        measured.append((busy / 1e6, len(events)))
    (short, few), (long, many) = measured
    return (long - short) / 8, (many - few) / 8


@contextlib.contextmanager
def looked_up_by_the_cpu() -> Iterator[None]:
    """The CPU looks up offloaded embeddings, as before the GPU could read them in place."""
    from gemma4_compat.runtime.host import table

    original = table.in_place_of
    table.in_place_of = lambda hook: None
    try:
        yield
    finally:
        table.in_place_of = original


def warmed(action: Callable[[], Any]) -> Callable[[], list[float]]:
    """Time an action once it ran: patches that are switched on first compare their kernels."""

    def timed_action() -> list[float]:
        action()
        return [seconds(action)]

    return timed_action


def prefills(model: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Forwards over prompts, each with its name."""
    from gemma4_compat.tiny import image_inputs

    for length in (64, 2048, 8192, 32768):
        ids = prompt(length, end=250_000)
        yield str(length), lambda i=ids: model(input_ids=i, logits_to_keep=1, use_cache=True)
    image = {name: each.cuda() for name, each in image_inputs(model.config).items()}
    yield "an image", lambda: model(**image, logits_to_keep=1, use_cache=True)
    ids = prompt(8192, end=250_000)
    yield "8192 in chunks", lambda: call(model, ids, 1, "dynamic", prefill_chunk_size=1024)


def against_before(model: Any, figures: dict[str, Any], say: Any) -> None:
    """Speed of ``generate`` and prefill: embeddings read in place ÷ looked up by the CPU."""
    import torch

    both = {"in place": contextlib.nullcontext, "by the CPU": looked_up_by_the_cpu}

    def ratio(action: Callable[[], list[float]], rounds: int) -> float:
        times: dict[str, list[float]] = {name: [] for name in both}
        for turn in range(rounds + 1):
            for name in sorted(both, reverse=bool(turn % 2)):
                with both[name](), torch.no_grad():
                    seconds_of_turn = action()
                if turn:  # the first turn warms up
                    times[name] += seconds_of_turn
        middle = {name: statistics.median(each) for name, each in times.items()}
        return middle["by the CPU"] / middle["in place"]

    for name, action in prefills(model):
        rounds = 4 if name == "32768" else 8
        figures[f"prefill of {name} ÷ before"] = ratio(lambda a=action: [seconds(a)], rounds)
    say()
    figures["default generate ÷ before"] = ratio(lambda: timed(model, 64, "dynamic"), 10)


def chat(model: Any, way: str, turns: int = 10, answer: int = 32) -> float:
    """Seconds of a chat; the prompt of each turn holds all earlier turns."""
    import torch

    def turns_of_both() -> None:
        ids = prompt(0)
        for turn in range(turns):
            ids = call(model, torch.cat([ids, prompt(20, turn)], dim=1), answer, way)

    return seconds(turns_of_both)


def snapshot_ms(model: Any) -> float:
    """Milliseconds of the check that the model has not changed since the last call."""
    from gemma4_compat.runtime.capture.decoding import decoding_of

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoding = decoding_of(base)
    return 1e3 * statistics.median(seconds(lambda: decoding.state(base)) for _ in range(9))


def measure(model: Any, figures: dict[str, Any], say: Any, before: int) -> None:
    """Memory, and the time of a call besides its tokens."""
    import torch

    call(model, 64, 8, "dynamic")
    call(model, 64, 48, "eager static")
    figures["host GiB after the first token"] = (host_memory() - before) / 2**30
    gc.collect()
    reset_peak()
    call(model, 64, 48, "eager static")
    static_peak = peak()
    reset_peak()
    first = seconds(lambda: call(model, 64, 48, "captured"))
    figures["peak above eager static, MiB"] = 1024 * (peak() - static_peak)
    figures["reserved MiB"] = torch.cuda.memory_reserved() / 2**20
    again = statistics.median(seconds(lambda: call(model, 64, 48, "captured")) for _ in range(3))
    figures["first call of 48 tokens, s, above the next ones"] = [first, first - again]
    # 3 tokens: one from the prompt's forward, and two from decode steps
    few: dict[str, list[float]] = {"captured": [], "eager static": []}
    for seed in range(9):
        for way in few:
            few[way].append(seconds(lambda w=way, i=seed: call(model, prompt(60 - i, i), 3, w)))
    figures["call of 3 tokens, ms"] = {k: 1e3 * statistics.median(v) for k, v in few.items()}
    figures["snapshot, ms"] = snapshot_ms(model)
    say()


def measure_steps(
    model: Any, figures: dict[str, Any], say: Any, contexts: Sequence[int], rounds: int
) -> None:
    """The time of a token and of a prompt, with the same bits as upstream's and with our rounding.

    Each turn of "fast" captures anew, and compares its kernels, before it is timed.
    """
    import torch

    #: each side, and its way to decode
    sides = {
        "dynamic": "dynamic",
        "eager static": "eager static",
        "exact": "captured",
        "fast": "captured",
    }

    def rounding_of(side: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if side == "fast" else gemma4_compat.disabled("fast")

    def compare(name: str, actions: dict[str, Callable[[], list[float]]]) -> None:
        times: dict[str, list[float]] = {side: [] for side in actions}
        for turn in range(rounds):
            for side in sorted(times, reverse=bool(turn % 2)):
                with rounding_of(side):
                    times[side] += actions[side]()
        figures[name] = {side: 1e3 * statistics.median(each) for side, each in times.items()}
        say()

    def steps(length: int, way: str) -> list[float]:
        call(model, length, STEPS, way)
        return timed(model, length, way)

    for length in contexts:
        actions = {side: partial(steps, length, way) for side, way in sides.items()}
        compare(f"{length}: ms a token", actions)
        busy = {}
        for side, way in sides.items():
            with rounding_of(side):
                busy[side] = [1e3 * (found := gpu_busy(model, length, way))[0], found[1]]
        figures[f"{length}: GPU ms, operations a token"] = busy
        say()
    for length in (2048, 8192):
        ids = prompt(length, end=250_000)

        def prefill(ids: Any = ids) -> None:
            with torch.no_grad():
                model(input_ids=ids, logits_to_keep=1, use_cache=True)

        compare(f"prompt of {length}: ms", {"exact": warmed(prefill), "fast": warmed(prefill)})


def measure_calls(model: Any, figures: dict[str, Any], say: Any) -> None:
    if "embed_tokens_per_layer" in str(getattr(model, "hf_device_map", "")):
        against_before(model, figures, say)
    chats = {way: chat(model, way) for way in ("dynamic", "captured")}
    figures["chat of ten turns, s"] = chats
    figures["chat, captured ÷ dynamic"] = chats["captured"] / chats["dynamic"]


def check_equal(model: Any, figures: dict[str, Any]) -> None:
    """Compare the logits of captured and eager steps over more than two sliding windows."""
    import torch

    outputs = [
        call(
            model,
            prompt(64, 3),
            EQUAL_TOKENS,
            way,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for way in ("captured", "eager static")
    ]
    same = sum(torch.equal(a, b) for a, b in zip(outputs[0].logits, outputs[1].logits, strict=True))
    figures["steps with equal logits"] = [same, EQUAL_TOKENS]


def main() -> None:
    parts = ("memory", "steps", "calls", "equal")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("shape")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--int8", action="store_true", help="in 8 bits, with threshold 0")
    parser.add_argument("--only", choices=parts, help="only this part")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    import torch

    folder = args.cache / args.shape
    torch.zeros(1, device="cuda")
    before = host_memory()
    start = time.perf_counter()
    from transformers import BitsAndBytesConfig

    int8 = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0) if args.int8 else None
    steps = args.only in (None, "steps")
    if steps:  # the hooks of an offloaded model keep the forwards that they find
        gemma4_compat.install("fast")
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
    if args.only in (None, "memory"):
        measure(model, figures, say, before)
    if steps:
        measure_steps(model, figures, say, args.contexts, args.rounds)
        gemma4_compat.uninstall("fast")
    if args.only in (None, "calls"):
        measure_calls(model, figures, say)
        say()
    if args.only in (None, "equal"):
        check_equal(model, figures)
        say()


if __name__ == "__main__":
    main()
