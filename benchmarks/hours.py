"""Measure what grows while one process works for long: tensors, memory, hooks, threads, files.

``python -m benchmarks.hours [--device cpu|cuda] [--quick]`` works on tiny random models in 4 bits,
with layers on the CPU and on the disk.  For each kind of work it prints how much a quantity grows
in 100 rounds: the slope of a least-squares line, and half the width of its 95 % interval.  The
first half of the rounds is a warm-up: what is resident grows for the first 400 that generate.
``--quick`` does a tenth of the rounds.

A model on the CPU streams its layers to the CPU, and nothing is page-locked or captured.  On a GPU,
the second of the models that generate has no layer on the disk, so its decode steps are captured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

#: Where the parts of the decoder are that are not on its device.
_PLACES = {
    "embed_tokens_per_layer": "cpu", "layers.1": "cpu", "layers.2": "cpu", "layers.4": "disk",
}  # fmt: skip
#: The kinds of work, and their rounds.
_ROUNDS = {"load_adapters": 200, "generate": 1000, "train": 100, "save": 60, "dispatch": 60}
_WARM_UP = 0.5
#: So many rounds lie between two samples, which take longer than a round.
_BETWEEN = 5


def sample(device: Any) -> dict[str, float]:
    """What this process holds now."""
    import psutil
    import torch

    from gemma4_compat.runtime.capture import decoding
    from gemma4_compat.runtime.host import page_locked

    gc.collect()
    if sys.platform == "linux":  # return what is free, which is more after long inputs
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    process, tensors, hooks = psutil.Process(), 0, 0
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            tensors += 1
            if not each.is_meta:
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif issubclass(type(each), torch.nn.Module) and "_forward_hooks" in vars(each):
            hooks += len(each._forward_hooks) + len(each._forward_pre_hooks)
            hooks += "_hf_hook" in vars(each)
    return {
        "tensors": tensors,
        "tensor KiB": sum(storages.values()) / 2**10,
        "page-locked KiB": page_locked.locked() / 2**10,
        "GPU KiB": torch.cuda.memory_allocated() / 2**10 if device.type == "cuda" else 0,
        "resident MiB": process.memory_info().rss / 2**20,
        "graphs": sum(len(memory.steps) for each in decoding._all for memory in each.memories),
        "hooks": hooks,
        "threads": threading.active_count(),
        "descriptors": process.num_fds() if hasattr(process, "num_fds") else process.num_handles(),
    }


def slope(values: list[float]) -> tuple[float, float]:
    """The slope of the least-squares line per 100 rounds, and half of its 95 % interval."""
    count = len(values)
    middle, mean = (count - 1) / 2, fmean(values)
    spread = sum((x - middle) ** 2 for x in range(count))
    rise = sum((x - middle) * (y - mean) for x, y in enumerate(values)) / spread
    rest = sum((y - mean - rise * (x - middle)) ** 2 for x, y in enumerate(values))
    freedom = count - 2
    quantile = 1.96 + 2.37 / freedom  # of Student's distribution
    rounds = 100 / _BETWEEN
    return rounds * rise, rounds * quantile * (rest / freedom / spread) ** 0.5


class Work:
    """Each public method prepares a kind of work, and returns a function that does it once."""

    def __init__(self, folder: Path, device: Any) -> None:
        from gemma4_compat.tiny import LANGUAGE_TARGETS, build_adapter, build_checkpoint

        self.folder, self.device, self.random = folder, device, random.Random(0)
        self.checkpoint = build_checkpoint(folder / "model")
        targets = {"targets": LANGUAGE_TARGETS}
        self.adapters = [
            build_adapter(folder / "first", self.checkpoint, rank=4, **targets),
            build_adapter(folder / "second", self.checkpoint, rank=8, seed=1, **targets),
        ]

    def _whole(self, source: Path | None = None) -> Any:
        """A model in 4 bits on its device."""
        import torch
        from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=["model.vision_tower", "model.audio_tower", "lm_head"],
        )
        return Gemma4ForConditionalGeneration.from_pretrained(
            source or self.checkpoint,
            dtype=torch.bfloat16,
            device_map={"": self.device},
            quantization_config=None if source else quantization,
        ).eval()

    def _dispatched(self, model: Any, places: dict[str, str] = _PLACES) -> Any:
        from accelerate import dispatch_model

        places = {f"model.language_model.{name}": place for name, place in places.items()}
        return dispatch_model(
            model,
            {"": self.device, **places},
            main_device=self.device,
            offload_dir=self.folder / "offload",
            skip_keys=model._skip_keys_device_placement,
        )

    def _split(self) -> Any:
        return self._dispatched(self._whole())

    def _with_adapters(self, model: Any, **options: Any) -> Any:
        from peft import PeftModel

        first, second = self.adapters
        model = PeftModel.from_pretrained(model, first, "first", **options)
        model.load_adapter(second, "second")
        return model

    def _tokens(self, length: int) -> Any:
        import torch

        ids = [self.random.randrange(5, 400) for _ in range(length)]
        return torch.tensor([ids], device=self.device)

    def _forward(self, model: Any) -> None:
        import torch

        with torch.no_grad():
            model(input_ids=self._tokens(6), logits_to_keep=1)

    def load_adapters(self) -> Callable[[], None]:
        from peft import PeftModel

        base = self._split()

        def once() -> None:
            model = PeftModel.from_pretrained(base, self.random.choice(self.adapters))
            self._forward(model)
            model.unload()

        return once

    def generate(self) -> Callable[[], None]:
        in_memory = {name: "cpu" for name, place in _PLACES.items() if place == "cpu"}
        dispatched = [self._split(), self._dispatched(self._whole(), in_memory)]
        models = [self._with_adapters(model) for model in dispatched]

        def once() -> None:
            model = self.random.choice(models)
            model.set_adapter(self.random.choice(("first", "second")))
            ids, new = self._tokens(self.random.randint(1, 12)), self.random.randint(2, 6)
            model.generate(
                input_ids=ids,
                attention_mask=ids.new_ones(ids.shape),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                cache_implementation=self.random.choice((None, "static")),
            )

        return once

    def train(self) -> Callable[[], None]:
        import torch

        model = self._with_adapters(self._split(), is_trainable=True)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-3)

        def once() -> None:
            ids = self._tokens(self.random.randint(4, 16))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return once

    def save(self) -> Callable[[], None]:
        models = [self._split()]

        def once() -> None:
            models.pop().save_pretrained(self.folder / "saved")
            models.append(self._dispatched(self._whole(self.folder / "saved")))
            self._forward(models[0])

        return once

    def dispatch(self) -> Callable[[], None]:
        from accelerate.hooks import remove_hook_from_submodules

        model = self._whole()

        def once() -> None:
            self._dispatched(model)
            self._forward(model)
            remove_hook_from_submodules(model)

        return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--only", nargs="+", choices=list(_ROUNDS), default=list(_ROUNDS))
    args = parser.parse_args()

    import gemma4_compat  # noqa: F401, I001

    import torch
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from gemma4_compat.runtime.host import blocks

    disable_progress_bar()
    set_verbosity_error()
    logging.disable(logging.WARNING)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cpu":
        blocks.STREAMED_TO = ("cpu", "cuda")
    figures: dict[str, Any] = {"device": args.device, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder), device)
        for name in args.only:
            rounds = max(_ROUNDS[name] // (10 if args.quick else 1), 6 * _BETWEEN)
            begun, once = time.monotonic(), getattr(work, name)()
            samples = []
            for number in range(rounds):
                once()
                if number % _BETWEEN == 0:
                    samples.append(sample(device))
            kept = samples[int(_WARM_UP * len(samples)) :]
            print(f"{name}, {rounds} rounds, {time.monotonic() - begun:.0f} s", flush=True)
            for quantity in kept[0]:
                rise, half = slope([each[quantity] for each in kept])
                last = kept[-1][quantity]
                figures[f"{name}, {quantity}"] = rise, half
                print(f"    {quantity}: {rise:+.3g} ± {half:.2g}, at last {last:.6g}", flush=True)
            del once
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
