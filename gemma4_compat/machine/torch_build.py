"""What PyTorch was built for, and whether it sees a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

_CUDA_BUILD = "pip install torch --index-url https://download.pytorch.org/whl/cu130"


def cpu_only() -> str:
    """Why PyTorch uses no GPU, and what to install, if it is a CPU-only build; else ``""``.

    ``pip install torch`` installs such a build on Windows.  On a Mac there is no other.
    """
    import torch

    if sys.platform == "darwin" or torch.version.cuda is not None or torch.version.hip is not None:
        return ""
    return (
        f"torch {torch.__version__} is a CPU-only build and uses no GPU; for an NVIDIA GPU: "
        f"{_CUDA_BUILD}"
    )


def notes() -> Iterator[str]:
    """What a user should know of PyTorch and the GPU, once PyTorch is imported."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "cuda"):  # it is not imported, or only a stand-in
        return
    if why := cpu_only():
        yield why
    # `is_available` would initialize CUDA, after which a fork of the user's cannot use it.
    elif torch.version.cuda and not torch.cuda.device_count():
        yield (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and sees no GPU: "
            "nvidia-smi says whether the driver works, and which CUDA version it supports"
        )
