"""A model under a device map: the device and the size of each tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from ..files.checkpoint import Location, located, read_config
from ..model.device_maps import OFFLOADED, covering, device_label, device_order
from ..model.meta import COMPRESSED, QAT, QUANTS, bnb_config, checkpoint_model, meta_model
from ..model.parts import is_under
from ..model.sizes import TensorSize, tensor_sizes

#: A BitsAndBytesConfig needs it for a map that names the CPU and a GPU: else transformers raises.
OFFLOAD_FLAG = "llm_int8_enable_fp32_cpu_offload"
Sizes = dict[str, dict[str, int]]


class Mapped:
    """A model under a device map: what each entry places, and the device of every tensor.

    Raises:
        InputError: the folder or repository does not exist, its ``config.json`` is missing or
            damaged, or transformers does not know the model.
    """

    def __init__(self, model_dir: Location, given: Mapping[str, int | str]) -> None:
        folder = located(model_dir)
        #: the ``quantization_config`` of a checkpoint that is quantized already
        self.quantization: Any = read_config(folder).get("quantization_config")
        self.map = given
        # The sizes of quantized layers need bitsandbytes itself.
        has_bnb = find_spec("bitsandbytes") and find_spec("accelerate")
        self.quants = QUANTS if has_bnb else ("bf16",)
        self.method = (self.quantization or {}).get("quant_method")
        if self.method in (QAT, COMPRESSED):  # one size only
            self.quants = ("QAT" if self.method == QAT else "bf16",)
        devices = set(given.values())
        gpus = [device for device in given.values() if device not in OFFLOADED]
        #: the execution device of offloaded modules; their buffers stay on it
        self.main: int | str = min(gpus, key=device_order) if gpus else "cpu"
        self.offloads = {"cpu", "disk"} & devices if gpus else {"disk"} & devices
        #: transformers refuses a quantized model on such a map without the offload flag
        self.splits = bool({"cpu", "disk"} & devices) and devices != {"cpu"}
        self.tensors: dict[str, tuple[TensorSize, ...]] = {}
        self.whole: dict[str, tuple[TensorSize, ...]] = {}
        #: by quantization: linear layers that are not quantized because of the map
        self.kept: dict[str, list[str]] = {}
        self.model = checkpoint_model(folder)[0] if self.method == QAT else meta_model(folder)
        self._measure(folder)
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        #: names of parameters: the tied one to the one that it is tied to
        self.tied: dict[str, str] = dict(getattr(self.model, "all_tied_weights_keys", None) or {})

    def _measure(self, folder: Location) -> None:
        # When it quantizes, transformers treats the names as regular expressions.
        patterns = {}
        for key, device in self.map.items():
            with suppress(re.error):
                patterns[re.compile(key).pattern] = device
        for quant in self.quants:
            by_bnb = quant in ("nf4", "int8")
            model = meta_model(folder, bnb_config(quant)) if by_bnb else self.model
            self.whole[quant] = self.tensors[quant] = tensor_sizes(model)
            if self.splits and by_bnb:
                placed = meta_model(folder, bnb_config(quant, offload=True), patterns)
                self.tensors[quant] = tensor_sizes(placed)
                self.kept[quant] = sorted(_quantized(model) - _quantized(placed))

    # -- names and devices

    def entry(self, name: str) -> str | None:
        """The entry that places a module or tensor: the longest one that covers it."""
        return covering(name, self.map)

    def rests_on(self, name: str) -> int | str:
        entry = self.entry(name)
        return "cpu" if entry is None else self.map[entry]

    def computes_on(self, name: str) -> int | str:
        device = self.rests_on(name)
        return self.main if device in self.offloads else device

    def is_offloaded(self, name: str) -> bool:
        return self.entry(name) is not None and self.rests_on(name) in self.offloads

    def holds(self, tensor: TensorSize) -> int | str:
        """The device of a tensor after loading; accelerate does not offload buffers.

        Tied weights are one tensor, which is on a GPU if one of its names is.
        """
        if tensor.buffer:
            return self.computes_on(tensor.name)
        names = [tensor.name, *(t for t, source in self.tied.items() if source == tensor.name)]
        resident = [name for name in names if not self.is_offloaded(name)]
        return self.rests_on((resident or names)[0])

    def unknown(self) -> list[str]:
        """The entries that name no module, parameter or buffer."""
        tensors = (self.model.named_parameters, self.model.named_buffers)
        names = {name for each in tensors for name, _ in each(remove_duplicate=False)}
        return [key for key in self.map if key not in self.modules and key not in names]

    def uncovered(self) -> list[str]:
        """The outermost modules without any covered tensor, and single uncovered tensors."""
        names = [tensor.name for tensor in self.whole[self.quants[-1]]]
        bare = [name for name in names if self.entry(name) is None]
        covered = [name for name in names if self.entry(name) is not None]
        seen: list[str] = []
        for name in [*self.modules, *bare] if bare else ():
            holds = any(is_under(each, [name]) for each in bare) and not is_under(name, seen)
            if name and holds and not any(is_under(each, [name]) for each in covered):
                seen.append(name)
        return seen

    # -- bytes, by quantization

    def entries(self) -> Sizes:
        return {
            key: {
                quant: sum(t.bytes for t in tensors if self.entry(t.name) == key)
                for quant, tensors in self.tensors.items()
            }
            for key in self.map
        }

    def devices(self) -> Sizes:
        totals: Sizes = {}
        for quant, tensors in self.tensors.items():
            for tensor in tensors:
                device = self.holds(tensor)
                by_quant = totals.setdefault(device_label(device), dict.fromkeys(self.quants, 0))
                by_quant[quant] += tensor.bytes if device in OFFLOADED else tensor.on_cuda
        return {device: totals[device] for device in sorted(totals, key=device_order)}

    def saves(self) -> dict[str, int]:
        """The saving against the same map with the main device in place of "cpu" and "disk"."""
        if self.main == "cpu":
            return dict.fromkeys(self.quants, 0)
        offloaded = [*map(device_label, OFFLOADED)]
        gpus = [sizes for label, sizes in self.devices().items() if label not in offloaded]
        whole = {quant: sum(t.on_cuda for t in self.whole[quant]) for quant in self.quants}
        return {quant: whole[quant] - sum(sizes[quant] for sizes in gpus) for quant in whole}


def _quantized(model: Any) -> set[str]:
    kinds = ("Linear4bit", "Linear8bitLt")
    return {name for name, module in model.named_modules() if type(module).__name__ in kinds}
