"""Writes a checkpoint that appears complete or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError, MergeError, reason
from ..model.files import GENERATION_CONFIG, exists, read_json
from .arguments import TOKENIZER_CONFIG, check_out, companions

_TEMPLATE = "chat_template.jinja"


@contextlib.contextmanager
def appearing(out: Path, force: bool, progress: Callable[[str], None]) -> Iterator[Path]:
    """A temporary folder, renamed to ``out`` if the block succeeds, else removed.

    Raises:
        InputError: ``out`` is not valid, or its parent folder cannot be written to.
        MergeError: the temporary folder cannot be renamed to ``out``.
    """
    _clean_up(out, progress)
    check_out(out, force)
    token = secrets.token_hex(4)
    partial = out.with_name(f".{out.name}.{token}.partial")
    try:
        try:
            partial.mkdir()
        except (OSError, ValueError) as error:
            raise InputError(f"{out.parent}: cannot be written to: {reason(error)}") from error
        with _locked(partial):
            yield partial
            try:
                check_out(out, force)
                _replace(out, partial, out.with_name(f".{out.name}.{token}.replaced"))
            except (InputError, OSError) as error:
                raise MergeError(f"{out}: cannot be replaced or created: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(out: Path, partial: Path, replaced: Path) -> None:
    try:
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
    except BaseException:
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


# -- after a killed merge -----------------------------------------------------------------------


def _clean_up(out: Path, progress: Callable[[str], None]) -> None:
    """Remove the temporary folders of earlier merges into ``out`` that were killed.

    A running merge locks its folder, which therefore stays.  On file systems without locks all
    folders stay; they do no harm.
    """
    name = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.(partial|replaced)")
    with contextlib.suppress(OSError):
        left = [path for path in sorted(out.parent.iterdir()) if name.fullmatch(path.name)]
        for path in (path for path in left if path.is_dir() and not path.is_symlink()):
            if not _is_abandoned(path.with_suffix(".partial")):
                progress(f"leaving {path}: another merge writes to it, or was killed")
            elif path.suffix == ".replaced" and not out.exists():
                progress(f"restoring {out}, which a killed merge had moved to {path.name}")
                path.rename(out)
            else:
                progress(f"removing {path}, which a killed merge left")
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder.  If the process dies, the system releases the lock."""
    opened = _lock(folder)
    try:
        yield
    finally:
        if opened is not None:
            os.close(opened)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock; ``None`` if another one does, or locks do not work."""
    try:
        import fcntl

        opened = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        return None
    return opened


def _is_abandoned(folder: Path) -> bool:
    if not folder.exists():
        return True
    opened = _lock(folder)
    if opened is None:
        return False
    os.close(opened)
    return True


@contextlib.contextmanager
def exits_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise ``SystemExit``, so that partly written files are removed.

    This works only in the main thread, and only if the program has no handlers of its own.
    """
    ours: list[Any] = []
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]
        ours = [n for n in numbers if n is not None and signal.getsignal(n) is signal.SIG_DFL]

    def leave(number: int, frame: Any) -> None:
        for each in ours:  # a second signal must not interrupt the removal
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    try:
        for number in ours:
            signal.signal(number, leave)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


# -- files beside the weights -------------------------------------------------------------------


def copy_companions(base: Path, adapter: Path, out: Path) -> None:
    """Copy tokenizer, processor and chat template of the base, then those of the adapter."""
    if exists(base / GENERATION_CONFIG):
        shutil.copyfile(base / GENERATION_CONFIG, out / GENERATION_CONFIG)
    for folder in (base, adapter):
        for source in companions(folder):
            if source.is_dir():
                shutil.rmtree(out / source.name, ignore_errors=True)
                shutil.copytree(source, out / source.name)
            else:
                shutil.copyfile(source, out / source.name)
    # The base's file would override a template in the adapter's tokenizer_config.json.
    settings = adapter / TOKENIZER_CONFIG
    if exists(settings) and not exists(adapter / _TEMPLATE):
        if read_json(settings).get("chat_template"):
            (out / _TEMPLATE).unlink(missing_ok=True)
