"""Plan a model for one or more GPUs from ``config.json`` alone.

``plan`` returns sizes, a device map and code to paste.  It is also the command
``gemma4-compat plan MODEL_DIR --gpu 12GiB``.
"""

from .gpus import Gpu, parse_gpu, parse_size
from .planner import plan
from .result import Memory, Offload, Plan

__all__ = ["Gpu", "Memory", "Offload", "Plan", "parse_gpu", "parse_size", "plan"]
