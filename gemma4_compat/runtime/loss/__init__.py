"""Logits of a training step that are computed only where they are read.

The logits of Gemma 4 have 262,144 entries for each token.  ``LazyLogits`` stands for them between
the head and the loss.  It holds the hidden states, and notes what the forward does to the logits.
``cross_entropy`` then computes head, logits and loss for some tokens at a time, and at once the
gradients of the hidden states, so that at most ``BYTES`` of memory are in use.

If the head is trained, backward computes its gradient for some entries of the vocabulary at a time,
each as one product of all tokens, so it is rounded as often as that of all logits.  This computes
the logits once more.  The output then has a copy of the weight for those who read its logits after
the step of the optimizer.

The logits of a head with LoRA stay whole: PEFT adds two products that are rounded apart, and one
product for both would be another arithmetic.

The forward returns a ``LazyOutput``: its field ``logits`` is computed when it is first read, by the
operations of the model on all tokens, so it has the same bits.
"""
