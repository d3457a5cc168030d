"""Layers on the disk are read tensor by tensor, each at the moment that it is needed.

accelerate maps the file of a tensor into memory when the module with the tensor is about to run.
The system then reads the file in small pieces, each when the copy to the execution device reaches
it.  The disk has one or two such requests at a time, and is idle while the model computes.

The fix reads a layer and the one after it into the page cache when the first module of the layer is
about to run.  Several threads read, in the order of the files.  accelerate then loads the same
tensors from the same files as before, and finds them in memory.  ``sendfile`` to ``/dev/null``
reads a file into the page cache without a copy of the bytes.  ``posix_fadvise`` is not suitable: it
fills the cache with single pages, and later copies of them are slower.  Bytes that are in the cache
are not read again; ``mincore`` shows which these are.  For files that the user neither owns nor may
write it calls every page cached, so nothing is read ahead from them.  After the last layer comes
the first one, because the next decode step begins with it.  If the system removes several layers
from the page cache before they run, the cache is too small, and reading ahead ends.

An error is logged once.  accelerate raises its own when it cannot load a tensor.
"""

from __future__ import annotations

import sys

from ...engine import Finding, Kind, Patch, fixed, fixed_if
from ...runtime.host.read_ahead import Ahead
from .._code import code_at
from ._dispatched import use

PATCH = Patch(
    name="disk_read_ahead",
    kind=Kind.EXACT,
    symptom="layers on the disk are read while the model waits, slower than the disk could",
    affects=("transformers", "accelerate"),
    changes=(
        "When a layer of Gemma 4 or 3n on the disk is about to run, its hook reads that layer and "
        "the next one into the page cache, in other threads."
    ),
    note="Linux only: the system calls do not exist elsewhere.",
    unreported="Only slow, not wrong; no report is known upstream.",
)


@PATCH.probe
def tensors_are_read_when_needed() -> Finding:
    """Look whether the hook still loads the tensors one by one."""
    if not sys.platform.startswith("linux"):
        return fixed("this system is not Linux")
    code = code_at("accelerate.hooks", "AlignDevicesHook.pre_forward")
    one_by_one = "set_module_tensor_to_device" in code.co_names
    return fixed_if(not one_by_one, "AlignDevicesHook no longer loads the tensors one by one")


use(PATCH, Ahead())
