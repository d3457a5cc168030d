"""What is known of a Gemma 4 model: its files, its parts, its sizes, and how it is placed.

The ground floor: patches, inspection, planning and merging stand on it, and it uses none of them.
"""
