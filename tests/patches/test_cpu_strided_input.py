"""4-bit layers on the CPU compute correctly with inputs that are not contiguous."""

from __future__ import annotations

import pytest
import torch

from tests.support import linear4bit

functional = pytest.importorskip("bitsandbytes.functional")
if not getattr(functional, "has_avx512bf16", lambda: False)():
    pytest.skip("this CPU, or this bitsandbytes, lacks the kernel", allow_module_level=True)


@pytest.mark.regression("cpu_strided_input", r"strided input: outputs differ")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_reads_strided_input(nested, dtype):
    layer = linear4bit(128, 64, nested).to("cpu").eval()
    generator = torch.Generator().manual_seed(0)
    strided = torch.randn(1, 128, 6, generator=generator).to(dtype).transpose(1, 2)
    with torch.no_grad():
        expected = layer(strided.contiguous())
        assert torch.equal(layer(strided), expected), "strided input: outputs differ"
        every_other = strided.repeat(1, 2, 1)[:, ::2]
        assert torch.equal(layer(every_other), layer(every_other.contiguous()))
