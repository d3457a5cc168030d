"""The models for the stories, tiny, whole or split, with adapters; and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..model.meta import bnb_config
from ..tiny import (
    INNER_TARGETS,
    TOWERS,
    audio_inputs,
    build_adapter,
    build_checkpoint,
    image_inputs,
    text_inputs,
)

_FORWARDS = 2
_NEW_TOKENS = 4


class Failure(Exception):
    """A story gave a wrong result without an exception; the message is for the table."""


@dataclass
class Stage:
    """The files of the demo, and functions that load models from them and compare them.

    ``folder`` contains the checkpoint and the adapters; a story writes to ``scratch``.  ``placed``
    names the parameters that were offloaded from the split model.
    """

    folder: Path
    scratch: Path
    placed: set[str] = field(default_factory=set)

    def load(
        self, *, nested: bool = True, towers_in_float: bool = False, by_map: bool = False
    ) -> Any:
        """The base model in 4 bits, on one device or split by ``device_map()``."""
        # On a machine without a GPU, the offload flag would leave all modules unquantized.
        skip = ["lm_head", *(TOWERS if towers_in_float else ())]
        quantization = bnb_config("nf4", nested=nested, offload=by_map, llm_int8_skip_modules=skip)
        places = device_map() if by_map else {"": device()}
        model = self.from_pretrained(device_map=places, quantization_config=quantization)
        if not any(type(module).__name__ == "Linear4bit" for module in model.modules()):
            raise Failure("nothing was quantized")
        return model

    def split(self, *, nested: bool = True, towers_in_float: bool = False) -> Any:
        """The 4-bit base model with its towers offloaded, which are in 4 bits too by default."""
        model = self.load(nested=nested, towers_in_float=towers_in_float)
        return self.dispatched(model, TOWERS, skip_keys=model._skip_keys_device_placement)

    def split_by_map(self) -> Any:
        """The base model, split as if ``from_pretrained`` got a device map.

        Modules that such a map puts on the CPU stay in bfloat16.
        """
        if device() == "cpu":
            return self.split(towers_in_float=True)
        # Named explicitly, every transformers version leaves the same modules unquantized.
        model = self.load(towers_in_float=True, by_map=True)
        self.placed = offloaded(model)
        return model

    def from_pretrained(self, path: Path | None = None, **options: Any) -> Any:
        """The tiny checkpoint, or a saved one, in bfloat16 on one device."""
        import torch
        from transformers import Gemma4ForConditionalGeneration

        options = {"device_map": {"": device()}, "dtype": torch.bfloat16, **options}
        folder = path or self.folder / "model"
        return Gemma4ForConditionalGeneration.from_pretrained(folder, **options).eval()

    def dispatched(self, model: Any, modules: Sequence[str], **options: Any) -> Any:
        """The model with these modules offloaded by ``dispatch_model``."""
        from accelerate import dispatch_model

        options |= {"main_device": device(), "offload_dir": str(self.scratch / "offload")}
        model = dispatch_model(model, device_map(modules), **options)
        self.placed = offloaded(model)
        return model

    def with_adapter(self, model: Any, name: str, **options: Any) -> Any:
        """The model with one of the adapters, from ``PeftModel.from_pretrained``."""
        from peft import PeftModel

        placed = offloaded(model)
        model = PeftModel.from_pretrained(model, self.folder / name, **options)
        check_placement(model, placed)
        return model

    def compare(self, actual: Any, expected: Any) -> None:
        """Check for equal logits for text, image and sound, twice, and equal generated tokens.

        What was offloaded from ``actual`` must still be.
        """
        import torch

        check_placement(actual, self.placed)
        prompts = inputs(actual)
        worst = 0.0
        for _ in range(_FORWARDS):
            for kind, prompt in prompts.items():
                with torch.no_grad():
                    outputs = [model(**prompt) for model in (actual, expected)]
                logits, reference = (output.logits.float().cpu() for output in outputs)
                for whose, values in (("the reference's ", reference), ("", logits)):
                    if not values.isfinite().all():
                        raise Failure(f"{whose}{kind} logits are not finite")
                worst = max(worst, (logits - reference).abs().max().item())
        if worst:
            raise Failure(f"wrong by {worst:.2g}")
        for kind, prompt in prompts.items():
            options = {**prompt, "max_new_tokens": _NEW_TOKENS, "do_sample": False}
            tokens = [model.generate(**options).cpu() for model in (actual, expected)]
            if not torch.equal(*tokens):
                raise Failure(f"{kind}: other tokens generated")
        check_placement(actual, self.placed)


def build(stage: Stage) -> None:
    """Write the checkpoint and the adapters.

    "broad" is an adapter with the users' targets.  The targets of "named" and "second" name the
    layers inside the wrappers, so that loading them needs no patch.  "named" has the same weights
    as "broad".
    """
    model = build_checkpoint(stage.folder / "model")
    build_adapter(stage.folder / "broad", model)
    build_adapter(stage.folder / "named", model, targets=INNER_TARGETS)
    build_adapter(stage.folder / "second", model, targets=INNER_TARGETS, rank=8, seed=1)


def offloaded(model: Any) -> set[str]:
    """The names of the base model's offloaded parameters, as they are without an adapter."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", "")
        for name, parameter in model.named_parameters()
        if parameter.is_meta and "lora_" not in name
    }


def check_placement(model: Any, before: set[str]) -> None:
    """Check that the base model's parameters are still offloaded, and the adapters' are not."""
    onloaded = before - offloaded(model)
    if onloaded:
        raise Failure(f"no longer offloaded: {len(onloaded)} of {len(before)} tensors")
    adapters = [(n, p) for n, p in model.named_parameters() if "lora_" in n]
    empty = [name for name, parameter in adapters if parameter.is_meta]
    if empty:
        raise Failure(f"no values in {len(empty)} of {len(adapters)} adapter tensors")


def inputs(model: Any) -> dict[str, dict[str, Any]]:
    """A text, an image and a sound prompt, on the execution device."""
    builders = {"text": text_inputs, "image": image_inputs, "audio": audio_inputs}
    return {
        kind: {name: tensor.to(device()) for name, tensor in build(model.config).items()}
        for kind, build in builders.items()
    }


def device() -> Any:
    """The execution device: GPU 0, or the CPU without a GPU."""
    import torch

    return 0 if torch.cuda.is_available() else "cpu"


def device_map(modules: Sequence[str] = TOWERS) -> dict[str, Any]:
    """A map that offloads the modules: to the CPU, or to disk if there is no GPU."""
    return {**dict.fromkeys(modules, "disk" if device() == "cpu" else "cpu"), "": device()}
