"""The releases that the project supports, each stated only in this file.

It imports nothing, so that ``noxfile.py`` can run it before anything is installed.
"""

from __future__ import annotations

#: The oldest supported releases: the lower bounds of the extra in ``pyproject.toml``.
FLOORS = {
    "transformers": "5.6.0",
    "accelerate": "1.10.0",
    "peft": "0.18.0",
    "bitsandbytes": "0.46.1",
}
#: The releases on which users reported the bugs.
USERS = {
    "transformers": "5.6.2",
    "accelerate": "1.13.0",
    "peft": "0.19.1",
    "bitsandbytes": "0.49.2",
}
#: Releases with bugs that came after the users' releases and went before the newest ones.
MIDDLE = {**USERS, "transformers": "5.15.1"}
#: The newest releases on which the patches were measured: those of ``tools/measured/``.
NEWEST = {
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
}
#: The release of torch that the tests pin.
TORCH = "2.13.0"
#: The oldest supported release of torch, and the newest on which the patches were measured.
OLDEST_TORCH, NEWEST_TORCH = "2.8.0", "2.15.0"
#: The libraries without which nothing works.
REQUIRED = ("torch", "transformers")
#: The libraries that are patched.
LIBRARIES = tuple(FLOORS)
WITH_TORCH = ("torch", *LIBRARIES)
