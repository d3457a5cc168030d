"""Decides whether a CUDA kernel of this package runs, in one way for all of them.

A kernel runs only if this machine compiles it, and if it computes on this GPU what the original
does: before its first use for inputs of a kind, both are compared (``trials.py``).  After a failure
the original computes inputs of that kind, as without the kernel, until the process ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ..memory import is_short_of_memory
from .compiler import KernelError
from .streams import is_capturing
from .watch import is_of_user

logger = logging.getLogger(__name__)

_UNKNOWN = object()
_launchers: list[Launcher] = []


class Launcher:
    """What launches one kernel, on each GPU and for inputs of each kind.

    Args:
        name: The kernel's.
        instead: Who computes what in its place, for a message.
        most: So many kinds are kept; beyond that, the oldest are dropped.

    Example::

        launch = LAUNCHER.compared(kind, device, make, *arguments)
        if launch is None:
            return original(inputs)
    """

    def __init__(self, name: str, instead: str, most: int = 512) -> None:
        self.name, self.instead, self.most = name, instead, most
        self.kinds: dict[Any, Any] = {}  # None: the original computes this kind
        self.told: dict[str, str] = {}  # by GPU
        self._checked: dict[Any, Any] = {}
        _launchers.append(self)

    def get(self, kind: Any, device: Any, make: Callable[..., Any], *arguments: Any) -> Any:
        """What launches the kernel for inputs of a kind; ``None`` if the original computes them.

        ``make`` returns it at the first call.  It returns ``None`` if the kernel is not meant for
        this kind, and raises an error if the kernel fails.
        """
        value = self.kinds.get(kind, _UNKNOWN)
        if value is _UNKNOWN:
            try:
                value = make(*arguments)
            except Exception as error:
                return self.failed(kind, device, error)
            keep(self.kinds, kind, value, self.most)
        return value

    def compared(self, kind: Any, device: Any, make: Callable[..., Any], *arguments: Any) -> Any:
        """The same for what ``make`` compares with the original, see ``checked``."""
        value = self.kinds.get(kind)  # None: get knows whether it is unknown
        if value is None:
            value = self.get(kind, device, self.checked, kind, device, make, *arguments)
        return value

    def checked(self, key: Any, device: Any, make: Callable[..., Any], *arguments: Any) -> Any:
        """What ``make`` returns, which compiles the kernel and compares it; called once for a key.

        Raises:
            KernelError: The kernel failed, now or before; or it may not be compared now, because a
                stream is captured.
        """
        import torch

        made = self._checked.get(key, _UNKNOWN)
        if made is _UNKNOWN:
            if is_capturing(device):
                raise KernelError("a stream is captured")
            at = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
            try:
                with at, torch.no_grad(), torch.autocast(device.type, enabled=False):
                    made = make(*arguments)
            except Exception as error:
                if is_of_user(error) or _may_pass(error):
                    raise
                logger.debug("%s fails on %s", self.name, device, exc_info=True)
                made = KernelError(_text(error))
            keep(self._checked, key, made, self.most)
        if isinstance(made, KernelError):
            raise KernelError(str(made))
        return made

    def failed(self, kind: Any, device: Any, error: Exception, key: Any = _UNKNOWN) -> Any:
        """Let the original compute inputs of a kind, and say so, unless the reason may pass.

        ``key`` is one of ``checked``, if its kernel is not launched for other kinds either.

        Raises:
            Exception: ``error`` itself, if it comes from the user's code.
        """
        if is_of_user(error):
            raise error
        if _may_pass(error):
            return logger.debug("%s is not launched", self.name, exc_info=error)
        keep(self.kinds, kind, None, self.most)
        if key is not _UNKNOWN:
            keep(self._checked, key, KernelError(_text(error)), self.most)
        line = (
            f"on {device}, {self.instead}, not the kernel {self.name}, for inputs of one kind or "
            f"more: {_text(error)}.  Results are right; they take longer."
        )
        if self.told.setdefault(str(device), line) is line:
            logger.info("%s", line, exc_info=error if logger.isEnabledFor(logging.DEBUG) else None)


def without() -> list[str]:
    """A line for each kernel and GPU that does without it, for inputs of one kind or more.

    Example::

        on cuda:0, bitsandbytes multiplies with weights in 4 bits, not the kernel one_row_4bit, ...
    """
    return [line for launcher in _launchers for line in list(launcher.told.values())]


def reset(compiled: bool = True) -> None:
    """Forget what was compared and told, and what was ``compiled``, as in a new process."""
    from . import compiler

    for launcher in _launchers:
        for table in (launcher.kinds, launcher.told, launcher._checked):
            table.clear()
    if compiled:
        compiler.compiled.cache_clear()


def keep(table: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Add an entry; beyond ``most``, drop the oldest ones, an eighth at a time."""
    table[key] = value
    if len(table) > most:
        for old in list(table)[: len(table) - most + most // 8]:
            table.pop(old, None)  # other threads drop some, too


def _may_pass(error: BaseException) -> bool:
    # The driver has no context in a thread that has not used the GPU yet.
    return is_short_of_memory(error) or any(w in str(error) for w in ("captur", "device context"))


def _text(error: Exception) -> str:
    """The first line of an error, with its class if that is not one of this package."""
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return text if isinstance(error, KernelError) else f"{type(error).__name__}: {text}"
