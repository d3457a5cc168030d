"""Types of arguments, which check their text before any library is imported."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TypeVar

from ..errors import InputError
from ..model.files import existing_folder, read_config

T = TypeVar("T")


def argument(convert: Callable[[str], T]) -> Callable[[str], T]:
    """A ``type`` for argparse that prints the message of an `InputError`."""

    def converted(text: str) -> T:
        try:
            return convert(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


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


def add_model_dir(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``MODEL_DIR``."""
    parser.add_argument(
        "model_dir",
        metavar="MODEL_DIR",
        type=argument(model_folder),
        help="a folder with config.json",
    )


def add_map(parser: argparse.ArgumentParser, *, required: bool, help: str) -> None:
    """Add the argument ``--map``."""
    parser.add_argument(
        "--map",
        required=required,
        metavar="JSON",
        dest="device_map",
        type=argument(_device_map),
        help=help,
    )


def _device_map(text: str) -> dict[str, int | str]:
    from ..model.device_maps import parse_map

    return parse_map(text)
