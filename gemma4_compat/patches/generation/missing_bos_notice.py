"""A prompt without ``<bos>`` gives garbage, without an error.

Chat templates write this token; the tokenizers of some checkpoints do not add it to plain text.
This patch repairs nothing.  It looks at the first eight prompts of a loaded model.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from ...engine import Finding, Kind, Patch, fixed_if
from ...model.parts import is_ours
from .._code import code_at, mentions

PATCH = Patch(
    name="missing_bos_notice",
    kind=Kind.WARNING,
    symptom="generate repeats a word or writes garbage: the prompt does not begin with <bos>",
    affects=("transformers",),
    changes="generate of Gemma 4 and 3n warns once for each model if a prompt has no <bos>.",
    links=("https://github.com/unslothai/unsloth/issues/7903",),
)
_GENERATE = ("transformers.generation.utils", "GenerationMixin.generate")
_looks: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # each may wait for the GPU


@PATCH.probe
def generate_takes_any_prompt() -> Finding:
    return fixed_if(mentions(code_at(*_GENERATE), "lacks_bos"), "generate looks for <bos> itself")


@PATCH.around(*_GENERATE)
def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with suppress(Exception):  # a notice must not end a call
        if is_ours(self) and _looks.get(self, 0) < 8 and _lacks_bos(self, *args[:1], **kwargs):
            _looks[self] = 8
            logging.getLogger(__name__).warning(
                "A prompt has no <bos> token.  Without it, Gemma writes garbage.  Use the chat "
                "template, or put tokenizer.bos_token before the text.  If it is meant, ignore "
                "this."
            )
    return original(self, *args, **kwargs)


def _lacks_bos(model: Any, inputs: Any = None, **given: Any) -> bool:
    from transformers.utils.import_utils import is_tracing

    ids = given.get("input_ids") if inputs is None else inputs
    mask = given.get("attention_mask")
    bos = model.config.get_text_config(decoder=True).bos_token_id
    packed_or_embedded = any(given.get(n) is not None for n in ("position_ids", "inputs_embeds"))
    is_new = not model.config._name_or_path  # not loaded: the user trains it from scratch
    if ids is None or bos is None or packed_or_embedded or is_new or is_tracing(ids):
        return False
    _looks[model] = _looks.get(model, 0) + 1
    cache = given.get("cache", given.get("past_key_values"))
    if cache is not None and cache.get_seq_length():
        return False
    return not bool(((ids == bos) & (True if mask is None else mask != 0)).any(1).all())
