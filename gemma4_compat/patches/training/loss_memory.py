"""A training step of Gemma 4 keeps many copies of the logits, which have 262,144 entries a token.

With ``labels``, the forward computes all logits, then divides, ``tanh``, multiplies and converts
them to float32, and the cross entropy and its gradients are as large.  Together these are 14 bytes
for each entry: 7 GiB for 2,048 tokens, of the 9.6 GiB that a QLoRA step of E2B needs.  PyTorch's
``linear_cross_entropy`` and Liger's loss would not store them, but the first has no soft cap, and
the second needs Triton.

The fix computes head, soft cap, loss and gradient for some tokens at a time.  If the head is
trained, backward computes its gradient for some entries of the vocabulary at a time, and the logits
once more.  ``outputs.logits`` is computed when it is read.  The loss of each token comes from the
same operations.  If the head is adapted, offloaded or sharded, or has hooks, and if the model has
another loss function, everything stays as it is.
"""

from __future__ import annotations

from .._families import GEMMA4
from ._loss_memory import patch_of

PATCH = patch_of(
    GEMMA4,
    name="loss_memory",
    symptom="torch.OutOfMemoryError in the loss of a training step, although the model is small",
    links=("https://github.com/linkedin/Liger-Kernel/issues/1308",),
)
