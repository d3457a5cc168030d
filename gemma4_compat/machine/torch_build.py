"""What PyTorch was built for."""

from __future__ import annotations

import sys

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
