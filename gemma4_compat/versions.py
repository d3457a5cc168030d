"""The releases that the project is made for: each of these facts stands here alone.

Imports nothing, so that it can be run where nothing is installed yet, as ``noxfile.py`` does.
"""

from __future__ import annotations

#: The oldest that are supported: the lower bounds of the extra in ``pyproject.toml``.
FLOORS = {
    "transformers": "5.5.0",
    "accelerate": "1.10.0",
    "peft": "0.18.0",
    "bitsandbytes": "0.46.1",
}
#: What the users had when they reported the failures.
USERS = {
    "transformers": "5.6.2",
    "accelerate": "1.13.0",
    "peft": "0.19.1",
    "bitsandbytes": "0.49.2",
}
#: The newest that the patches were measured on: those of ``tools/matrix.json``.
NEWEST = {
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
}
#: The libraries that are patched.
LIBRARIES = tuple(FLOORS)
WITH_TORCH = ("torch", *LIBRARIES)
