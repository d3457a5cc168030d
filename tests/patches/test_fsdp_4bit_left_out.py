"""accelerate shards 4-bit weights in their default storage."""

from __future__ import annotations

import pytest

from tests.engines import QUANTIZED, check


@pytest.mark.plays("accelerate launch, Accelerator, FSDP2", QUANTIZED, "step")
@pytest.mark.regression("fsdp_4bit_left_out", "replicated", behind="shared_kv_states")
def test_each_process_holds_half(cell):
    check(cell)
