"""How much memory of the machine may be page-locked."""

from __future__ import annotations

from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup/memory.max")

_limit: int | None = None


def limit_page_locked(nbytes: int | None) -> None:
    """Allow so much page-locked host memory in this process; ``None`` is the default again.

    The GPU reads offloaded embeddings in place, and copies offloaded decoder layers by itself,
    where the host memory that they are in is page-locked.  The system cannot swap such memory out.
    By default it is half of the machine's memory at most.  What does not fit is brought to the GPU
    as accelerate does it, which is slower.  Memory that is page-locked already stays so.

    Args:
        nbytes: bytes; 0 page-locks nothing.

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
    """How many bytes may be page-locked."""
    return _machine_memory() // 2 if _limit is None else _limit


def _machine_memory() -> int:
    """Bytes of memory that this machine, or the container, has."""
    import psutil  # accelerate requires it

    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(_CONTAINER.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return total
