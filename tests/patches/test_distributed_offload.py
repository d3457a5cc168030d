"""A model with an offloaded module trains in several processes as it does in one."""

from __future__ import annotations

import pytest

from gemma4_compat.engine.gate import holds
from tests.engines import HOST, check


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(each, marks=pytest.mark.plays(each, HOST, "step"))
        for each in ("accelerate launch, Accelerator, DDP", "accelerate launch, Accelerator, FSDP2")
    ],
)
@pytest.mark.regression("distributed_offload", r"`device_map='auto'` in any distributed mode")
def test_two_processes(engine, cell):
    if engine.endswith("FSDP2") and not holds("accelerate>=1.13"):
        pytest.skip("some of these releases cannot leave modules out under FSDP2")
    check(cell)
