"""The cases, and the code that runs one of them in its own process.

``python -m benchmarks.cases NAME SHAPE CACHE`` prints a JSON line after each stage; the last line
holds all figures.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import measure
from .checkpoint import offloaded_layers

PLE = "model.language_model.embed_tokens_per_layer"
TOWERS = ("model.vision_tower", "model.audio_tower")
LAYERS = "decoder layers"


@dataclass(frozen=True)
class Case:
    """One device map, and what is timed with it.

    ``away`` names the offloaded modules, ``where`` their device.  ``LAYERS`` stands for 20 of 35
    decoder layers; in 4 bits they are dispatched after loading.  ``base``, ``adapter`` and
    ``prefill`` select what is timed.
    """

    title: str
    away: tuple[str, ...] = ()
    where: str = "cpu"
    four_bit: bool = True
    base: bool = True
    adapter: bool = False
    prefill: bool = False


CASES = {
    "gpu": Case("all on the GPU", adapter=True, prefill=True),
    "ple": Case("PLE on cpu", (PLE,), adapter=True, prefill=True),
    "ple_towers": Case("PLE, vision, audio on cpu", (PLE, *TOWERS), base=False, adapter=True),
    "layers_4bit": Case("20 of 35 layers on cpu, 4-bit", (LAYERS,)),
    "layers_bf16": Case("20 of 35 layers on cpu, bf16", (LAYERS,), four_bit=False),
    "ple_disk": Case("PLE on disk", (PLE,), where="disk"),
}

#: (name, patched): the most important first; the two sides of a ratio follow each other
ORDER = [
    ("gpu", False),
    ("ple", True),
    ("gpu", True),
    ("ple", False),
    ("layers_4bit", True),
    ("layers_bf16", False),
    ("ple_towers", True),
    ("layers_4bit", False),
    ("ple_towers", False),
    ("layers_bf16", True),
    ("ple_disk", True),
    ("ple_disk", False),
]


def load(
    case: Case,
    shape: str,
    folder: Path,
    quantization: Any = None,
    *,
    four_bit: bool | None = None,
) -> Any:
    """The model of a case, in eval mode; ``four_bit`` overrides the case's own setting."""
    import torch
    from accelerate import dispatch_model
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    cuda = torch.cuda.is_available()
    device = 0 if cuda else "cpu"
    if four_bit is None:
        four_bit = case.four_bit
    quantization = quantization or BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        # On a machine without a GPU this flag would leave all layers unquantized.
        llm_int8_enable_fp32_cpu_offload=cuda,
    )
    names = list(case.away)
    if LAYERS in names:
        names = [f"model.language_model.layers.{i}" for i in offloaded_layers(shape)]
    away = dict.fromkeys(names, case.where if cuda else "disk")
    # transformers would leave the layers that a device map offloads unquantized.
    by_dispatch = bool(away) and ((LAYERS in case.away and four_bit) or not cuda)
    scratch = folder / f"offload-{os.getpid()}"
    model = Gemma4ForConditionalGeneration.from_pretrained(
        folder / "model",
        dtype=torch.bfloat16,
        device_map={"": device} if by_dispatch else {**away, "": device},
        quantization_config=quantization if four_bit else None,
        offload_folder=str(scratch),
    )
    if by_dispatch:
        model = dispatch_model(
            model,
            {**away, "": device},
            main_device=device,
            offload_dir=str(scratch),
            skip_keys=model._skip_keys_device_placement,
        )
    return model.eval()


class Play:
    """One case: its ``figures``, the ``error`` that ended it, and ``notes`` on failed options."""

    def __init__(self, name: str, shape: str, folder: Path) -> None:
        self.case, self.shape, self.folder = CASES[name], shape, folder
        self.figures: dict[str, Any] = {}
        self.error: str | None = None
        self.notes: dict[str, str] = {}
        self.model: Any = None

    def stage(self, name: str, action: Callable[[], Any], *, optional: bool = False) -> None:
        """Run ``action`` unless an earlier stage failed; an optional stage may fail."""
        if self.error:
            return
        start = time.perf_counter()
        try:
            action()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            line = f"{name}: {type(error).__name__}: {lines[-1]}"
            if optional:
                self.notes[name] = line
            else:
                self.error = line
            traceback.print_exc()
        self.figures[f"seconds of {name}"] = round(time.perf_counter() - start, 2)
        line = {"figures": self.figures, "error": self.error, "notes": self.notes}
        print(json.dumps(line), flush=True)

    def play(self) -> None:
        case = self.case
        self.stage("import", self._import)
        self.stage("load", self._load)
        if case.base:
            self.stage("decode", lambda: self._decode("decode"))
            self.stage("copies", self._copies, optional=True)
        if case.prefill:
            self.stage("prefill", self._prefill, optional=True)
        if case.adapter:
            self.stage("adapter", self._adapter)
            self.stage("adapter decode", lambda: self._decode("adapter decode"))
            if case.base and os.environ.get("GEMMA4_COMPAT") != "0":
                self.stage("turns", self._turns, optional=True)

    def _import(self) -> None:
        import bitsandbytes  # noqa: F401
        import peft
        import torch
        import transformers.models.gemma4.modeling_gemma4  # noqa: F401

        import gemma4_compat

        status = gemma4_compat.status()
        self.figures["patches"] = [p.name for p in status if str(p.state) == "applied"]
        if torch.cuda.is_available():
            torch.cuda.init()
        # Run PEFT's lazy imports now: they must not count as time to load an adapter.
        small = torch.nn.Sequential(torch.nn.Linear(8, 8))
        peft.get_peft_model(small, peft.LoraConfig(target_modules=["0"]))

    def _load(self) -> None:
        measure.reset_peak()
        took = measure.seconds(self._load_model)
        self.text = measure.Text(self.model.config.get_text_config().vocab_size)
        self.figures |= {
            "load seconds": took,
            "load peak GiB": measure.peak(),
            "resident GiB": measure.resident(),
            "largest tensor GiB": measure.largest(self.model),
            "4-bit layers": sum(type(m).__name__ == "Linear4bit" for m in self.model.modules()),
        }

    def _load_model(self) -> None:
        self.model = load(self.case, self.shape, self.folder)

    def _decode(self, key: str) -> None:
        self.generate = measure.decoder(self.model, self.text)
        measure.reset_peak()
        self.figures[f"{key} tok/s"] = measure.decode(self.generate)
        self.figures[f"{key} peak GiB"] = measure.peak()

    def _copies(self) -> None:
        if max(self.figures["decode tok/s"]) > 1:
            self.figures["copies"] = measure.copies(self.generate)

    def _prefill(self) -> None:
        length = 64 if self.shape == "tiny" else 8192
        for batch in (1, 4):
            rate = measure.prefill(self.model, self.text, batch, length // batch)
            self.figures[f"prefill {batch} tok/s"] = rate

    def _attach(self) -> None:
        from peft import PeftModel

        self.model = PeftModel.from_pretrained(self.model, self.folder / "adapter").eval()

    def _adapter(self) -> None:
        (self.folder / "adapter" / "adapter_model.safetensors").read_bytes()  # into the page cache
        self.figures["adapter seconds"] = measure.seconds(self._attach)
        self.figures["adapter GiB"] = measure.resident()

    def _turns(self) -> None:
        """Ratios to the same model, all on the GPU without the patches, in this process."""
        import gemma4_compat

        other = Play("gpu", self.shape, self.folder) if self.case.away else self
        if other is not self:
            with gemma4_compat.disabled():
                other._load_model()
                other._attach()
        generate = measure.decoder(other.model, self.text)
        self.figures["turns with adapter"] = measure.turns(self.generate, generate)
        if other is self:
            return
        self.model, other.model = self.model.unload(), other.model.unload()
        both = [measure.decoder(play.model, self.text) for play in (self, other)]
        self.figures["turns"] = measure.turns(*both)
        ratios = []
        for _ in range(5):
            own = measure.seconds(self._attach)
            with gemma4_compat.disabled():
                ratios.append(own / measure.seconds(other._attach))
                other.model = other.model.unload()
            self.model = self.model.unload()
        self.figures["adapter turns"] = ratios[1:]


if __name__ == "__main__":
    Play(sys.argv[1], sys.argv[2], Path(sys.argv[3]) / sys.argv[2]).play()
