"""The installed versions of torch and the patched libraries, and importing them silently."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import os
import warnings
from collections.abc import Iterator

from ..engine.gate import installed_version
from ..versions import WITH_TORCH


def library_versions() -> dict[str, str | None]:
    """The installed versions of torch and the patched libraries; ``None`` if not installed."""
    versions: dict[str, str | None] = {}
    for name in WITH_TORCH:
        try:
            versions[name] = installed_version(name) or "unknown version"
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide the output and warnings of the libraries, but not our own log messages."""
    handler = logging.StreamHandler()
    handler.addFilter(logging.Filter(__package__.partition(".")[0]))
    root = logging.getLogger()
    root.addHandler(handler)
    # transformers reads its verbosity once, on import, and has a handler of its own.
    verbosity = os.environ.get("TRANSFORMERS_VERBOSITY")
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(handler)
        if verbosity is None:
            del os.environ["TRANSFORMERS_VERBOSITY"]
        else:
            os.environ["TRANSFORMERS_VERBOSITY"] = verbosity
