"""The models for the stories, tiny, whole or split, with adapters; and their comparison."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..model.meta import bnb_config
from ..tiny import (
    TOWERS,
    audio_inputs,
    build_adapter,
    build_checkpoint,
    image_inputs,
    text_inputs,
)

_INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "text": text_inputs,
    "image": image_inputs,
    "audio": audio_inputs,
}
_FORWARDS = 2
_NEW_TOKENS = 4


class Failure(Exception):
    """A story gave a wrong result without an exception; the message is for the table."""


@dataclass
class Stage:
    """The files of the demo, and functions that load models from them.

    ``folder`` contains the checkpoint and the adapters; a story writes to ``scratch``.
    """

    folder: Path
    scratch: Path

    def build(self) -> None:
        """Write the checkpoint and the adapters.

        "broad" is an adapter with the users' targets.  "named" and "second" contain the full name
        of every target module, so that loading them needs no patch.  "named" has the same weights
        as "broad".
        """
        build_checkpoint(self.folder / "model")
        build_adapter(self.folder / "broad", self.folder / "model")
        shutil.copytree(self.folder / "broad", self.folder / "named")
        build_adapter(self.folder / "second", self.folder / "model", rank=8, seed=1)
        for name in ("named", "second"):
            _name_targets_in_full(self.folder / name)

    # -- models ---------------------------------------------------------------------------------

    def load(self, *, nested: bool = True, towers_in_float: bool = False) -> Any:
        """The base model in 4 bits on one device."""
        return self._load({"": self.device}, nested, skip=TOWERS if towers_in_float else ())

    def split(self, *, nested: bool = True) -> Any:
        """The 4-bit base model with its towers offloaded, which are in 4 bits too."""
        return self._dispatched(self.load(nested=nested))

    def split_by_map(self) -> Any:
        """The base model, split as if ``from_pretrained`` got a device map.

        Modules that such a map puts on the CPU stay in bfloat16.
        """
        if _cuda():
            # ``skip`` makes every transformers version leave the same modules unquantised.
            return self._load(self.device_map, nested=True, skip=TOWERS, cpu_in_float=True)
        return self._dispatched(self.load(towers_in_float=True))

    def unquantised(self) -> Any:
        """The base model in bfloat16 on one device."""
        return self._from_pretrained(self.folder / "model", {"": self.device})

    def dispatched_plainly(self) -> Any:
        """The bfloat16 model with decoder layers offloaded by the user's own ``dispatch_model``."""
        from accelerate import dispatch_model

        model = self.unquantised()
        layers = {f"model.language_model.layers.{i}": self._elsewhere for i in (1, 2, 4)}
        return dispatch_model(
            model,
            {**layers, "": self.device},
            main_device=self.device,
            offload_dir=str(self.scratch / "offload"),
        )

    def reload(self, path: Path) -> Any:
        """The model of a quantised checkpoint that was saved before, on one device."""
        return self._from_pretrained(path, {"": self.device})

    @property
    def device(self) -> Any:
        """The execution device: GPU 0, or the CPU without a GPU."""
        return _device()

    @property
    def device_map(self) -> dict[str, Any]:
        """A device map that offloads the towers: to the CPU, or to disk if there is no GPU."""
        return {**dict.fromkeys(TOWERS, self._elsewhere), "": self.device}

    @property
    def _elsewhere(self) -> str:
        return "cpu" if _cuda() else "disk"

    def with_adapter(self, model: Any, name: str, **options: Any) -> Any:
        """The model with one of the adapters, from ``PeftModel.from_pretrained``."""
        from peft import PeftModel

        placed = offloaded(model)
        model = PeftModel.from_pretrained(model, self.folder / name, **options)
        check_placement(model, placed)
        return model

    def _dispatched(self, model: Any) -> Any:
        from accelerate import dispatch_model

        return dispatch_model(
            model,
            self.device_map,
            main_device=self.device,
            offload_dir=str(self.scratch / "offload"),
            skip_keys=model._skip_keys_device_placement,
        )

    def _load(
        self,
        device_map: dict[str, Any],
        nested: bool,
        *,
        skip: Sequence[str] = (),
        cpu_in_float: bool = False,
    ) -> Any:
        # On a machine without a GPU, the offload flag would leave all modules unquantised.
        quantization = bnb_config(
            "nf4",
            nested=nested,
            offload=cpu_in_float,
            llm_int8_skip_modules=["lm_head", *skip],
        )
        model = self._from_pretrained(
            self.folder / "model", device_map, quantization_config=quantization
        )
        if not any(type(module).__name__ == "Linear4bit" for module in model.modules()):
            raise Failure("nothing was quantised")
        return model

    @staticmethod
    def _from_pretrained(path: Path, device_map: dict[str, Any], **options: Any) -> Any:
        import torch
        from transformers import Gemma4ForConditionalGeneration

        return Gemma4ForConditionalGeneration.from_pretrained(
            path, device_map=device_map, dtype=torch.bfloat16, **options
        ).eval()


def _name_targets_in_full(adapter: Path) -> None:
    from safetensors import safe_open

    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        tensors = list(file.keys())
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = sorted(modules)
    (adapter / "adapter_config.json").write_text(json.dumps(config))


# -- comparing ----------------------------------------------------------------------------------


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


def compare(actual: Any, expected: Any) -> None:
    """Check for equal logits for text, image and sound, twice, and equal generated tokens."""
    import torch

    placed = offloaded(actual)
    prompts = inputs(actual)
    worst = 0.0
    for _ in range(_FORWARDS):
        for kind, prompt in prompts.items():
            logits, reference = _logits(actual, prompt), _logits(expected, prompt)
            for whose, values in (("the reference's ", reference), ("", logits)):
                if not values.isfinite().all():
                    raise Failure(f"{whose}{kind} logits are not finite")
            worst = max(worst, (logits - reference).abs().max().item())
    if worst:
        raise Failure(f"wrong by {worst:.2g}")
    for kind, prompt in prompts.items():
        if not torch.equal(_generate(actual, prompt), _generate(expected, prompt)):
            raise Failure(f"{kind}: other tokens generated")
    check_placement(actual, placed)


def inputs(model: Any) -> dict[str, dict[str, Any]]:
    """A text, an image and a sound prompt, on the execution device."""
    device = _device()
    return {
        kind: {name: tensor.to(device) for name, tensor in build(model.config).items()}
        for kind, build in _INPUTS.items()
    }


def _logits(model: Any, prompt: dict[str, Any]) -> Any:
    import torch

    with torch.no_grad():
        return model(**prompt).logits.float().cpu()


def _generate(model: Any, prompt: dict[str, Any]) -> Any:
    return model.generate(**prompt, max_new_tokens=_NEW_TOKENS, do_sample=False).cpu()


def _cuda() -> bool:
    import torch

    return cast(bool, torch.cuda.is_available())


def _device() -> Any:
    return 0 if _cuda() else "cpu"
