"""All processes have the rotary frequencies in the same order."""

from __future__ import annotations

import pytest

from tests.engines import QUANTIZED, check
from tests.support import config_of


class Name(str):
    """A string with a chosen hash; usually it depends on the process."""

    __slots__ = ("hash",)

    def __hash__(self):
        return self.hash


def buffers(hashes):
    """The names of the buffers in a process in which the kinds of layers have these hashes."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    _, config = config_of("Gemma4")
    names = {kind: Name(kind) for kind in hashes}
    for kind, name in names.items():
        name.hash = hashes[kind]
    kinds = [names[kind] for kind in config.layer_types]
    vars(config)["layer_types"] = kinds
    parameters = {names[kind]: value for kind, value in config.rope_parameters.items()}
    vars(config)["rope_parameters"] = parameters
    return [name for name, _ in Gemma4TextRotaryEmbedding(config).named_buffers()]


@pytest.mark.regression("rotary_buffer_order", "the order depends on the hashes")
def test_order():
    found = buffers({"sliding_attention": 0, "full_attention": 1})
    assert len(found) == 4
    other = buffers({"sliding_attention": 1, "full_attention": 0})
    assert found == other, "the order depends on the hashes"


@pytest.mark.plays("accelerate launch, Accelerator, DDP", QUANTIZED, "save")
@pytest.mark.regression("rotary_buffer_order", "WRONG")
def test_ddp(cell):
    check(cell)
