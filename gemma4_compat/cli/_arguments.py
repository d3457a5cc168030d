"""Types of arguments, which check their text before any library is imported."""

from __future__ import annotations

import os

from ..errors import InputError
from ..model.files import existing_folder, read_config


def model_folder(text: str) -> str:
    """Check for a folder with a readable ``config.json``."""
    existing_folder(text)
    read_config(text)
    return text


def existing_path(text: str) -> str:
    """Check for an existing file or folder."""
    if not os.path.exists(text):
        raise InputError(f"{text}: no such file or folder")
    return text


def at_least_one(text: str) -> int:
    """A whole number of 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise InputError(f"{text!r} is not a whole number of 1 or more")
    return number
