"""Lets what a second stream writes stay unseen until another stream waits for it.

The CPU stands in for a GPU (`pretended_gpu`).  Within ``torch.cuda.stream(side)``, operations run
at once, but the memory that they wrote gets its old values back, or none, when the context ends.  A
stream that waits for the side stream, or for one of its events, gets the new values.  Memory of
others that the side stream reads must live until then, or be recorded for it (``record_stream``).
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_compat.runtime.capture import drafts, graph
from tests.pretended_gpu import tensors_in


class Side(TorchDispatchMode):
    """A stream whose writes are seen late."""

    def __init__(self):
        super().__init__()
        self.written = {}  # address -> size, old bytes, reference; since the last wait
        self.new = {}  # address -> bytes, where a wait is missing
        self.read, self.recorded = [], set()
        self.waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [tensor.untyped_storage() for tensor in tensors_in((args, kwargs or {}))]
        given = [storage for storage in given if storage.nbytes()]
        for storage in given:
            if storage.data_ptr() not in self.written:
                self.read.append((function, StorageWeakRef(storage), storage._cdata))
        for number, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(args[number] if number < len(args) else kwargs):
                    self.note(tensor.untyped_storage(), is_new=False)
        output = function(*args, **(kwargs or {}))
        known = {storage._cdata for storage in given}
        for storage in (tensor.untyped_storage() for tensor in tensors_in(output)):
            if storage._cdata not in known:
                self.note(storage, is_new=True)
        return output

    def note(self, storage, is_new):
        address, size = storage.data_ptr(), storage.nbytes()
        if size and (is_new or address not in self.written):
            old = b"\x7f" * size if is_new else ctypes.string_at(address, size)
            self.written[address] = size, old, StorageWeakRef(storage)

    def alive(self):
        return {at: entry for at, entry in self.written.items() if not entry[2].expired()}

    def values(self):
        return {at: ctypes.string_at(at, size) for at, (size, _, _) in self.alive().items()}

    @contextlib.contextmanager
    def current(self):
        put({at: value for at, value in self.new.items() if at in self.alive()})
        with self:
            yield
        self.new = self.values()
        put({address: old for address, (_, old, _) in self.alive().items()})

    def record_event(self):
        held = {address: entry[2] for address, entry in self.alive().items()}
        event = SimpleNamespace(values=self.values(), held=held)
        event.synchronize = lambda: self.is_waited_for(event)
        return event

    def wait_stream(self, other): ...

    def synchronize(self):
        self.is_waited_for()

    def is_waited_for(self, event=None):
        """Another stream sees what was written, or what was written before an event."""
        alive, self.waits = self.alive(), self.waits + 1
        freed = {
            str(f) for f, each, own in self.read if each.expired() and own not in self.recorded
        }
        assert not freed, f"memory was freed before {freed} had read it"
        if event is not None:  # what was not freed since
            same = [at for at, held in event.held.items() if at in alive and alive[at][2] is held]
            return put({at: event.values[at] for at in same})
        put({address: value for address, value in self.new.items() if address in alive})
        self.written, self.new, self.read, self.recorded = {}, {}, [], set()
        return None


def put(values):
    for address, value in values.items():
        ctypes.memmove(address, value, len(value))


def pretend_side_stream(patch):
    """After ``pretend``: drafts have a stream of their own."""
    side, current, modes = Side(), [], torch._C._len_torch_dispatch_stack

    def wait_stream(other):
        if other is side:
            side.is_waited_for()

    main = SimpleNamespace(
        wait_stream=wait_stream, wait_event=side.is_waited_for, synchronize=lambda: None
    )

    @contextlib.contextmanager
    def stream(own):
        with side.current() if own is side else contextlib.nullcontext():
            current.append(own)
            hidden = sum(each is side for each in current)  # this mode is no user's
            try:
                with patch.context() as inner:
                    inner.setattr(torch._C, "_len_torch_dispatch_stack", lambda: modes() - hidden)
                    yield
            finally:
                current.pop()

    original = drafts.stream_for
    for module in (drafts, graph):
        patch.setattr(
            module,
            "stream_for",
            lambda use, device: side if use == "drafts" else original(use, device),
        )
    patch.setattr(
        torch.cuda, "current_stream", lambda device=None: current[-1] if current else main
    )
    patch.setattr(torch.cuda, "stream", stream)
    patch.setattr(
        torch.Tensor,
        "record_stream",
        lambda self, own: own is side and side.recorded.add(self.untyped_storage()._cdata),
    )
    return side
