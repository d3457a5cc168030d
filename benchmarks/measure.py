"""Measure a loaded model: memory, speed, copies between host and device."""

from __future__ import annotations

import collections
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 2**30


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(action: Callable[[], Any]) -> float:
    """The wall time of ``action`` in seconds, the GPU's work included."""
    synchronize()
    start = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - start


def reset_peak() -> None:
    """Reset what ``peak`` returns."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def resident() -> float | None:
    """GiB of the tensors on the GPU; ``None`` without a GPU."""
    import torch

    gc.collect()
    if not torch.cuda.is_available():
        return None
    # The workspace of cuBLAS, some 30 MiB, comes from the same allocator: free it.
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    return torch.cuda.memory_allocated() / GIB


def peak() -> float | None:
    """The peak GiB of tensors on the GPU since ``reset_peak``; ``None`` without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None


def host_memory() -> int:
    """Bytes of memory of this process, page-locked memory included."""
    status = Path("/proc/self/status").read_text()
    kib = {line.split()[0]: int(line.split()[1]) for line in status.splitlines() if "kB" in line}
    return 1024 * kib["RssAnon:"]


def largest(model: Any) -> float | None:
    """GiB of the largest tensor on the GPU; ``None`` if there is none."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    on_gpu = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    return max((t.numel() * t.element_size() / GIB for t in on_gpu), default=None)


class Text:
    """Random tokens for a model, on the GPU if there is one."""

    def __init__(self, vocabulary: int) -> None:
        import torch

        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        # The special tokens are at the end of the vocabulary.
        self._end = min(vocabulary - 32, 250_000)

    def tokens(self, batch: int, length: int) -> Any:
        """int64 [batch, length]."""
        generator = self._torch.Generator().manual_seed(0)
        ids = self._torch.randint(3, self._end, (batch, length), generator=generator)
        return ids.to(self._device)


def decoder(model: Any, text: Text) -> Callable[..., Any]:
    """A function that greedily generates ``count`` tokens after a prompt of 32 tokens."""
    import torch

    prompt = text.tokens(1, 32)
    mask = torch.ones_like(prompt)

    def generate(count: int, **options: Any) -> Any:
        return model.generate(
            input_ids=prompt,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            **options,
        )

    return generate


def decode(generate: Callable[[int], Any], repeats: int = 3, cap: float = 3.0) -> list[float]:
    """Tokens per second of each of ``repeats`` runs of 24 tokens, or of fewer to stay below ``cap``
    seconds a run."""
    generate(12)
    count = max(2, min(24, int(cap * 4 / seconds(lambda: generate(4)))))
    return [count / seconds(lambda: generate(count)) for _ in range(repeats)]


def turns(
    patched: Callable[..., Any], unpatched: Callable[..., Any], count: int = 8, pairs: int = 16
) -> list[float]:
    """The decode speed of ``patched`` ÷ that of ``unpatched``: a ratio for each quarter of turns.

    Both take turns in this process; the patches are disabled for ``unpatched``.  Each ratio is one
    of medians over single tokens of many short turns.  The speed of a shared machine changes from
    second to second, and such a median changes little with it.
    """
    import gemma4_compat

    own: list[list[float]] = []
    other: list[list[float]] = []
    for turn in range(pairs + 1):
        if turn % 2:
            own.append(token_seconds(patched, count))
        with gemma4_compat.disabled():
            other.append(token_seconds(unpatched, count))
        if not turn % 2:
            own.append(token_seconds(patched, count))

    def middle(turns: list[list[float]]) -> float:
        return statistics.median(itertools.chain.from_iterable(turns))

    quarter = pairs // 4
    parts = [slice(start, start + quarter) for start in range(1, pairs, quarter)]  # 0 warms up
    return [middle(other[part]) / middle(own[part]) for part in parts]


def token_seconds(generate: Callable[..., Any], count: int) -> list[float]:
    """Seconds of each decode step of one generation, without the prompt's forward."""
    moments: list[float] = []

    class Clock(collections.deque[str]):
        """What a streamer's queue keeps texts in: it gets that of each token when it arrives.

        With a queue of another class, the next step would wait for its functions.
        """

        def append(self, item: str) -> None:
            moments.append(time.perf_counter())

    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TextIteratorStreamer

    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    streamer.text_queue.queue = Clock()
    generate(count, streamer=streamer)
    # The first token is from the prompt's forward.  At the end, the queue gets two more texts.
    return [after - before for before, after in itertools.pairwise(moments[:count])]


def prefill(model: Any, text: Text, batch: int, length: int, repeats: int = 3) -> float:
    """Tokens per second of a forward over prompts [batch, length], the median of ``repeats``."""
    import torch

    tokens = text.tokens(batch, length)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), logits_to_keep=1)

    forward()
    return batch * length / statistics.median(seconds(forward) for _ in range(repeats))


def copies(generate: Callable[[int], Any], few: int = 3, many: int = 7) -> dict[str, float]:
    """Copies and bytes between host and device per decode step: the difference of ``many`` and
    ``few`` tokens, so that neither the prompt nor the start of a generation counts."""
    short, long = (traced(lambda n=n: generate(n)) for n in (few, many))
    return {key: (long[key] - short[key]) / (many - few) for key in sorted({*short, *long})}


def traced(action: Callable[[], Any]) -> Counter[str]:
    from torch import cuda
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if cuda.is_available() else ProfilerActivity.CPU
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with profile(activities=[activity]) as profiler:
            action()
            synchronize()
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    if cuda.is_available() and not any(event.get("cat") == "kernel" for event in events):
        raise RuntimeError("the profiler recorded no kernels, so its count of copies may be wrong")
    return count_copies(events)


def count_copies(events: list[dict[str, Any]]) -> Counter[str]:
    """Copies, bytes and µs by direction and kind of host memory, from the profiler's events."""
    count: Counter[str] = Counter({"DtoH": 0, "DtoH bytes": 0, "HtoD": 0, "HtoD bytes": 0})
    for event in events:
        # "Memcpy HtoD (Pinned -> Device)"
        words = event.get("name", "").split()
        if words[:1] == ["Memcpy"] and words[1:2] in (["DtoH"], ["HtoD"]):
            size = int(event.get("args", {}).get("bytes", 0))
            count[words[1]] += 1
            count[f"{words[1]} bytes"] += size
            count[f"{words[1]} µs"] += event.get("dur", 0)
            if "Pageable" in event["name"]:
                count[f"{words[1]} bytes pageable"] += size
    return count


def pinned_bandwidth() -> float:
    """GB/s of a copy from pinned host memory to the GPU."""
    import torch

    host = torch.empty(2**29, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    device.copy_(host, non_blocking=True)
    samples = [seconds(lambda: device.copy_(host, non_blocking=True)) for _ in range(5)]
    return host.numel() / 1e9 / statistics.median(samples)
