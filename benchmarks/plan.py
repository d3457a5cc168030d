"""Compare ``plan`` with what a GPU measures, for models of true shapes with random weights.

``python -m benchmarks.plan OUT SHAPE[:LAYERS] ...`` appends a JSON line to OUT for each shape and
job: what was predicted and what was measured, in MiB.  A shape with a number of layers has only its
first layers, and a small vocabulary: compare two numbers of layers.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .checkpoint import config_of
from .measure import resident

_JOBS: tuple[dict[str, Any], ...] = (
    {"quant": "nf4", "context": 2048},
    {"quant": "nf4", "context": 16384},
    {"quant": "nf4", "context": 2048, "train": True},
    {"quant": "bf16", "context": 8192},
    {"quant": "int8", "context": 8192},
)
_MIB = 2**20


def measure(config: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What ``plan`` predicts and what the GPU measures, in MiB."""
    import torch

    from gemma4_compat.planning import plan

    folder = tempfile.mkdtemp()
    config.save_pretrained(folder)
    planned = plan(folder, "130GB", **job)
    kinds = ("weights", "adapter", "gradients", "optimizer", "kv_cache", "activations", "outside")
    predicted = {kind: planned.bytes_of(kind) / _MIB for kind in kinds}

    _clear()
    names = {"config": config, "state": dict(_weights(config))}
    code = planned.code.replace(
        f'    "{folder}",\n', "    None, config=config, state_dict=state,\n"
    )
    exec(code, names)
    model: Any = names["model"]
    del names
    torch.manual_seed(0)
    ids = torch.randint(5, 30000, (1, job["context"]), device=0)
    measured = (_train if job.get("train") else _generate)(model, ids)
    measured["outside"] = _used() - torch.cuda.memory_reserved() / _MIB
    total = sum(value for kind, value in predicted.items() if kind != "outside")
    return {
        **job,
        "predicted": {kind: round(value, 1) for kind, value in predicted.items()},
        "measured": {kind: round(value, 1) for kind, value in measured.items()},
        "predicted ÷ measured": round(total / measured["sum"], 4),
    }


def _generate(model: Any, ids: Any) -> dict[str, float]:
    import torch

    weights = _allocated()
    options = {"do_sample": False, "max_new_tokens": 1, "return_dict_in_generate": True}
    for _ in range(2):  # The second call finds all workspaces allocated.
        torch.cuda.reset_peak_memory_stats()
        result = model.generate(ids, prefill_chunk_size=2048, **options)
        peak = torch.cuda.max_memory_allocated() / _MIB - _workspaces()
        cache = _cache_bytes(result.past_key_values)
        del result
    torch.cuda.reset_peak_memory_stats()
    model.generate(ids, prefill_chunk_size=2048, cache_implementation="static", **options)
    static = torch.cuda.max_memory_allocated() / _MIB - _workspaces()
    return {
        "weights": weights,
        "kv_cache": cache,
        "activations": peak - weights - cache,
        "sum": max(peak, static),
        "sum, static": static,
    }


def _train(model: Any, ids: Any) -> dict[str, float]:
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapter = sum(parameter.nbytes for parameter in trained) / _MIB
    loaded = _allocated()
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    extra = {"mm_token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
    model.train()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids, use_cache=False, **extra).loss.backward()
        before = _allocated()
        optimizer.step()
        states = _allocated()
        optimizer.zero_grad()
        kept = _allocated()
        peak = torch.cuda.max_memory_allocated() / _MIB - _workspaces()
    gradients = states - kept
    return {
        "weights": loaded - adapter,
        "adapter": adapter,
        "gradients": gradients,
        "optimizer": kept - loaded,
        "activations": peak - before,
        "sum": peak,
    }


def _weights(config: Any) -> Iterator[tuple[str, Any]]:
    """Random weights on the CPU; tensors of one shape share their memory."""
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config).to(torch.bfloat16)
    tensors: dict[tuple[int, ...], Any] = {}
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if shape not in tensors:
            tensors[shape] = (
                torch.empty(shape, dtype=torch.bfloat16, device=0).normal_(0, 0.02).cpu()
                if len(shape) > 1
                else torch.ones(shape, dtype=torch.bfloat16)
            )
        if name != "lm_head.weight":  # tied to embed_tokens
            yield name, tensors[shape]


def _cache_bytes(cache: Any) -> float:
    storages = {
        storage.data_ptr(): storage.nbytes()
        for layer in cache.layers
        if layer.keys is not None  # None in layers that share another one's
        for storage in (layer.keys.untyped_storage(), layer.values.untyped_storage())
    }
    return sum(storages.values()) / _MIB


def _workspaces() -> float:
    """The memory of cuBLAS that PyTorch's allocator counts."""
    import torch

    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return (before - torch.cuda.memory_allocated()) / _MIB


def _allocated() -> float:
    return 1024 * (resident() or 0.0)


def _used() -> float:
    """What nvidia-smi shows."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.check_output(command, text=True).split()[0])


def _clear() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    import traceback

    import gemma4_compat  # noqa: F401

    out, *shapes = sys.argv[1:]
    for shape in shapes:
        for job in _JOBS[:3] if ":" in shape else _JOBS:
            try:
                line = {"shape": shape, **measure(config_of(shape), job)}
            except Exception as error:
                traceback.print_exc()
                line = {"shape": shape, **job, "error": repr(error)[:300]}
            _clear()
            print(json.dumps(line, ensure_ascii=False), flush=True)
            with Path(out).open("a") as lines:
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
