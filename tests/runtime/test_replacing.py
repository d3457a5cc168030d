"""Whether a kernel of this package may run, on a PyTorch with other private names."""

from __future__ import annotations

import pytest
import torch

from gemma4_compat.runtime.kernels import replacing
from tests.support import config_of


@pytest.fixture(autouse=True)
def asked_again():
    replacing.plain.cache_clear()
    yield
    replacing.plain.cache_clear()


@pytest.mark.parametrize(
    "name",
    [
        "overrides._get_current_function_mode_stack",
        "utils._device.DeviceContext",
        "_C._functorch.peek_interpreter_stack",
        "_C._len_torch_dispatch_stack",
    ],
)
def test_a_private_name_that_pytorch_lacks(name, monkeypatch):
    """A forward, which asks in each layer, computes the same."""
    cls, config = config_of("Gemma4")
    torch.manual_seed(0)
    model, ids = cls(config).eval(), torch.arange(5, 15)[None]
    with torch.no_grad():
        usual = model(ids).logits
        replacing.plain.cache_clear()
        monkeypatch.delattr(f"torch.{name}")
        assert torch.equal(model(ids).logits, usual)
        assert not replacing.plain()(ids)
