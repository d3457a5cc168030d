"""Looks up rows of an offloaded embedding where its weight is stored."""

from __future__ import annotations

import copy
import os
import threading
from functools import cache
from typing import Any

from ...model.hooks import offload_hook
from ...objects import ForkableLock, NotCopied, View, attached
from .hooked import AfterForward, Way
from .page_locked import in_place_of

_ROWS = "_lookups"  # attribute of a hook
#: the tables of the packed embeddings of transformers' GemmaQuantizer
_PACKED = ("embedding_quantized", "embedding_scale")

#: Rows are gathered in parts of this size, while the previous part is copied.
_STAGED_BYTES = 16 * 2**20


class Rows(Way):
    """Embeddings look up rows where their weight is stored; see the patch ``host_embedding``."""

    def add(self, hook: Any, module: Any) -> None:
        if _names(module):
            _host_table()  # two threads that call it first at the same time would make two classes
            _lookups_of(hook)
            AfterForward(_put_back).attach(module)

    def at_work(self, hooks: list[Any]) -> str | None:
        count = sum(vars(hook).get(_ROWS) is not None for hook in hooks)
        return f"looks up rows of {count} offloaded embeddings in place" if count else None

    def pre_forward(self, original: Any, hook: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        names = _names(module)
        if not (hook.offload and names):
            return original(hook, module, *args, **kwargs)
        lookups = _lookups_of(hook)
        lookups.leave(module)
        tables = {n: _table_to_look_up(hook, module, n) if args or kwargs else None for n in names}
        if any(table is None for table in tables.values()):
            return original(hook, module, *args, **kwargs)
        result = original(hook, _without_weight(module), *args, **kwargs)
        lookups.enter(module, tables, hook)
        return result

    def post_forward(self, original: Any, hook: Any, module: Any, output: Any) -> Any:
        if hook.offload and _names(module):
            if _lookups_of(hook).leave(module):
                module = _without_weight(module)
        return original(hook, module, output)


def _put_back(module: Any) -> None:
    hook = offload_hook(module)
    if hook is not None:  # otherwise the module stays onloaded after its forward
        _lookups_of(hook).leave(module)


class _Lookups(NotCopied):
    """The threads that are in the forward of one embedding, and look up rows in its table."""

    def __init__(self) -> None:
        self.lock = ForkableLock()
        self.threads: set[int] = set()

    def enter(self, module: Any, tables: dict[str, Any], hook: Any) -> None:
        """Make the embedding look up rows in the tables, until this thread leaves."""
        with self.lock.now:
            self.threads.add(threading.get_ident())
            for name, table in tables.items():
                weight = module._parameters[name]
                if not isinstance(weight, _host_table()):
                    in_place = in_place_of(hook, name)
                    weight = _host_table()(table, weight, hook.execution_device, in_place)
                    module._parameters[name] = weight

    def leave(self, module: Any) -> bool:
        """End this thread's forward.  The last thread to leave puts the weight back.

        Returns whether this thread was in a forward.  That forward may have raised, in which case
        accelerate did not call ``post_forward``.
        """
        thread = threading.get_ident()
        with self.lock.now:
            if thread not in self.threads:
                return False
            for name in _names(module) if len(self.threads) == 1 else ():
                weight = module._parameters[name]
                module._parameters[name] = getattr(weight, "placeholder", weight)
            self.threads.discard(thread)  # last: after an interruption, leaving again does the rest
            return True


def _lookups_of(hook: Any) -> _Lookups:
    return attached(hook, _ROWS, _Lookups)  # type: ignore[no-any-return]


def _names(module: Any) -> tuple[str, ...]:
    """The parameters of an embedding in which rows are looked up; none of another module."""
    import torch

    if isinstance(module, torch.nn.Embedding):
        return ("weight",)
    return _PACKED if type(module).__name__ == "QuantizedEmbedding" else ()


def _without_weight(module: Any) -> Any:
    """A view of the module for a hook that must not load its weight."""
    return View(module, named_parameters=lambda *args, **kwargs: iter(()))


def _table_to_look_up(hook: Any, embedding: Any, name: str) -> Any | None:
    """The table, if its rows are to be looked up where it is stored; else ``None``."""
    import torch

    weight = getattr(embedding, name)  # only once, because another thread may replace it
    if (
        type(weight) not in (torch.nn.Parameter, _host_table())  # for example quantized
        or not getattr(weight, "placeholder", weight).is_meta
        or getattr(embedding, "max_norm", None) is not None  # a lookup changes the weight
        or hook.execution_device is None
        or torch.compiler.is_compiling()
        or not _has_known_forward(embedding)
    ):
        return None
    table = _stored(hook.weights_map, name)
    if table.shape != weight.shape:  # the embedding was resized
        return None
    tied = (hook.tied_params_map or {}).get(table.data_ptr(), {})
    return None if hook.execution_device in tied else table


def _has_known_forward(embedding: Any) -> bool:
    """Whether the forward is that of PyTorch or transformers.  A user's needs a true parameter."""
    kind, own = type(embedding), vars(embedding)
    # accelerate's hooks keep the module's own forward in ``_old_forward``.
    forward = own.get("_old_forward" if "_old_forward" in own else "forward")
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    is_own = forward is None or getattr(forward, "__func__", None) is kind.forward
    return is_own and owner.__module__.startswith(("torch.", "transformers."))


def _stored(weights_map: Any, name: str) -> Any:
    """The stored weight: in memory, or mapped from its file."""
    import torch

    loader: Any = getattr(weights_map, "dataset", None)
    key = getattr(weights_map, "prefix", "") + name
    index, folder = getattr(loader, "index", {}), getattr(loader, "save_folder", None)
    if folder is None or key in loader.state_dict or index[key].get("safetensors_file"):
        return weights_map[name].detach()  # safetensors maps its files into memory
    shape, dtype = index[key]["shape"], getattr(torch, index[key]["dtype"])
    file = os.path.join(folder, f"{key}.dat")
    size = torch.Size(shape).numel()
    return torch.from_file(file, shared=False, size=size, dtype=dtype).view(*shape)


@cache
def _host_table() -> type:
    import torch
    from torch.utils._pytree import tree_map_only

    class HostTable(torch.Tensor):  # type: ignore[misc]
        """Reports the execution device as its device; its values are in ``table``."""

        __torch_function__ = torch._C._disabled_torch_function_impl

        @staticmethod
        def __new__(cls: Any, table: Any, placeholder: Any, device: Any, in_place: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls,
                placeholder.shape,
                dtype=placeholder.dtype,
                device=torch.device(device),
                requires_grad=placeholder.requires_grad,
            )

        def __init__(self, table: Any, placeholder: Any, device: Any, in_place: Any) -> None:
            self.table, self.placeholder, self.in_place = table, placeholder, in_place

        def __deepcopy__(self, memo: Any) -> Any:
            """A copy of a model is in no forward.  An interrupted one leaves the table here."""
            return copy.deepcopy(self.placeholder, memo)

        @classmethod
        def __torch_dispatch__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.ops.aten.embedding.default and type(args[1]) is not cls:
                return args[0].rows(args[1]).to(args[0].dtype)
            if function is torch.ops.aten.index.Tensor and _is_lookup(cls, *args):
                [ids] = args[1]
                return args[0].rows(torch.where(ids < 0, ids + len(args[0].table), ids))
            loaded = tree_map_only(cls, cls.load, (args, kwargs or {}))
            return function(*loaded[0], **loaded[1])

        def rows(self, ids: Any) -> Any:
            """The rows of these token ids: shape of the ids x width, on the device of the ids."""
            table = None
            if self.in_place is not None and ids.device != self.table.device:
                table = self.in_place.on(self.table, ids.device)
            if table is None:
                return _rows(self.table, ids)
            return torch.ops.aten.embedding.default(table, ids)

        def load(self) -> Any:
            """The whole table on the execution device, copied once."""
            if self.table.device != self.device or self.table.dtype != self.dtype:
                self.table = self.table.to(self.device, self.dtype)
            return self.table

    return HostTable


def _is_lookup(cls: type, table: Any, indices: Any) -> bool:
    """Whether ``table[ids]`` indexes a host table by ids, and not by a mask."""
    import torch

    integers = (torch.int32, torch.int64)
    return type(table) is cls and len(indices) == 1 and indices[0].dtype in integers


def _rows(table: Any, ids: Any) -> Any:
    """``table[ids]`` on the device of ``ids``, for a table in host memory or on the disk."""
    import torch

    if table.device == ids.device:
        return torch.ops.aten.embedding.default(table, ids)
    rows = torch.empty(ids.numel(), table.shape[1], dtype=table.dtype, device=ids.device)
    lines = max(_STAGED_BYTES // (table.shape[1] * table.element_size()), 1)
    for part, target in zip(ids.flatten().cpu().split(lines), rows.split(lines), strict=True):
        # PyTorch caches pinned memory, and reuses it only after the copy has ended.
        staged = torch.empty(target.shape, dtype=table.dtype, pin_memory=ids.device.type == "cuda")
        torch.index_select(table, 0, part, out=staged)
        target.copy_(staged, non_blocking=True)
    return rows.view(*ids.shape, -1)
