"""Facts about a Gemma 4 model: its files, its parts, its sizes, and its placement on devices.

Patches, inspection, planning and merging use this package, and it uses none of them.
"""
