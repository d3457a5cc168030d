"""Merge an adapter into an unquantized checkpoint; write it only if it gives the same outputs.

``merge`` is also the command ``gemma4-compat merge BASE ADAPTER OUT``.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import InputError, MergeError, failures_of
from ..files.checkpoint import is_in
from . import arguments
from .result import MergeResult, Parity
from .writing import appearing, copy_companions

__all__ = ["MergeResult", "Parity", "merge"]


def merge(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    device: str = "cpu",
    force: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> MergeResult:
    """Merge a PEFT adapter into its base model and write the result as a checkpoint.

    Files and arguments are checked first, and base and adapter are loaded on the meta device,
    without weights.  Then the base is loaded once, unquantized, and merged in place.  The logits
    of several prompts are compared with those of the model with the adapter loaded; if the model
    accepts them, a synthetic image and sound are among the prompts.  The written files are loaded
    again, and must give the merged model's logits bit for bit.  Only then does ``out`` appear.

    The model is held in memory once, in bfloat16.  At the peak the device also holds the adapter
    in float32, and the change of the largest adapted layer, in float32 and in bfloat16.

    Args:
        base: folder or Hub id ("NAMESPACE/NAME", or "NAMESPACE/NAME@REVISION") of the checkpoint
            that the adapter is for; not quantized.
        adapter: folder or Hub id of the adapter.
        out: folder to write.  It gets the tokenizer and processor files of ``base``, or those of
            ``adapter`` if it has its own.
        device: where to compute, such as "cpu" or "cuda:0"; the whole model must fit.
        force: replace an existing ``out``.
        progress: called with a line of text before each step.

    Raises:
        InputError: a file or an argument is invalid, the adapter does not fit the base, or the
            disk has no room for ``out``; no weights were loaded.
        MergeError: merging or writing failed, or the merged model differs; ``out`` is unchanged.

    Example:
        >>> result = merge("gemma-4-E2B-it", "my-lora", "merged")
        >>> print(result.verdict)
        merged into ...merged
    """
    target = Path(out).absolute()
    arguments.check_out(target, force)
    device = arguments.check_device(device)
    folders = arguments.locate(base), arguments.locate(adapter)
    for folder in folders:
        if arguments.is_inside(folder, target):
            raise InputError(f"{target}: would replace {folder}, which is an input")
    elements = arguments.check_base(folders[0])
    arguments.check_adapter(folders[1])
    arguments.check_room(elements, target)
    files = "tokenizer.json", "tokenizer.model"
    tokenizers = [f for f in reversed(folders) if any(is_in(f, file) for file in files)]

    with appearing(target, force) as partial, _quiet():
        from . import models, prompts  # which import the libraries

        progress("checking base and adapter without their weights")
        models.rehearse(*folders)
        tokens = prompts.text_tokens(tokenizers[0]) if tokenizers else {}
        model, outputs, rows, notes = models.merged_in_memory(*folders, tokens, device, progress)
        result = MergeResult(str(base), str(adapter), target, tuple(rows), tuple(notes))
        if not result.ok:
            raise MergeError(result.verdict, result)
        progress(f"writing {target}")
        models.write(model, folders[0], partial)
        del model
        progress("reading it back")
        models.read_back(partial, outputs, device)
        with failures_of(f"copying the tokenizer to {target.parent} failed", MergeError):
            copy_companions(*folders, partial)
    return result


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' warnings and progress bars about generation and loading."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
