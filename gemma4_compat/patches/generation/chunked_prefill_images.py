"""With ``prefill_chunk_size``, the model does not get images, videos and sound.

``generate(prefill_chunk_size=...)`` prepares each chunk of the prompt as it prepares a decode step.
Gemma 4 gets its images, videos and sound only in the first forward of a generation, which none of
the chunks is.  The placeholders stay embeddings of the pad token.  There is no error, and the
output is that of the prompt without the image.  One chunk that contains the whole prompt is no
exception.

transformers 5.23.0 encodes images and videos first, and gives each chunk the features of its
placeholders.  It raises ValueError for sound.  If the border of two chunks is inside an image, the
tokens of the image in the first chunk cannot attend to those in the second.  This changes the
logits of 12B, 26B-A4B and 31B, in which the tokens of an image attend to each other.

The fix prefills each chunk as a first forward, with the features of its placeholders, also of
sound.  In models whose image tokens attend to each other, a chunk ends before an image that it
cannot contain, and a chunk is as long as an image that is longer than ``prefill_chunk_size``.

The forward of Gemma 3n pads the features of sound after it has got them, so the fix raises
ValueError for sound of Gemma 3n in more than one chunk, as transformers 5.23.0 does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from copy import copy
from functools import wraps
from typing import Any

from ...engine import Finding, Part, Patch, broken, fixed
from ...errors import RefusedError
from ...model.caches import cache_name
from ...model.hooks import input_device
from ...objects import shadowed
from .._families import FAMILIES, GEMMA3N, Family, former
from .._image_blocks import block_ids, has_bidirectional_images

PATCH = Patch(
    name="chunked_prefill_images",
    symptom=(
        "generate(prefill_chunk_size=...) ignores images, videos and sound, without an error; "
        "Chunked prefill cannot split the raw multimodal inputs ['input_features', ...]"
    ),
    affects=(),
    note=(
        "transformers 5.23.0 prefills images in chunks.  It refuses sound, and divides images "
        "whose tokens attend to each other."
    ),
    unreported="Found by the tests of this package; no report is known upstream.",
    former=former("chunked_prefill_images"),
)

PATCH.copies(
    "transformers.generation.utils",
    "GenerationMixin._prefill",
    "6dae1848d7d6 58ce86f95253 1eebe66dd710 ee89f58da383 03932bda1098 eba843e4d0aa",
)

#: The input of each kind, and the prefix of the method that encodes it.
_INPUTS = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
#: transformers reads the values of each token by its position in the whole sequence.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class _Encoded:
    """The features of a chunk, in place of the input.  accelerate does not move them."""

    def __init__(self, pooler_output: Any, attention_mask: Any = None) -> None:
        self.pooler_output, self.attention_mask = pooler_output, attention_mask


def mend(part: Part, family: Family, *kinds: str) -> None:
    """Register the probe and the replacements for a family's class with these kinds of inputs."""
    module, name = family.module, f"{family.prefix}ForConditionalGeneration"
    part.copies(module, f"{name}._prefill", PATCH.copied[0].fingerprints)
    part.replaces(module, f"{name}._prefill")(_prefill_of(kinds, module, name))

    @part.probe
    def chunks_lack_the_inputs() -> Finding:
        """Prefill two tokens in two chunks, with an input that belongs to the second."""
        return _probe(getattr(sys.modules[module], name), kinds[-1])


def _probe(model_class: Any, kind: str) -> Finding:
    import torch
    from transformers.cache_utils import DynamicCache, PreTrainedConfig
    from transformers.generation.configuration_utils import GenerationConfig
    from transformers.utils import ModelOutput

    passed = []

    class Model(model_class):  # type: ignore[misc]
        config = PreTrainedConfig()

        def __init__(self) -> None:
            pass  # the method under test needs no modules

        def __call__(self, **inputs: Any) -> Any:
            return ModelOutput(**{name: cache})

        def _valid_auto_compile_criteria(self, *args: Any) -> bool:
            return False

        def prepare_inputs_for_generation(self, input_ids: Any, **inputs: Any) -> Any:
            passed.append(inputs.get("is_first_iteration", False))
            return {}

    name, cache = cache_name(), DynamicCache()
    tokens = torch.ones((1, 2), dtype=torch.long, device="cpu")
    inputs = {_INPUTS[kind]: tokens, "attention_mask": tokens, name: cache}
    try:
        Model()._prefill(tokens, GenerationConfig(prefill_chunk_size=1), inputs)
    except ValueError as refused:
        return broken(str(refused))
    return fixed("every chunk is a first forward") if all(passed) else broken()


def _given_back(method: Any) -> Any:
    """``get_image_features``, also a user's, that returns the features that it gets."""

    @wraps(method)
    def get_features(*args: Any, **kwargs: Any) -> Any:
        encoded = (each for each in (*args, *kwargs.values()) if isinstance(each, _Encoded))
        return next(encoded, None) or method(*args, **kwargs)

    return get_features


def _prefill_of(kinds: tuple[str, ...], module: str, name: str) -> Any:
    def prefill(replaced: Any) -> Any:
        owner = getattr(sys.modules[module], name)
        bases = [vars(base).get("_prefill") for base in owner.__mro__[1:]]

        def original(self: Any, *args: Any) -> Any:
            # Where the class inherits it, a user may replace it in GenerationMixin later.
            if replaced in bases:
                return super(owner, self)._prefill(*args)
            return replaced(self, *args)

        @wraps(replaced)
        def _prefill(
            self: Any,
            input_ids: Any,
            generation_config: Any,
            model_kwargs: Any,
            is_first_iteration: bool = True,
        ) -> Any:
            given = (input_ids, generation_config, model_kwargs, is_first_iteration)
            size, cache = generation_config.prefill_chunk_size, model_kwargs.get(cache_name())
            found = [kind for kind in _INPUTS if _has(model_kwargs, kind)]
            in_chunks = is_first_iteration and size is not None and cache is not None
            if not found or not in_chunks or model_kwargs.get("inputs_embeds") is not None:
                return original(self, *given)

            past, tokens = int(cache.get_seq_length()), input_ids
            if _length(model_kwargs, generation_config) == input_ids.shape[1]:
                tokens = input_ids[:, past:]  # the tokens before are in the cache
            sizes = list(_sizes(self.config, model_kwargs, past, tokens.shape[1], size))
            unchunked = copy(generation_config)
            unchunked.prefill_chunk_size = None
            if len(sizes) == 1:
                return original(self, input_ids, unchunked, model_kwargs, is_first_iteration)
            if refused := [_INPUTS[kind] for kind in found if kind not in kinds]:
                raise RefusedError(
                    f"Chunked prefill cannot split {', '.join(refused)} of a "
                    f"{type(self).__name__} into chunks: pass prefill_chunk_size=None"
                )
            return _in_chunks(original, self, tokens, sizes, past, unchunked, model_kwargs, found)

        return _prefill

    return prefill


def _has(model_kwargs: Any, kind: str) -> bool:
    encoded = model_kwargs.get("mm_encoder_outputs") or {}
    return model_kwargs.get(_INPUTS[kind]) is not None or encoded.get(kind) is not None


def _length(model_kwargs: Any, generation_config: Any) -> int:
    """The number of all tokens; some releases leave out a mask without padding."""
    padding = model_kwargs.get("attention_mask")
    length: int = getattr(generation_config, "_mask_length", -1)
    return length if padding is None else int(padding.shape[1])


def _sizes(config: Any, inputs: Any, start: int, length: int, size: int) -> Iterator[int]:
    """The sizes of the chunks.

    A chunk ends before an image whose tokens attend in both directions, or contains all of it.
    """
    end, types = start + length, inputs.get("mm_token_type_ids")
    inside: Any = {}
    if types is not None and has_bidirectional_images(config, types):
        blocks = block_ids(types)
        same = ((blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] >= 0)).any(dim=0)
        inside = dict(enumerate(same.tolist(), start=1))
    while start < end:
        border = min(start + size, end)
        while border > start and inside.get(border):
            border -= 1
        if border == start:
            border += 1
            while border < end and inside.get(border):
                border += 1
        yield border - start
        start = border


def _in_chunks(
    prefill: Any,
    model: Any,
    tokens: Any,
    sizes: list[int],
    past: int,
    generation_config: Any,
    model_kwargs: Any,
    kinds: list[str],
) -> Any:
    """Prefill chunks of these sizes; each gets the features of the placeholders it contains."""
    # Later releases have encoded images and videos already, and pass their features like this.
    encoded = model_kwargs.get("mm_encoder_outputs") or {}
    features = {kind: encoded.get(kind) or _features(model, model_kwargs, kind) for kind in kinds}
    ids = {kind: getattr(model.config, f"{kind}_token_id") for kind in kinds}
    rows = {}
    for kind in kinds:
        here = tokens == ids[kind]
        count = len(_flat(features[kind]))
        if count != here.sum():
            raise RefusedError(
                f"{kind} features and {kind} tokens do not match: tokens: {int(here.sum())}, "
                f"features: {count}"
            )
        rows[kind] = (here.flatten().cumsum(0).view_as(here) - 1).split(sizes, dim=1)
    names = (f"get_{kind}_features" for kind in _INPUTS)
    owner = model.base_model
    methods = {name: _given_back(getattr(owner, name)) for name in names if hasattr(owner, name)}
    inputs = dict(model_kwargs)
    padding, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    for index, chunk in enumerate(tokens.split(sizes, dim=1)):
        start, past = past, past + chunk.shape[1]
        if padding is not None:
            inputs["attention_mask"] = padding[:, :past]
        if positions is not None:
            inputs["position_ids"] = positions[..., start:past]
        for name in _TOKEN_TYPES:
            if model_kwargs.get(name) is not None:
                inputs[name] = model_kwargs[name][..., :past]
        given: dict[str, Any] = {}
        for kind in kinds:
            here = chunk == ids[kind]
            part = _part(features[kind], rows[kind][index][here]) if here.any() else None
            if kind not in encoded:
                inputs[_INPUTS[kind]] = part
            elif part is not None:
                given[kind] = part
        if encoded:
            inputs["mm_encoder_outputs"] = given or None
        with shadowed(owner, **methods):
            outputs = prefill(model, chunk, generation_config, inputs, True)
        inputs[cache_name()] = outputs[cache_name()]
    return outputs


def _features(model: Any, model_kwargs: Any, kind: str) -> Any:
    """The output of a tower for the whole prompt."""
    from accelerate.utils import send_to_device

    method = f"get_{kind}_features"
    # A user's own method may take ``**kwargs``, and hand them on to that of transformers.
    classes = (vars(cls) for cls in type(model.base_model).__mro__)
    methods = (own[method] for own in classes if method in own)
    known = {name for each in methods for name in inspect.signature(each).parameters}
    inputs = {name: model_kwargs[name] for name in known & model_kwargs.keys()}
    inputs = send_to_device(inputs, input_device(model))
    return getattr(model.base_model, method)(**inputs, return_dict=True)


def _flat(output: Any) -> Any:
    """The features of all tokens, [tokens, width], without padding."""
    import torch

    mask, features = output.get("attention_mask"), output.pooler_output
    if mask is not None:
        return features[mask.to(features.device)]
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])


def _part(output: Any, rows: Any) -> _Encoded:
    """The features of these tokens, in the form in which the tower returns them."""
    import torch

    flat = _flat(output)
    features = flat[rows.to(flat.device)]
    if output.get("attention_mask") is not None:
        mask = torch.ones((1, len(features)), dtype=torch.bool, device=features.device)
        return _Encoded(features[None], mask)
    return _Encoded(features if isinstance(output.pooler_output, torch.Tensor) else [features])


for each in FAMILIES:
    if each is GEMMA3N:
        mend(PATCH.part(each.name, "transformers<5.23"), each, "image")
    else:
        mend(PATCH.part(each.name, each.requirement), each, "image", "video", "audio")
