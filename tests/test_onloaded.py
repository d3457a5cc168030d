"""Changes of offloaded weights outside a forward."""

from __future__ import annotations

import torch

from gemma4_compat.runtime.host.onloading import onloaded


def test_another_view_of_the_same_memory_is_a_change():
    from accelerate import cpu_offload

    module = torch.nn.Linear(4, 4, bias=False)
    turned = module.weight.detach().t().clone()
    cpu_offload(module, execution_device=torch.device("cpu"))
    with onloaded(module, keep_changes=True):
        module.weight.data = module.weight.data.t()
    assert torch.equal(module(torch.eye(4)), turned.t())  # exact in any order of the products
