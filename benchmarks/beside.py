"""Training and decoding beside unsloth: one side, in a process of its own.

``python -m benchmarks.beside SIDE SHAPE CACHE [--batch N | --decode]`` prints a JSON line; SIDE is
``ours`` or ``unsloth``.  Both sides get the same tokens, the same first weights of LoRA, and the
AdamW of PyTorch, and have all modules on the GPU.  unsloth runs without ``torch.compile``, with
which its first two steps took more than two minutes.  Its side imports nothing of this package, nor
benchmarks that do (``decoding``, ``training``): the patches would apply to it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import checkpoint, measure
from .cases import CASES, load

LENGTH, TINY, STEPS, TIMED = 2048, 64, 30, 10
#: tokens of a prompt, and of the two answers whose difference is timed
PROMPT, LONG, SHORT = 64, 64, 8
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


def _unsloth(folder: Path) -> Any:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from unsloth import FastModel

    if not (folder / "tokenizer.json").exists():  # unsloth does not load without one
        core = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
        PreTrainedTokenizerFast(tokenizer_object=core, pad_token="?").save_pretrained(folder)
    options = {} if torch.cuda.is_available() else {"device_map": "cpu"}
    length = {"max_seq_length": LENGTH}
    return FastModel.from_pretrained(str(folder), load_in_4bit=True, **length, **options)[0]


def _adapted(side: str, model: Any) -> Any:
    """The model with LoRA of rank 16 on the decoder's linear layers, with checkpointing."""
    if side == "unsloth":
        from unsloth import FastModel

        parts = {"finetune_vision_layers": False, "finetune_language_layers": True}
        parts |= {"finetune_attention_modules": True, "finetune_mlp_modules": True}
        lora = {"r": 16, "lora_alpha": 16, "use_gradient_checkpointing": "unsloth"}
        model = FastModel.get_peft_model(model, **lora, **parts)
        FastModel.for_training(model)
    else:
        from peft import LoraConfig, get_peft_model

        from gemma4_compat.planning.demand import EXCLUDED, TARGETS

        config = LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, exclude_modules=EXCLUDED)
        model = get_peft_model(model, config).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    _start_alike(model)
    return model


def _start_alike(model: Any) -> None:
    """Give LoRA the same weights on both sides; the names of the layers seed them."""
    import torch

    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.zeros_(parameter)
        elif ".lora_A." in name:
            seed = zlib.crc32(name[name.index("layers.") :].encode())
            drawn = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_((drawn * 2 - 1) / parameter.shape[1] ** 0.5)


def train(model: Any, batch: int, length: int) -> dict[str, Any]:
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)
    ids = measure.Text(model.config.get_text_config().vocab_size).tokens(batch, length)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    inputs["mm_token_type_ids"] = torch.zeros_like(ids)
    losses: list[float] = []

    def step() -> None:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    measure.reset_peak()
    times = [measure.seconds(step) for _ in range(STEPS)][-TIMED:]
    found = {"s a step": statistics.median(times), "from": min(times), "to": max(times)}
    return {**found, "loss": [losses[0], losses[-1]], "trained": sum(p.numel() for p in trained)}


def decode(side: str, model: Any) -> dict[str, Any]:
    """Tokens a second, without the prompt."""
    import torch

    ids = measure.Text(model.config.get_text_config().vocab_size).tokens(1, PROMPT)
    # ``min_new_tokens`` would add kernels to each step; this token does not occur.
    end = model.config.get_text_config().vocab_size - 1
    options: dict[str, Any] = {"cache_implementation": "static"}
    if side == "unsloth":
        from unsloth import FastModel

        FastModel.for_inference(model)
        options = {}

    def generate(count: int) -> None:
        mask = torch.ones_like(ids)
        ends = {"eos_token_id": end, "pad_token_id": 0, "max_new_tokens": count}
        model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **ends, **options)

    for count in (LONG, LONG, SHORT):
        generate(count)
    measure.reset_peak()
    turns = [[measure.seconds(lambda n=n: generate(n)) for n in (LONG, SHORT)] for _ in range(5)]
    long, short = (statistics.median(each) for each in zip(*turns, strict=True))
    return {"tokens/s": (LONG - SHORT) / (long - short)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("side", choices=["ours", "unsloth"])
    parser.add_argument("shape")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--decode", action="store_true")
    options = parser.parse_args()
    if options.side == "unsloth":  # before the libraries that it changes
        os.environ.setdefault("UNSLOTH_COMPILE_DISABLE", "1")
        import unsloth  # noqa: F401
    else:
        import gemma4_compat

        if options.decode:
            gemma4_compat.install("fast")
    folder = options.cache / options.shape
    checkpoint.build(options.shape, folder)
    if options.side == "unsloth":
        model = _unsloth(folder / "model")
    else:
        model = load(CASES["gpu"], options.shape, folder)
    if options.decode:
        found = decode(options.side, model)
    else:
        length = TINY if options.shape == "tiny" else LENGTH
        found = train(_adapted(options.side, model), options.batch, length)
    names = [*LIBRARIES, *["unsloth"] * (options.side == "unsloth")]
    found |= {"peak GiB": measure.peak(), "versions": {name: version(name) for name in names}}
    print(json.dumps({**vars(options), "cache": str(options.cache), **found}))


if __name__ == "__main__":
    main()
