"""Writes a checkpoint that appears complete or not at all."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError, MergeError, failures_of
from ..files.checkpoint import GENERATION_CONFIG, file_in, is_in, read_json
from .arguments import check_out

_TEMPLATE = "chat_template.jinja"
# Files to copy beside the weights, first from BASE and then from ADAPTER.
_COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*processor_config.json", "additional_chat_templates",
)  # fmt: skip


@contextlib.contextmanager
def appearing(out: Path, force: bool) -> Iterator[Path]:
    """A temporary folder, renamed to ``out`` if the block succeeds, else removed.

    Raises:
        InputError: the parent folder of ``out`` cannot be written to.
        MergeError: the temporary folder cannot be renamed to ``out``.
    """
    token = secrets.token_hex(4)
    partial = out.with_name(f".{out.name}.{token}.partial")
    try:
        with failures_of(f"{out.parent}: cannot be written to"):
            partial.mkdir()
        yield partial
        try:
            check_out(out, force)
            _replace(out, partial, out.with_name(f".{out.name}.{token}.replaced"))
        except (ValueError, OSError) as error:
            raise MergeError(f"{out}: cannot be replaced or created: {error}") from error
    except (InputError, MergeError) as error:  # without the temporary name
        error.args = (str(error).replace(partial.name, out.name), *error.args[1:])
        raise
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


def copy_companions(base: Path, adapter: Path, out: Path) -> None:
    """Copy tokenizer, processor and chat template of the base, then those of the adapter."""
    if is_in(base, GENERATION_CONFIG):
        shutil.copyfile(base / GENERATION_CONFIG, out / GENERATION_CONFIG)
    for folder in (base, adapter):
        for source in (file for pattern in _COMPANIONS for file in folder.glob(pattern)):
            if source.is_dir():
                shutil.rmtree(out / source.name, ignore_errors=True)
                shutil.copytree(source, out / source.name)
            else:
                shutil.copyfile(source, out / source.name)
    # The base's file would override a template in the adapter's tokenizer_config.json.
    settings = file_in(adapter, "tokenizer_config.json")
    if settings is not None and not is_in(adapter, _TEMPLATE):
        if read_json(settings).get("chat_template"):
            (out / _TEMPLATE).unlink(missing_ok=True)
