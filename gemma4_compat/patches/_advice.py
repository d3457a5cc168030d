"""Adds what to do next to an error of a library."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def advise(error: BaseException, advice: str) -> None:
    """Print ``advice`` after the error: as the traceback's last line, from Python 3.11."""
    if hasattr(error, "add_note"):
        error.add_note(f"gemma4-compat: {advice}")
    else:
        logger.warning("%s", advice)
