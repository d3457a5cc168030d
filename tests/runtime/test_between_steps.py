"""The names of transformers that decide whether only its own functions run between two steps."""

from __future__ import annotations

import asyncio
import queue

import pytest
import transformers
from packaging.version import Version
from transformers.generation import logits_process, stopping_criteria, streamers
from transformers.models.gemma4 import modeling_gemma4

from gemma4_compat.runtime.capture import between_steps
from gemma4_compat.versions import NEWEST

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version(NEWEST["transformers"]),
    reason="older releases lack some names",
)


@pytest.mark.parametrize("name", between_steps._METHODS)
def test_a_method_of_the_model(name):
    assert callable(getattr(modeling_gemma4.Gemma4ForConditionalGeneration, name))


@pytest.mark.parametrize("name", [*between_steps._LISTS, *between_steps._STATELESS])
def test_a_processor_or_criterion(name):
    """A name that transformers gives up is taken off the list."""
    found = getattr(logits_process, name, None) or getattr(stopping_criteria, name)
    assert callable(found.__call__)
    assert found.__module__.startswith("transformers.generation.")


def test_those_that_may_leave_no_token_are_allowed_otherwise():
    assert {*between_steps._BANNING} < {*between_steps._STATELESS}


@pytest.mark.parametrize("name", between_steps._STREAMERS)
def test_a_streamer(name):
    kind = getattr(streamers, name)
    assert all(callable(getattr(kind, each)) for each in ("put", "end", "on_finalized_text"))


def test_queues_of_streamers():
    """What puts a text into them."""
    used = {"TextIteratorStreamer": queue.Queue, "AsyncTextIteratorStreamer": asyncio.Queue}
    assert {kind.__module__ for kind in used.values()} == {*between_steps._QUEUES}
    assert {"text_queue"} < {*streamers.TextIteratorStreamer.__init__.__code__.co_names}
    every = {name for kind in used.values() for name in vars(kind)}
    assert {*between_steps._PUTS} <= every
