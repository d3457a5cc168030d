"""Types of arguments, which check their text before a library is imported.

A Hub id needs huggingface_hub, and nothing else.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from ..errors import InputError
from ..model.files import ADAPTER_CONFIG, located, read_config, with_repository
from ..model.hub import Repository
from ._terminal import waiting

T = TypeVar("T")
MODEL_HELP = "a folder with config.json, or a Hub id such as google/gemma-4-E4B-it"


def argument(convert: Callable[[str], T]) -> Callable[[str], T]:
    """A ``type`` for argparse that prints the message of an `InputError`."""

    def converted(text: str) -> T:
        try:
            return convert(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def model_location(text: str) -> str | Repository:
    """Check for a folder or Hub id with a readable ``config.json``.

    A Hub id is returned as the repository, which has the file's commit.
    """
    folder = located(text)
    with _asking(folder):
        read_config(folder)
    return folder if isinstance(folder, Repository) else text


def adapter_location(text: str) -> str | Repository:
    """Check for an existing file or folder, or a Hub id with an ``adapter_config.json``."""
    found = with_repository(text)
    if isinstance(found, Repository):
        with _asking(found):
            file = found.file(ADAPTER_CONFIG)
        if file is None:
            raise InputError(f"{text}: no {ADAPTER_CONFIG} (is it a model?)")
    elif not os.path.exists(text):
        raise InputError(f"{text}: no such file or folder")
    return found


def _asking(location: object) -> AbstractContextManager[None]:
    is_remote = isinstance(location, Repository)
    return waiting(f"gemma4-compat: asking the Hub for {location} ..." if is_remote else "")


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
    """Add the argument ``MODEL``."""
    parser.add_argument(
        "model_dir",
        metavar="MODEL",
        type=argument(model_location),
        help=MODEL_HELP,
    )


def add_map(parser: argparse.ArgumentParser, *, required: bool, help: str) -> None:
    """Add the argument ``--map``, a list of entries; it may be given several times."""
    parser.add_argument(
        "--map",
        required=required,
        metavar="MAP",
        dest="device_map",
        type=argument(_device_map),
        action="extend",
        help=help,
    )


MAP_HELP = """\
--map takes KEY=DEVICE pairs, JSON or a Python dict, or the name of a file that
contains one of them (- reads stdin).  It may be given several times:

  --map "model.vision_tower=cpu,=0"
  --map model.vision_tower=cpu --map "=0"
  --map '{"model.vision_tower": "cpu", "": 0}'
  --map my-map.json

An empty KEY is the rest of the model.  JSON cannot be typed like this in a
shell of Windows; the other forms can.
"""


def _device_map(text: str) -> list[tuple[str, int | str]]:
    from ..model.device_maps import read_map

    return list(read_map(text).items())
