"""Decode steps as CUDA graphs.

The patch ``captured_decoding`` hands a step to ``decoding``, which decides how it runs.
``conditions`` and ``snapshot`` say whether what was captured is still that of the model, ``inputs``
makes the inputs of the next step, ``graph`` records and replays, and ``cache_memory`` lends the KV
cache the addresses that a graph knows.
"""
