"""The limit on page-locked host memory."""

from __future__ import annotations

from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup/memory.max")

_limit: int | None = None


def limit_page_locked(nbytes: int | None) -> None:
    """Limit the page-locked host memory of this process; ``None`` restores the default.

    If offloaded weights are in page-locked memory, the GPU reads embeddings in place and copies
    decoder layers without the CPU.  The system cannot swap such memory out, so the default limit is
    half of the machine's memory.  accelerate onloads the weights beyond the limit, which is slower.
    Memory that is page-locked already stays so.

    Args:
        nbytes: the limit in bytes; with 0, no memory is page-locked.

    Raises:
        ValueError: ``nbytes`` is negative.

    Example:
        >>> gemma4_compat.limit_page_locked(8 * 2**30)
    """
    global _limit
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"nbytes must be 0 or more, not {nbytes}")
    _limit = nbytes


def page_locked_limit() -> int:
    """The number of bytes that may be page-locked."""
    return machine_memory() // 2 if _limit is None else _limit


def available_memory() -> int:
    """The memory in bytes that this machine has free, as the system estimates it."""
    import psutil  # accelerate requires it

    return min(int(psutil.virtual_memory().available), machine_memory())


def machine_memory() -> int:
    """The memory of this machine, or of its container if that has less, in bytes."""
    import psutil  # accelerate requires it

    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(_CONTAINER.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return total
