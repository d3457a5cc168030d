"""Measure decode steps with decoder layers on the disk, with and without ``disk_read_ahead``.

``python -m benchmarks.disk SHAPE FOLDER [--layers N] [--dat]`` writes a checkpoint into FOLDER,
loads it in bfloat16 with the last N decoder layers on the disk (all, if N is not given), and prints
one JSON line.  Before a cold step, its files are not in the page cache; before a warm one, they
are.  Both ways take turns.  With ``--dat`` accelerate reads the layers from an offload folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .checkpoint import build, config_of
from .measure import seconds

PATCH = "disk_read_ahead"


def evict(files: list[Path]) -> None:
    """Remove these files from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def load(folder: Path, layers: range, scratch: str, *, dat: bool) -> Any:
    """The model with these decoder layers on the disk, in eval mode."""
    import torch
    from accelerate import dispatch_model
    from transformers import Gemma4ForConditionalGeneration

    device = 0 if torch.cuda.is_available() else "cpu"
    on_disk = {f"model.language_model.layers.{i}": "disk" for i in layers}
    device_map = {"": device, **on_disk}
    model = Gemma4ForConditionalGeneration.from_pretrained(
        folder / "model",
        dtype=torch.bfloat16,
        device_map={"": device} if dat else device_map,
        offload_folder=scratch,
    )
    if dat:
        model = dispatch_model(
            model,
            device_map,
            main_device=device,
            offload_dir=scratch,
            skip_keys=model._skip_keys_device_placement,
        )
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dat", action="store_true")
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()

    import torch

    import gemma4_compat

    folder = args.folder / args.shape
    build(args.shape, folder)
    count = config_of(args.shape).get_text_config().num_hidden_layers
    layers = range(count - (args.layers or count), count)
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        model = load(folder, layers, scratch, dat=args.dat)
        stored = Path(scratch) if args.dat else folder / "model"
        files = [file for file in stored.iterdir() if file.suffix in (".dat", ".safetensors")]
        token = torch.tensor([[5]], device=gemma4_compat.input_device(model))

        def step() -> None:
            with torch.no_grad():
                model(input_ids=token, logits_to_keep=1).logits.cpu()

        taken: dict[tuple[bool, bool], list[float]] = {}
        for turn in range(args.turns + 1):
            for patched in (True, False) if turn % 2 else (False, True):
                with nullcontext() if patched else gemma4_compat.disabled(PATCH):
                    time.sleep(0.2)  # the last requests end
                    evict(files)
                    for cold in (True, False, False, False):
                        duration = seconds(step)
                        if turn:
                            taken.setdefault((cold, patched), []).append(duration)

    decoder = model.model.language_model.layers
    size = sum(2 * tensor.numel() for i in layers for tensor in decoder[i].parameters())
    figures: dict[str, Any] = {"shape": args.shape, "layers": len(layers), "dat": args.dat}
    figures["bytes a step"] = size
    for cold, name in ((True, "cold"), (False, "warm")):
        patched, unpatched = (statistics.median(taken[cold, each]) for each in (True, False))
        figures |= {f"{name}, s": patched, f"{name} unpatched, s": unpatched}
        figures[f"{name}, speed ÷ unpatched"] = unpatched / patched
    print(json.dumps(figures, ensure_ascii=False))


if __name__ == "__main__":
    main()
