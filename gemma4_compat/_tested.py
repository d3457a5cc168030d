"""The newest releases that the patches were measured on: those of ``tests/matrix.json``."""

NEWEST = {
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
}
