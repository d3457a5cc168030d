"""A model with an offloaded module trains in several processes as it does in one."""

from __future__ import annotations

import pytest

from tests.engines import HOST, check


@pytest.mark.parametrize(
    "engine", ["accelerate launch, Accelerator, DDP", "accelerate launch, Accelerator, FSDP2"]
)
@pytest.mark.xdist_group("engines")
@pytest.mark.regression("distributed_offload", r"`device_map='auto'` in any distributed mode")
def test_two_processes(engine):
    check(engine, HOST, "step")
