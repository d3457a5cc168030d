"""The GPUs to plan for: those of this machine, a size, or the name of a card."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import InputError, suggestion
from ..machine.torch_build import cpu_only
from ..results.text import size

_GIB = 2**30
#: The least number that can be a GPU's memory in bytes; a smaller one was meant in GiB.
_FEWEST_BYTES = 2**27
#: the first compute capability with bfloat16
_BFLOAT16 = 8
#: The cards by the memory that CUDA reports on Linux, in GiB.  It is less than what the box says:
#: the driver, and error correction, take a part.  Windows reports up to 0.4 GiB more.
_CARDS: Mapping[float, str] = {
    2.9: "GTX 1060",
    3.8: "GTX 1650",
    5.8: "GTX 1060, GTX 1660, GTX 1660 Ti, GTX 1660 Super, RTX 2060, RTX 3050",
    7.7: "GTX 1070, GTX 1080, RTX 2060 Super, RTX 2070, RTX 2070 Super, RTX 2080, RTX 2080 Super, "
    "RTX 3050, RTX 3060, RTX 3060 Ti, RTX 3070, RTX 3070 Ti, RTX 4060, RTX 4060 Ti, RTX 5060, "
    "RTX 5060 Ti",
    9.7: "RTX 3080",
    10.7: "GTX 1080 Ti, RTX 2080 Ti",
    11.6: "RTX 2060, RTX 3060, RTX 3080, RTX 3080 Ti, RTX 4070, RTX 4070 Super, RTX 4070 Ti, "
    "RTX 5070",
    14.7: "T4",
    15.6: "RTX 4060 Ti, RTX 4070 Ti Super, RTX 4080, RTX 4080 Super, RTX 5060 Ti, RTX 5070 Ti, "
    "RTX 5080, P100, V100",
    22.4: "L4, A10, A10G",
    23.6: "RTX 3090, RTX 3090 Ti, RTX 4090",
    31.3: "RTX 5090, V100",
    39.4: "A100",
    44.4: "A40, L40, L40S",
    79.1: "A100, H100",
    139.8: "H200",
}
_WITHOUT_BFLOAT16 = ("GTX", "RTX 20", "P100", "V100", "T4")


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    ``free`` is the memory in bytes that the model may use.  ``bfloat16`` tells whether the GPU
    computes in bfloat16 natively.  ``here`` tells GPUs of this machine from others.
    """

    name: str
    free: int
    bfloat16: bool = True
    here: bool = False

    @property
    def outside(self) -> int:
        """The bytes of the CUDA context and its libraries, which PyTorch does not count.

        They grow with the number of processors.  On an H200 they take 770 to 840 MiB.
        """
        return 2**30 if self.free > 40 * _GIB else 2**29


def parse_size(text: str | int) -> int:
    """Bytes of "12GiB", "12 GB" (decimal), "12288MiB" or "12", which are GiB; a number is bytes.

    Raises:
        InputError: the text is not a size.

    Example:
        >>> parse_size("12GiB")
        12884901888
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise InputError(f"{text!r} is not a size: write 12GiB, 12GB or 12288MiB")
    unit, binary = match[2] or "G", match[3] or not match[2]
    power = 1 + "KMGT".index(unit.upper())
    nbytes = int(float(match[1]) * (1024 if binary else 1000) ** power)
    if nbytes > 1024 * _GIB and not match[2]:
        raise InputError(f"{text!r} would be GiB: write {text.strip()}MiB")
    return nbytes


def parse_gpu(text: str | int) -> Gpu:
    """A GPU from its size, or from the name of a card; a number is bytes.

    Raises:
        InputError: the text is neither, or cards of this name have different sizes.

    Example:
        >>> round(parse_gpu("RTX 4090").free / 2**30, 1)
        23.6
    """
    if isinstance(text, int):
        if text < _FEWEST_BYTES:
            raise InputError(f'a GPU of {text} bytes is too small: for GiB, write "{text}GiB"')
        return Gpu(size(text), text)
    if re.match(r"\s*\d", text):
        return Gpu(text.strip(), parse_size(text))
    names = {_bare_name(name): name for cards in _CARDS.values() for name in cards.split(", ")}
    name = names.get(_bare_name(text))
    if name is None:
        if "laptop" in _bare_name(text):
            raise InputError(f"{text!r}: laptop cards have less memory: write 8GiB, for example")
        hint = suggestion(_bare_name(text), names)
        raise InputError(f"{text!r} is neither a size nor a known card{hint}: write 12GiB or 12GB")
    sizes = [gib for gib, cards in _CARDS.items() if name in cards.split(", ")]
    if len(sizes) > 1:
        choice = " or ".join(f"{each:g}GiB" for each in sizes)
        raise InputError(f"there are cards {name} with different memory: write {choice}")
    return Gpu(name, int(sizes[0] * _GIB), not name.startswith(_WITHOUT_BFLOAT16))


def _bare_name(name: str) -> str:
    """A card's name without its maker, spaces and case: "rtx3060ti"."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def gpus_of(gpu: int | str | Gpu | Iterable[int | str | Gpu] | None) -> tuple[Gpu, ...]:
    """The GPUs that the argument of `plan` means; ``None`` means those of this machine.

    Raises:
        InputError: the argument is invalid, or this machine has no GPU that PyTorch can use.
    """
    if gpu is None:
        return installed_gpus()
    several = (gpu,) if isinstance(gpu, (int, str, Gpu)) else tuple(gpu)
    if not several:
        raise InputError("name at least one GPU")
    return tuple(each if isinstance(each, Gpu) else parse_gpu(each) for each in several)


def installed_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine that PyTorch sees, with the memory that is free now.

    Raises:
        InputError: PyTorch sees no GPU; the message says why, and what to do.
    """
    import torch

    if not torch.cuda.is_available():
        why = cpu_only() or "PyTorch sees no GPU; nvidia-smi shows whether the driver sees one"
        raise InputError(f"{why}. To plan for another machine, name its GPU: --gpu 12GiB")
    free = _free_by_driver()
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        left = free.get(str(getattr(properties, "uuid", "")))
        if left is None:  # creates a CUDA context, whose memory does not count as free
            left = torch.cuda.mem_get_info(index)[0]
        bfloat16 = torch.version.hip is not None or properties.major >= _BFLOAT16
        gpus.append(Gpu(properties.name, min(left, properties.total_memory), bfloat16, here=True))
    return tuple(gpus)


def _free_by_driver() -> dict[str, int]:
    """The free memory of NVIDIA GPUs in bytes by UUID, or nothing without ``nvidia-smi``."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    found = re.findall(r"^GPU-(\S+), (\d+)$", printed.stdout, re.MULTILINE)
    return {uuid: int(mebibytes) * 2**20 for uuid, mebibytes in found}
