"""Locks that also the child process of a fork can take.

A fork copies a lock that another thread holds, but not that thread, so nobody gives it back.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[ForkableLock] = weakref.WeakSet()


class ForkableLock:
    """Has an ``RLock`` as its attribute ``now``; use that in a ``with`` statement."""

    def __init__(self) -> None:
        self.now: Any = threading.RLock()
        _locks.add(self)


def _renew() -> None:
    for lock in list(_locks):
        if not lock.now._is_owned():
            lock.now = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
