"""DeepSpeed hangs if a batch with images meets a batch of text.

ZeRO-3 shards all weights, and gathers those of a module when it runs.  If one process has an image
and another has none, only one of them gathers the weights of the vision tower: the processes wait
for each other, or the collectives of other modules get mixed up.  This happens with frozen towers,
too.  ZeRO-1 and ZeRO-2 reduce the gradients in buckets, whose contents then differ if the tower is
trained.

The fix asks all processes before a forward what they have.  A process that has no image, if another
has one, runs the tower on an image of a few black pixels, and adds zeros to the embeddings.  Sound
is treated likewise.  Models that are not trained with DeepSpeed ask nothing.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

from ...engine import Finding, Patch, drifted, fixed_if
from ...engine.probing import code_at, mentions

PATCH = Patch(
    name="zero_unused_tower",
    symptom=(
        "with DeepSpeed ZeRO-3, or with ZeRO-2 and an adapter on the towers, training hangs if "
        "only some processes have images or sound"
    ),
    affects=("transformers",),
    changes=(
        "Under DeepSpeed, a process without images or sound runs the tower on a very small input "
        "if another process has some.  This changes no values."
    ),
    unreported="Not reported: DeepSpeed asks all processes to run the same modules.",
)

_MODEL = "transformers.models.gemma4.modeling_gemma4"
_IMAGES = ("pixel_values", "pixel_values_videos")
#: the frames of a sound that an audio tower accepts
_FRAMES = 16


@PATCH.probe
def towers_run_for_images_alone() -> Finding:
    """Look for the calls that this adds."""
    code = code_at(_MODEL, "Gemma4Model.forward")
    if not {"get_image_features", "get_audio_features", "language_model"} <= set(code.co_names):
        return drifted("Gemma4Model.forward no longer calls its towers")
    knows = mentions(code, "zero3") or mentions(code, "deepspeed")
    return fixed_if(knows, "Gemma4Model.forward knows of DeepSpeed")


@PATCH.around(_MODEL, "Gemma4Model.forward")
def model_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    if "deepspeed" not in sys.modules or not (self.training and torch.is_grad_enabled()):
        return original(self, *args, **kwargs)
    reduced = _reduced(self)
    if reduced is None:
        return original(self, *args, **kwargs)
    given = signature(original).bind_partial(self, *args, **kwargs).arguments
    images = [given[name] for name in _IMAGES if given.get(name) is not None]
    sounds = [given["input_features"]] if given.get("input_features") is not None else []
    own = [n for each in (images, sounds) for n in (len(each), each[0].shape[-1] if each else 0)]
    tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    most = torch.tensor(own, device=tokens.device)
    group = getattr(reduced, "ds_process_group", None)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=group)
    every_image, pixels, every_sound, bins = most.tolist()

    zeros: list[Any] = []
    with ExitStack() as stack:

        def before(module: Any, hook: Any, **options: Any) -> None:
            # and before the hooks of DeepSpeed, which gather
            handle = module.register_forward_pre_hook(hook, prepend=True, **options)
            stack.callback(handle.remove)

        # What is registered last runs first.
        before(self.language_model, partial(_with_zeros, zeros), with_kwargs=True)
        if every_sound > len(sounds):
            run = partial(_run_on_sound, self, zeros, bins, tokens.device)
            before(self.language_model, run)
        for _ in range(every_image - len(images)):
            run = partial(_run_on_image, self, zeros, pixels, tokens.device)
            before(self.audio_tower if sounds else self.language_model, run)
        return original(self, *args, **kwargs)


def _reduced(model: Any) -> Any:
    """A parameter of a tower that DeepSpeed gathers or whose gradient it reduces."""
    for tower in (model.vision_tower, model.audio_tower):
        for each in () if tower is None else tower.parameters():
            if hasattr(each, "ds_id") or (each.requires_grad and hasattr(each, "_hp_mapping")):
                return each
    return None


def _run_on_image(model: Any, zeros: list[Any], pixels: int, device: Any, *_: Any) -> None:
    """An image that has one soft token."""
    import torch

    side = range(model.config.vision_config.pooling_kernel_size)
    positions = torch.tensor([[(x, y) for y in side for x in side]], device=device)
    image = torch.zeros(1, positions.shape[1], pixels, device=device)
    found = model.get_image_features(image, positions, return_dict=True)
    zeros.append(_zero(found.pooler_output))


def _run_on_sound(model: Any, zeros: list[Any], bins: int, device: Any, *_: Any) -> None:
    import torch

    sound = torch.zeros(1, _FRAMES, bins, device=device)
    mask = torch.ones(1, _FRAMES, dtype=torch.bool, device=device)
    found = model.get_audio_features(sound, mask, return_dict=True)
    zeros.append(_zero(found.pooler_output))


def _zero(features: Any) -> Any:
    """0, and its gradient is 0: also if the features are no numbers."""
    import torch

    found = torch.cat(list(features)) if isinstance(features, (tuple, list)) else features
    return found.masked_fill(torch.ones_like(found, dtype=torch.bool), 0).sum()


def _with_zeros(zeros: list[Any], module: Any, args: Any, kwargs: Any) -> Any:
    embeddings = kwargs["inputs_embeds"]
    for each in zeros:
        embeddings = embeddings + each.to(embeddings.device, embeddings.dtype)
    return args, {**kwargs, "inputs_embeds": embeddings}
