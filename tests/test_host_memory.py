"""How much memory may be page-locked."""

from __future__ import annotations

import psutil
import pytest

import gemma4_compat
from gemma4_compat.machine import host_memory
from gemma4_compat.machine.host_memory import page_locked_limit
from gemma4_compat.runtime.host import page_locked


@pytest.fixture(autouse=True)
def default_limit():
    yield
    gemma4_compat.limit_page_locked(None)


def test_half_of_the_machine(monkeypatch, tmp_path):
    total = psutil.virtual_memory().total
    monkeypatch.setattr(host_memory, "_CONTAINER", tmp_path / "memory.max")
    assert page_locked_limit() == total // 2
    (tmp_path / "memory.max").write_text("max\n")
    assert page_locked_limit() == total // 2


def test_half_of_the_container(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "_CONTAINER", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    assert page_locked_limit() == 2**27


def test_a_limit_of_the_users():
    gemma4_compat.limit_page_locked(2**20)
    assert page_locked_limit() == 2**20
    gemma4_compat.limit_page_locked(0)
    assert page_locked_limit() == 0
    with pytest.raises(ValueError, match="0 or more, not -1"):
        gemma4_compat.limit_page_locked(-1)
    assert page_locked_limit() == 0


def test_what_is_page_locked_is_counted():
    before, locks = page_locked.locked(), [page_locked._Lock(None) for _ in range(2)]
    gemma4_compat.limit_page_locked(before + 100)
    assert page_locked._take(locks[0], 60)
    assert not page_locked._take(locks[1], 60)
    assert page_locked._take(locks[1], 40)
    for lock in locks:
        lock.undo()
    assert page_locked.locked() == before
