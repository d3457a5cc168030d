"""Lets the CPU stand in for a GPU: layers are streamed to it, and decode steps captured on it."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gemma4_compat.runtime.capture import conditions, graph
from gemma4_compat.runtime.host import blocks, page_locked, parts
from gemma4_compat.runtime.kernels import watch

#: The modules for which there is a GPU.
OURS = ("page_locked", "conditions")
registered: set[int] = set()  # addresses of page-locked memory


def tensors_in(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Graph(TorchDispatchMode):
    """A CUDA graph: records operations without running them; repeats them on the same addresses."""

    def __init__(self):
        super().__init__()
        self.calls, self.own, self.before, self.begun = [], set(), {}, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, writes = kwargs or {}, False
        for number, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes = True
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                for storage in (tensor.untyped_storage() for tensor in tensors_in(value)):
                    self.before.setdefault(storage._cdata, (storage, storage.clone()))
        output = function(*args, **kwargs)
        made = storages(output) - storages((args, kwargs))
        if function is torch.ops.aten.lift_fresh.default:  # a number of Python: kernels have it
            self.own |= storages(args)
        self.own |= made
        self.calls.append((function, args, kwargs, output if made and not writes else None))
        return output

    def capture_begin(self, **_):
        self.__enter__()
        self.begun = True

    def capture_end(self):
        """Restore what was written, and keep no tensor of others alive."""
        if not self.begun:
            raise RuntimeError("no capture has begun")
        self.begun = False
        self.__exit__(None, None, None)
        for storage, values in self.before.values():
            storage.copy_(values)
        self.before = {}
        self.calls = [
            (function, *tree_map_only(torch.Tensor, self.at_its_address, (args, kwargs)), result)
            for function, args, kwargs, result in self.calls
        ]

    def at_its_address(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata in self.own or not storage.nbytes():
            return tensor
        memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, *place)

    def replay(self):
        for function, args, kwargs, result in self.calls:
            output = function(*args, **kwargs)
            for old, new in zip(tensors_in(result), tensors_in(output), strict=False):
                old.copy_(new)


def storages(values):
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(values)}


class Generator(torch.Generator):
    def graphsafe_get_state(self):
        return self


class Event:
    def __init__(self, device, blocking):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass


class Driver:
    def cudaHostRegister(self, address, size, flags):
        registered.add(address)
        return 0

    def cudaHostUnregister(self, address):
        error = int(address not in registered)
        registered.discard(address)
        return error


def pretend(patch, streamed=True, in_place=False):
    stream = SimpleNamespace(
        wait_stream=lambda other: None,
        wait_event=lambda event: None,
        record_event=lambda: SimpleNamespace(synchronize=lambda: None),
        synchronize=lambda: None,
    )
    cuda = {
        "is_available": lambda: sys._getframe(1).f_globals["__name__"].endswith(OURS),
        "cudart": Driver,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: None,
        "Stream": lambda device: stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: stream,
        "CUDAGraph": Graph,
        "graph_pool_handle": object,
        "get_rng_state": lambda device: torch.get_rng_state(),
        "set_rng_state": lambda state, device: torch.set_rng_state(state),
        "default_generators": {None: SimpleNamespace(graphsafe_set_state=lambda state: None)},
    }
    for name, value in cuda.items():
        patch.setattr(torch.cuda, name, value)
    ours = __name__, "tests.pretended_streams"  # no code of a user
    patch.setattr(watch, "_ASIDE", (*watch._ASIDE, *ours))
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    patch.setattr(torch, "Generator", Generator)
    patch.setattr(torch, "Event", Event)
    patch.setattr(page_locked, "_forget_the_error", lambda: None)
    patch.setattr(blocks, "STREAMED_TO", ("cpu", "cuda") if streamed else ())
    recording = torch._C._len_torch_dispatch_stack
    for module in (blocks, parts):
        patch.setattr(module, "is_capturing", lambda device: recording() > 0)
    patch.setattr(blocks, "on_gpu", lambda host, device: host if in_place else None)
    patch.setattr(conditions, "CAPTURED_ON", ("cpu",))
    patch.setattr(graph, "_last_stream", {})
    patch.setattr(graph, "_PATIENCE", 600.0)  # a capture may take long on a machine at work
