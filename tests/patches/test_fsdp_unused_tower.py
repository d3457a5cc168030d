"""With FSDP2, an adapter on a tower is trained though only one process has an image."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from gemma4_compat.engine.gate import holds
from tests.engines import ROOT, WHOLE, check
from tests.support import run_process

# In some releases before transformers 5.9, the bug of shared_kv_states ends the forward.
ERROR = "HANG" if holds("transformers>=5.9") else "HANG|KeyError"


@pytest.mark.plays("torchrun, fully_shard", WHOLE, "tower trained")
@pytest.mark.regression("fsdp_unused_tower", ERROR)
def test_one_process_has_an_image(cell):
    check(cell)


@pytest.mark.plays("torchrun, fully_shard", WHOLE, "tower unused")
def test_no_process_has_an_image(cell):
    """The weight decay of the optimizer does not change what has no gradient."""
    check(cell)


class Other(torch.nn.Module):
    """A model that is not Gemma 4, with a part of the same name."""

    def __init__(self):
        super().__init__()
        self.vision_model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        self.units = list(self.vision_model)

    def forward(self, x):
        return self.vision_model(x)


def collectives(folder):
    """The units, and the all_reduce calls of two backwards, of another model and of Gemma 4.

    The units are LoRA's layers in the tower, which have no class of Gemma 4.
    """
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    import gemma4_compat  # noqa: F401
    from gemma4_compat import tiny
    from tests.engines import adapted

    distributed.init_process_group("gloo")
    calls, all_reduce = [], distributed.all_reduce

    def counted(*args, **kwargs):
        calls.append(args)
        return all_reduce(*args, **kwargs)

    distributed.all_reduce = counted
    other, gemma = Other(), adapted(Path(folder), WHOLE, "tower trained")
    layers = [each for each in gemma.modules() if type(each).__module__.startswith("peft.tuners")]
    layers = [each for each in layers if getattr(each, "lora_A", None) and is_in_tower(gemma, each)]
    found = []
    for model, units, inputs in (
        (other, other.units, {"x": torch.rand(2, 8)}),
        (gemma, layers, tiny.image_inputs(tiny._config())),
    ):
        for unit in units:
            fully_shard(unit)
        fully_shard(model)
        for _ in range(2):
            output = model(**inputs)
            getattr(output, "logits", output).sum().backward()
        found.append((len(units), len(calls)))
        calls.clear()
    if distributed.get_rank() == 0:
        print("found", found)
    distributed.destroy_process_group()


def is_in_tower(model, module):
    return any(each is module for each in model.base_model.model.model.vision_tower.modules())


def test_another_model_asks_nothing(model_dir, tmp_path):
    (tmp_path / "dense").symlink_to(model_dir)
    script = "import sys; from tests.patches.test_fsdp_unused_tower import collectives; "
    (tmp_path / "script.py").write_text(f"{script}collectives(sys.argv[1])\n")
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node=2", tmp_path / "script.py", tmp_path]
    run = run_process(command, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    assert run.returncode == 0, run.stderr
    found = re.search(r"found (.*)", run.stdout)
    (_, other), (units, gemma) = ast.literal_eval(found[1])
    assert other == 0
    assert gemma == 2 * units > 0
