"""The stories: what users tried, in their words.

A story is a function that gets a :class:`~.stage.Stage` and raises if the result is wrong.  It
runs once without and once with the patches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .stage import Failure, Stage, device, device_map, inputs


@dataclass(frozen=True)
class Story:
    """A story's title, and its function as "module:name", for another process to import."""

    title: str
    function: str

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]


STORIES: list[Story] = []


def story(title: str) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    """Add the decorated function to the stories."""

    def add(function: Callable[[Stage], None]) -> Callable[[Stage], None]:
        STORIES.append(Story(title, f"{function.__module__}:{function.__name__}"))
        return function

    return add


@story("load an adapter with broad targets")
def broad_targets(stage: Stage) -> None:
    expected = stage.with_adapter(stage.load(), "named")
    stage.compare(stage.with_adapter(stage.load(), "broad"), expected)


@story("offload the towers of a 4-bit model, double quant")
def offload_double_quant(stage: Stage) -> None:
    stage.compare(stage.split(), stage.load())


@story("offload the towers of a 4-bit model, single quant")
def offload_single_quant(stage: Stage) -> None:
    stage.compare(stage.split(nested=False), stage.load(nested=False))


@story("use an image with the vision tower in 4 bits")
def quantized_vision(stage: Stage) -> None:
    import torch

    model = stage.load()
    image = inputs(model)["image"]
    pixels, positions = image["pixel_values"].bfloat16(), image["image_position_ids"]
    padding = (positions == -1).all(-1)
    patches = model.model.vision_tower.patch_embedder
    with torch.no_grad():
        embedded = patches(pixels, positions, padding)
        expected = patches.input_proj(2 * (pixels - 0.5))
        expected = expected + patches._position_embeddings(positions, padding)
    if not torch.equal(embedded, expected):
        both = torch.stack([embedded.float().flatten(), expected.float().flatten()])
        raise Failure(f"image embeddings correlate {both.corrcoef()[0, 1]:.2f} with the right ones")


@story("offload decoder layers with dispatch_model, without skip_keys")
def dispatch_without_skip_keys(stage: Stage) -> None:
    layers = [f"model.language_model.layers.{index}" for index in (1, 2, 4)]
    stage.compare(stage.dispatched(stage.from_pretrained(), layers), stage.from_pretrained())


@story("load an adapter onto a split 4-bit model")
def adapter_on_split(stage: Stage) -> None:
    stage.compare(stage.with_adapter(stage.split_by_map(), "named"), _on_one_device(stage))


@story("the same, passing device_map and offload_dir to PEFT as well")
def adapter_with_device_map(stage: Stage) -> None:
    model = stage.with_adapter(
        stage.split_by_map(),
        "named",
        device_map=device_map(),
        offload_dir=str(stage.scratch / "peft-offload"),
        offload_buffers=True,
        ephemeral_gpu_offload=True,
        torch_device="cpu" if device() == "cpu" else "cuda",
    )
    stage.compare(model, _on_one_device(stage))


@story("model.load_adapter, transformers' own, on a split 4-bit model")
def native_load_adapter(stage: Stage) -> None:
    model = stage.split_by_map()
    model.load_adapter(str(stage.folder / "named"))
    expected = stage.load(towers_in_float=True)
    expected.load_adapter(str(stage.folder / "named"))
    stage.compare(model, expected)


@story("all at once: 4-bit towers, offloaded, and an adapter with broad targets")
def all_at_once(stage: Stage) -> None:
    model = stage.with_adapter(stage.split(), "broad")
    stage.compare(model, stage.with_adapter(stage.load(), "named"))


@story("a second adapter on a split 4-bit model, switching between them")
def second_adapter(stage: Stage) -> None:
    model = stage.with_adapter(stage.split_by_map(), "named")
    model.load_adapter(str(stage.folder / "second"), adapter_name="second")
    expected = _on_one_device(stage)
    expected.load_adapter(str(stage.folder / "second"), adapter_name="second")
    for name in ("second", "default"):
        model.set_adapter(name)
        expected.set_adapter(name)
        stage.compare(model, expected)


@story("merge an adapter into a split 4-bit model")
def merge(stage: Stage) -> None:
    model = stage.with_adapter(stage.split_by_map(), "named").merge_and_unload()
    stage.compare(model, _on_one_device(stage).merge_and_unload())


@story("save a split 4-bit model and load it again")
def save_and_reload(stage: Stage) -> None:
    model = stage.split()
    saved = stage.scratch / "saved"
    model.save_pretrained(saved)
    stage.compare(model, stage.from_pretrained(saved))


@story("generate with a static cache from a split 4-bit model, at the GPU's speed")
def static_cache(stage: Stage) -> None:
    import torch

    model = stage.split_by_map()
    prompt = inputs(model)["text"]
    prompt |= {"cache_implementation": "static", "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**prompt, disable_compile=True)
    calls: list[None] = []
    forward = model.model.language_model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return forward(*args, **kwargs)

    model.model.language_model.forward = counted
    if not torch.equal(model.generate(**prompt), expected):
        raise Failure("other tokens generated")
    # Decode steps can be captured on a GPU only.
    if device() != "cpu" and len(calls) == 16:
        raise Failure("no faster: Python runs each of the 16 steps")


@story("train an adapter on a split 4-bit model")
def train(stage: Stage) -> None:
    model = stage.with_adapter(stage.split_by_map(), "named", is_trainable=True)
    _compare_losses(_train(model), _train(_on_one_device(stage, is_trainable=True)))


@story("train with gradient checkpointing, as PEFT prepares a 4-bit model for it")
def train_with_checkpointing(stage: Stage) -> None:
    from peft import prepare_model_for_kbit_training

    losses = []
    for checkpointing in (True, False):
        model = stage.load(towers_in_float=True)
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
        losses.append(_train(stage.with_adapter(model, "named", is_trainable=True)))
    _compare_losses(*losses)


def _compare_losses(actual: list[float], expected: list[float]) -> None:
    if actual != expected:
        worst = max(abs(a - b) for a, b in zip(actual, expected, strict=True))
        raise Failure(f"losses wrong by {worst:.2g}")


def _on_one_device(stage: Stage, **options: Any) -> Any:
    """The reference for a model that is split by a device map."""
    return stage.with_adapter(stage.load(towers_in_float=True), "named", **options)


def _train(model: Any) -> list[float]:
    """Train for three steps and return the losses; every adapter tensor must get a gradient."""
    import torch

    model.train()
    adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(adapter.values(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        for batch in inputs(model).values():
            loss = model(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            losses.append(loss.item())
        without = [name for name, p in adapter.items() if p.grad is None or not p.grad.any()]
        if without:
            raise Failure(f"no gradient for {len(without)} of {len(adapter)} adapter tensors")
        optimizer.step()
    return losses
