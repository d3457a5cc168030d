"""Compiles a CUDA kernel at run time, with the NVRTC library that PyTorch's CUDA builds include.

``torch.cuda._compile_kernel`` does the same, but is private and needs an installed CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

_INCLUDE = re.compile(r'#include "(.+)"')
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_EARLY = (ctypes.c_int * 18)(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CAN_CAPTURE_EARLY = 12030  # CUDA's version


class KernelError(RuntimeError):
    """A kernel cannot be compiled or launched on this machine."""


class Kernel(NamedTuple):
    """A compiled kernel on one GPU."""

    function: Any
    module: Any
    shared: int  # bytes of dynamic shared memory of a block, at most
    can_be_early: bool  # on this GPU, with this driver


def launcher(
    kernel: Kernel,
    passed: int,
    numbers: Sequence[Any],
    block: tuple[int, int],
    *,
    rows: int = 1,
    shared: int | None = None,
    early: bool = False,
) -> Callable[..., None]:
    """A function that launches a kernel with little work for the CPU.

    It gets the number of blocks, the handle of a stream, and the arguments that change.  It raises
    a ``KernelError`` if the driver refuses the launch.

    Args:
        kernel: The compiled kernel.  Its first parameters are pointers or 64-bit integers, or
            without ``numbers`` structs of them at the end.
        passed: How many of these there are.
        numbers: The other arguments, which stay: an ``int`` or ``float`` in 32 bits.
        block: Threads in x and y.
        rows: Rows of blocks.
        shared: Bytes of dynamic shared memory of a block, if fewer than the kernel's.
        early: Whether the kernel may begin before the one before it in the stream has ended
            (programmatic dependent launch), because it calls ``wait_for_previous``.
    """
    function, (x, y), pointer = kernel.function, block, ctypes.c_void_p
    shared = kernel.shared if shared is None else shared
    constants: list[Any] = [
        ctypes.c_float(each) if isinstance(each, float) else ctypes.c_int(each) for each in numbers
    ]
    free: list[Any] = []
    launch, pack = driver().cuLaunchKernelEx, struct.Struct(f"{passed}q").pack_into
    configure, attributes = struct.Struct("7IPPI").pack_into, ctypes.addressof(_EARLY)
    early = early and kernel.can_be_early

    def arguments() -> tuple[Any, Any, Any]:
        """Memory for the arguments that change, the addresses of all, and for a CUlaunchConfig."""
        values = (ctypes.c_int64 * passed)()
        places = [ctypes.addressof(values) + number * 8 for number in range(passed)]
        places += map(ctypes.addressof, constants)
        return values, (pointer * len(places))(*places), ctypes.create_string_buffer(56)

    def launched(blocks: int, stream: int, *changing: int) -> None:
        try:
            used = free.pop()  # no other launch uses it now
        except IndexError:
            used = arguments()
        values, places, config = used
        pack(values, 0, *changing)
        configure(config, 0, blocks, rows, 1, x, y, 1, shared, stream, attributes, early)
        result = launch(config, function, places, None)
        free.append(used)
        if result:
            _check(result)

    return launched


@lru_cache(maxsize=512)
def compiled(file: Path, name: str, device: Any, shared: int = 0, **constants: int) -> Kernel:
    """Compile a kernel for one GPU, once.

    Args:
        file: CUDA C++, with no headers but files in the same folder.
        name: An ``extern "C"`` function of the file.
        device: The GPU, a ``torch.device`` with an index.
        shared: Bytes of dynamic shared memory of a block, at most.
        **constants: Macros to define.

    Raises:
        KernelError: This machine cannot compile or load it.
        OSError: The file cannot be read.
    """
    import torch

    if torch.version.cuda is None:
        raise KernelError("this PyTorch is not built for CUDA")
    source = _INCLUDE.sub(lambda name: _text(file.with_name(name[1])), _text(file))
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=compute_{major}{minor}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in constants.items()]
    program = _ptx(source, options)
    cuda = driver()
    module, function, version = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # creates the CUDA context
        _check(cuda.cuModuleLoadData(ctypes.byref(module), program))
        _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        _check(cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared))
        _check(cuda.cuDriverGetVersion(ctypes.byref(version)))
    can_be_early = major >= 9 and version.value >= _CAN_CAPTURE_EARLY
    return Kernel(function, module, shared, can_be_early)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _ptx(source: str, options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None):
        raise KernelError("NVRTC cannot create a program")
    try:
        arguments = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        sizes, read = (
            (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            if failed
            else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        )
        sizes(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        read(program, text)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise KernelError(text.value.decode(errors="replace"))
    return text.value


def _check(result: int) -> None:
    if result != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(text))
        raise KernelError((text.value or b"unknown CUDA error").decode())


@cache
def _nvrtc() -> Any:
    """The NVRTC library of PyTorch's CUDA version."""
    import torch

    major = (torch.version.cuda or "0").partition(".")[0]
    if sys.platform == "win32":
        return _first(f"nvrtc64_{major}0_0.dll")
    # This library of PyTorch is linked to NVRTC and knows its folder.
    ours = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    return _first(str(ours), f"libnvrtc.so.{major}")


@cache
def driver() -> Any:
    """The library of the CUDA driver.

    Raises:
        KernelError: This machine has none.
    """
    return _first("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _first(*names: str) -> Any:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reason = error
    raise KernelError(str(reason))
