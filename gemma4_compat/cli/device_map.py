"""Check a device map, before loading.

Shows names that the model does not have, modules without an entry, the bytes on
each device, what offloading saves on the GPU, and known problems that have no
patch.  Reads config.json and no weights, and needs no GPU.  The map is for the
base model's from_pretrained.  An empty KEY is the rest of the model.

  --map "model.vision_tower=cpu,=0"
  --map '{"model.vision_tower": "cpu", "": 0}'      not in a shell of Windows
  --map my-map.json

Exit code: 0 the map works; 1 it does not work, or not as expected; 2 invalid
argument or file.
"""

from __future__ import annotations

import argparse

from ..results.result import Result
from ._arguments import add_map, add_model
from ._command import Command


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_map(parser, required=True)


def _run(options: argparse.Namespace) -> Result:
    from ..inspection.device_map import check_device_map

    return check_device_map(options.model_dir, dict(options.map))


COMMAND = Command("map", __doc__, _arguments, _run, needs=("torch", "transformers"))
