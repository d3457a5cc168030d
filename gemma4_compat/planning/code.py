"""The code that loads a model as planned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..files import hub
from ..model import parts
from ..model.meta import COMPRESSED, bnb_options, checkpointing
from .demand import EXCLUDED, GENERATE, TARGETS


@dataclass(frozen=True)
class Load:
    """How to load a model.

    ``quant`` is one of `QUANTS`, or `COMPRESSED` for such a checkpoint, which is dequantized, or
    ``None`` if the checkpoint is quantized already and stays so.  Products in 4 bits are computed
    in the dtype ``compute``, all else in bfloat16.
    """

    model: str
    architecture: str
    quant: str | None
    compute: str
    device_map: Mapping[str, int | str]
    adapter_dir: str | None
    train: bool
    rank: int

    @property
    def offloaded(self) -> list[str]:
        return [name for name, device in self.device_map.items() if device == "cpu"]

    @property
    def dispatches(self) -> bool:
        """Whether the code loads on the CPU and dispatches then.

        Only then are offloaded layers in 4 bits.  And a checkpoint in 4 or 8 bits cannot be loaded
        with a device map that has the CPU beside GPUs, unless its own config allows that.
        """
        layers = any(parts.part_of(name) == parts.LAYERS for name in self.offloaded)
        return bool(self.offloaded) if self.quant is None else self.quant == "nf4" and layers

    def options(self) -> dict[str, Any]:
        """The arguments of the quantization config; empty without one."""
        if self.quant == COMPRESSED:
            return {"dequantize": True}
        if self.quant in (None, "bf16"):
            return {}
        options = bnb_options(self.quant, offload=bool(self.offloaded) and not self.dispatches)
        if self.quant == "nf4":
            options["bnb_4bit_compute_dtype"] = self.compute
        if self.dispatches:
            packed = (parts.LAYERS, parts.PLE)
            others = [name for name in self.offloaded if parts.part_of(name) not in packed]
            options["llm_int8_skip_modules"] = ["lm_head", *others]
        return options

    def lines(self) -> Iterable[str]:
        options = self.options()
        trains = self.train and self.adapter_dir is None
        yield "import gemma4_compat"
        yield "import torch"
        if self.dispatches:
            yield "from accelerate import dispatch_model"
        if trains:
            yield "from peft import LoraConfig, get_peft_model"
        elif self.adapter_dir is not None:
            yield "from peft import PeftModel"
        config = "CompressedTensorsConfig" if self.quant == COMPRESSED else "BitsAndBytesConfig"
        names = f"{config}, {self.architecture}" if options else self.architecture
        yield f"from transformers import {names}"
        yield ""
        yield "# faster, but rounds differently or runs a step ahead:"
        yield '# gemma4_compat.install("fast")'
        yield "device_map = {"
        for name, to in self.device_map.items():
            yield f'    "{name}": {_quoted(to)},'
        yield "}"
        if options:
            yield f"quantization = {config}("
            yield from (f"    {key}={_quoted(value)}," for key, value in options.items())
            yield ")"
        quantizes = self.dispatches and self.quant is not None
        if quantizes:
            yield "# A device_map for from_pretrained leaves layers on the CPU unquantized."
            yield "with gemma4_compat.quantize_on(0):"
        indent = "    " * quantizes
        yield f"{indent}model = {self.architecture}.from_pretrained("
        yield f"{indent}    {_pretrained(self.model)},"
        yield f"{indent}    dtype=torch.bfloat16,"
        where = '{"": "cpu"}' if self.dispatches else "device_map"
        yield f"{indent}    device_map={where},"
        if options:
            yield f"{indent}    quantization_config=quantization,"
        yield f"{indent})"
        if self.dispatches:
            yield "skip_keys = model._skip_keys_device_placement"
            yield "model = dispatch_model(model, device_map, skip_keys=skip_keys)"
        if self.adapter_dir is not None:
            trainable = ", is_trainable=True" if self.train else ""
            folder = _pretrained(self.adapter_dir)
            yield f"model = PeftModel.from_pretrained(model, {folder}{trainable})"
        elif trains:
            yield "config = LoraConfig("
            yield f"    r={self.rank},"
            yield f'    target_modules=r"{TARGETS}",'
            yield f'    exclude_modules=r"{EXCLUDED}",'
            yield '    task_type="CAUSAL_LM",'
            yield ")"
            yield "model = get_peft_model(model, config)"
        if self.train:
            yield f'model.{checkpointing()}({{"use_reentrant": False}})'
            yield "model.enable_input_require_grads()"
            if self.compute != "bfloat16":
                yield "# Train with fp16=False and bf16=False: products in float16 overflow."
        else:
            yield f"# model.{GENERATE}"


def _pretrained(location: str) -> str:
    name, revision = hub.id_and_revision(location)
    return _quoted(name) if revision is None else f"{_quoted(name)}, revision={_quoted(revision)}"


def _quoted(value: Any) -> str:
    # A JSON string is a Python string too, with double quotes as in the code around it.
    if isinstance(value, (str, list)):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
