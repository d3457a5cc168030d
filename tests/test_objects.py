"""Attributes that are replaced for one call are back after it, whatever other threads do."""

from __future__ import annotations

import copy
import os
import threading
from contextlib import suppress

import pytest
import torch

from gemma4_compat import objects
from gemma4_compat.objects import hidden, shadowed, variant
from tests.support import load_model, split
from tests.test_faults import Trace

LAYERS = {**{f"model.language_model.layers.{i}": "disk" for i in (1, 2, 4)}, "": "cpu"}


class Thing:
    value = "class"


def test_blocks_that_overlap():
    """The first block ends before the second."""
    thing = Thing()
    first, second = shadowed(thing, value=1), shadowed(thing, value=2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert thing.value == 2
    second.__exit__(None, None, None)
    assert vars(thing) == {}


def test_a_value_that_other_code_sets_stays():
    thing = Thing()
    with shadowed(thing, value=1):
        thing.value = "user's"
    assert thing.value == "user's"


def test_hidden_in_a_block():
    thing = Thing()
    thing.value = "own"
    with hidden(thing, "value", "absent"):
        assert thing.value == "class"
        with shadowed(thing, value=1):
            assert thing.value == 1
        assert thing.value == "class"
    assert vars(thing) == {"value": "own"}


def test_an_error():
    thing = Thing()
    with pytest.raises(KeyError), shadowed(thing, value=1):
        raise KeyError
    assert vars(thing) == {}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_another_threads_block():
    thing = Thing()
    inside, ends = threading.Event(), threading.Event()

    def block():
        with shadowed(thing, value=1):
            inside.set()
            ends.wait(60)

    thread = threading.Thread(target=block)
    thread.start()
    assert inside.wait(60)
    with shadowed(thing, value=2):
        child = os.fork()
        if child == 0:
            os._exit(0 if thing.value == 2 else 3)
    child_without = os.fork()
    if child_without == 0:
        os._exit(0 if vars(thing) == {} else 4)
    ends.set()
    thread.join()
    assert [os.waitpid(each, 0)[1] for each in (child, child_without)] == [0, 0]
    assert vars(thing) == {}


def test_a_variant():
    thing = Thing()
    thing.own = []
    other = variant(thing, value=1)
    assert (other.value, thing.value, type(other)) == (1, "class", Thing)
    assert other.own is thing.own


def test_saves_in_several_threads(model_dir, tmp_path):
    """The model keeps nothing of a save, and a copy of it saves its own weights."""
    model = split(load_model(model_dir), tmp_path / "offloaded", LAYERS)
    own, device_map = set(vars(model)), dict(model.hf_device_map)
    meeting = threading.Barrier(4, timeout=60)
    copies, errors = [], []

    def save(number):
        try:
            meeting.wait()
            if number == 3:
                copies.append(copy.deepcopy(model))
            model.save_pretrained(tmp_path / str(number), max_shard_size="200KB")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert set(vars(model)) == own
    assert model.hf_device_map == device_map
    (copied,) = copies
    norm = "model.language_model.norm.weight"
    with torch.no_grad():
        copied.get_parameter(norm).fill_(7.0)
    assert "state_dict" not in vars(copied)
    assert copied.state_dict()[norm][0] == 7.0
    copied.save_pretrained(tmp_path / "copy")
    reloaded = load_model(tmp_path / "copy")
    assert (reloaded.get_parameter(norm) == 7.0).all()
    for number in range(4):
        saved = load_model(tmp_path / str(number)).state_dict()
        assert all(
            torch.equal(saved[name], tensor)
            for name, tensor in load_model(model_dir).state_dict().items()
        )


def test_an_interrupt_at_any_line_leaves_no_attribute():
    thing = Thing()
    thing.first = "own"

    def block():
        with shadowed(thing, first=1, second=2):
            pass

    with Trace() as trace:
        block()
    points = [point for point in trace.points() if point.interrupts]
    assert len(points) > 30
    for point in points:
        with suppress(KeyboardInterrupt), Trace(point):
            block()
        assert vars(thing) == {"first": "own"}, point
        assert not objects._replaced, point
