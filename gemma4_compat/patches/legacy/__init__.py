"""Legacy: bugs that later releases do not have."""

from __future__ import annotations

#: Each patch: its former topic, whose name still names it, and the day after which the next version
#: leaves it out.  That is a year after PyPI's wheel of the first release with the fix was built.
PATCHES = {
    "audio_uint8_weights": ("images_and_sound", "2027-06-10"),  # transformers 5.11.0
    "experts_switch_overhead": ("generation", "2027-07-15"),  # transformers 5.14.0
    "full_attention_memory": ("attention", "2027-07-03"),  # transformers 5.13.0
    "hf_initialized_flag": ("offloading", "2027-06-11"),  # accelerate 1.14.0
    "image_block_mask": ("images_and_sound", "2027-07-03"),  # transformers 5.13.0
    "int8_params_move": ("offloading", "2026-10-29"),  # bitsandbytes 0.48.2
    "ple_mask_device": ("offloading", "2027-05-20"),  # transformers 5.9.0
    "sliding_cache_layers": ("generation", "2027-07-15"),  # transformers 5.14.0
    "unified_uint8_inputs": ("images_and_sound", "2027-07-03"),  # transformers 5.13.0
    "vision_uint8_pixels": ("images_and_sound", "2027-07-03"),  # transformers 5.13.0
}
