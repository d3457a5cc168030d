"""What a step with lazy logits keeps in memory, in bytes, against the step without the patches."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from itertools import product

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_compat import disabled
from gemma4_compat.runtime.loss import head
from tests.patches.test_loss_memory import (
    PATCHES,
    ROWS,
    VOCABULARY,
    adapted,
    batch,
    is_lazy,
    text_model,
    tied,
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Pieces of ``ROWS`` rows in float32."""
    monkeypatch.setattr(head, "BYTES", ROWS * VOCABULARY * 24)


class Storages(TorchDispatchMode):
    """Notes the storages that operations make, weakly, but not those of the model."""

    def __init__(self, model):
        super().__init__()
        weights = [*model.parameters(), *model.buffers()]
        self.known = {each.untyped_storage()._cdata for each in weights}
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self.known:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return found

    def alive(self):
        """In bytes, whoever holds them."""
        return sum(size for storage, size in self.made.values() if not storage.expired())


def small():
    """A model of one layer."""
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return text_model(**layers, num_kv_shared_layers=0)


@contextmanager
def switched_off():
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        yield


HEADS = {
    "frozen": adapted,
    "full fine-tuning": tied,
    "modules_to_save": lambda model: adapted(model, modules_to_save=["lm_head"]),
}
MODES = {
    "none": nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "switched off inside": switched_off,
}
READ = ("not read", "before backward", "after", "before and after")
KEPT = {
    "nothing": lambda output, read: None,
    "a sum of losses": lambda output, read: output.loss + 0,
    "output": lambda output, read: output,
    "logits": lambda output, read: read,
    "a metric": lambda output, read: [each.float().mean() for each in read],
}
WAYS = [
    *product(KEPT, READ, ["backward"], [False]),
    *product(KEPT, READ[::3], ["retain_graph", "no backward"], [False]),
    *product(KEPT, READ[3:], ["backward", "step"], [True]),
]


def kept_by(model, mode, kept, read, backward, hidden):
    """The bytes that stay after a step."""
    with Storages(model) as storages:
        with mode():
            output = model(
                **batch(model.config, length=80), output_hidden_states=hidden, use_cache=False
            )
        found = [output.logits] if "before" in read else []
        if backward != "no backward":
            output.loss.backward(retain_graph=backward == "retain_graph")
        if backward == "step":
            torch.optim.SGD(model.parameters(), 1e-3).step()
        model.zero_grad()
        found += [output.logits] if "after" in read else []
        found = KEPT[kept](output, found)
        del output
    return storages.alive()


#: A cell takes ten seconds; the others are slow tests.
SAMPLE = (("frozen", "none"), ("frozen", "bfloat16"), ("full fine-tuning", "bfloat16"))
CELLS = [
    pytest.param(*each, marks=[] if each in SAMPLE else [pytest.mark.slow])
    for each in product(HEADS, MODES)
]


@pytest.mark.parametrize(("head", "mode"), CELLS)
def test_a_step_keeps_no_more_than_upstream(head, mode):
    model = HEADS[head](small())
    with MODES[mode]():
        assert is_lazy(model(**batch(model.config, length=80)))
    with disabled(*PATCHES):
        expected = {way: kept_by(model, MODES[mode], *way) for way in WAYS}
    more = {way: kept_by(model, MODES[mode], *way) - expected[way] for way in WAYS}
    # Logits keep their hidden states in float32, and the sums by which a changed head is noticed.
    # An output whose logits were not read keeps the weight of a trained head in place of logits:
    # that is less here, as there are more tokens than entries of a hidden state.
    constant = 4 * ((160 + 1) * model.config.hidden_size + 1)
    allowed = {"nothing": 0, "a sum of losses": 0}
    assert not {way: n for way, n in more.items() if n > allowed.get(way[0], constant)}
