"""Arguments of several commands; their text is checked before a library is imported.

A Hub id needs huggingface_hub, and nothing else.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TypeVar

from ..errors import InputError
from ..files.checkpoint import ADAPTER_CONFIG, located, read_config, with_repository
from ..files.hub import Repository
from ..model.device_maps import read_map

T = TypeVar("T")


def argument(convert: Callable[[str], T]) -> Callable[[str], T]:
    """A ``type`` for argparse that prints the message of an `InputError`."""

    def converted(text: str) -> T:
        try:
            return convert(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


@argument
def model_location(text: str) -> str | Repository:
    """A folder or Hub id with a readable ``config.json``.

    A Hub id becomes the repository, which has the file's commit.
    """
    folder = located(text)
    read_config(folder)
    return folder if isinstance(folder, Repository) else text


@argument
def adapter_location(text: str) -> str | Repository:
    """An existing file or folder, or a Hub id with an ``adapter_config.json``."""
    found = with_repository(text)
    if isinstance(found, Repository):
        if found.file(ADAPTER_CONFIG) is None:
            raise InputError(f"{text}: no {ADAPTER_CONFIG} (is it a model?)")
    elif not os.path.exists(text):
        raise InputError(f"{text}: no such file or folder")
    return found


@argument
def at_least_one(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise InputError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


@argument
def map_entries(text: str) -> list[tuple[str, int | str]]:
    return list(read_map(text).items())


def add_model(parser: argparse.ArgumentParser, name: str = "model_dir") -> None:
    help = "a folder with config.json, or a Hub id such as google/gemma-4-E4B-it"
    parser.add_argument(name, metavar="MODEL", type=model_location, help=help)


def add_adapter(parser: argparse.ArgumentParser, name: str = "--adapter") -> None:
    help = "an adapter's folder, safetensors file or Hub id"
    parser.add_argument(name, metavar="ADAPTER", type=adapter_location, help=help)


def add_rank(parser: argparse.ArgumentParser) -> None:
    help = "the rank of LoRA (default: 16)"
    parser.add_argument("--rank", metavar="R", type=at_least_one, default=16, help=help)


def add_map(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the argument ``--map``, a list of entries; it may be given several times."""
    help = "KEY=DEVICE pairs, JSON, a Python dict, a file with one of them, or - for stdin"
    parser.add_argument(
        "--map", required=required, metavar="MAP", type=map_entries, action="extend", help=help
    )
