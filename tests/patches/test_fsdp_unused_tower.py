"""With FSDP2, an adapter on a tower is trained though only one process has an image."""

from __future__ import annotations

import pytest

from gemma4_compat.engine.gate import holds
from tests.engines import WHOLE, check

# In some releases before transformers 5.9, the bug of shared_kv_states ends the forward.
ERROR = "HANG" if holds("transformers>=5.9") else "HANG|KeyError"


@pytest.mark.xdist_group("engines")
@pytest.mark.regression("fsdp_unused_tower", ERROR)
def test_one_process_has_an_image():
    check("torchrun, fully_shard", WHOLE, "tower trained")


@pytest.mark.xdist_group("engines")
def test_no_process_has_an_image():
    """The weight decay of the optimizer does not change what has no gradient."""
    check("torchrun, fully_shard", WHOLE, "tower unused")
