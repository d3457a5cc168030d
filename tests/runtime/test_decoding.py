"""The rules for captured steps, without a GPU: here a step runs the model instead of a graph."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

import gemma4_compat
from gemma4_compat.model.caches import cache_name
from gemma4_compat.patches.generation import captured_decoding
from gemma4_compat.runtime.capture import cache_memory, conditions, graph
from gemma4_compat.runtime.capture import decoding as steps
from gemma4_compat.runtime.capture.graph import CaptureFailed
from gemma4_compat.runtime.capture.snapshot import Snapshot
from gemma4_compat.tiny import text_inputs
from tests.pretended_gpu import Event
from tests.support import fails, load_model, new_model


class Step:
    """A captured step: it runs the model at its capture, and for each replay."""

    made = 0

    def __init__(self, model, device, cache, memory, leaves, names):
        type(self).made += 1
        self.model, self.names = model, names
        own = [tensor for layer in memory.layers for tensor in layer.tensors.values()]
        before = [tensor.clone() for tensor in own]
        with graph._counters_kept(cache):
            self.run(cache, leaves)
        for tensor, values in zip(own, before, strict=True):
            tensor.copy_(values)

    def run(self, cache, leaves):
        inputs = graph.unflattened(self.names, leaves)
        with graph.no_garbage_collection():  # it may call functions of others, as of hypothesis
            return self.model(**inputs, **{cache_name(): cache})

    def replay(self, cache, leaves, launch, tokens=1):
        output = self.run(cache, leaves)
        return lambda: output


@pytest.fixture(autouse=True)
def captured_on_cpu(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(conditions, "CAPTURED_ON", ("cpu",))
    monkeypatch.setattr(steps, "Step", Step)
    monkeypatch.setattr(Step, "made", 0)


@pytest.fixture
def model(model_dir):
    return new_model(model_dir)


def filled_cache(model, length=40):
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=length)
    with torch.no_grad():
        model(**text_inputs(model.config), past_key_values=cache)
    return cache


def decode(forward, cache, tokens=6, **inputs):
    """The logits of these decode steps."""
    with torch.no_grad():
        return torch.stack(
            [
                forward(input_ids=torch.tensor([[5 + n]]), **{cache_name(): cache}, **inputs).logits
                for n in range(tokens)
            ]
        )


def call(model, said=None, cache=None, **options):
    """One call of ``generate``: the logits of its steps equal those of the model alone."""
    cache = filled_cache(model) if cache is None else cache
    expected = decode(model, copy.deepcopy(cache), **options)
    decoder = steps.Decoder(model, (lambda why: None) if said is None else said.append)
    assert torch.equal(decode(decoder, cache, **options), expected)
    return decoder


def test_steps_are_captured(model):
    assert call(model).obstacle is None
    assert Step.made == 1


# -- errors of ours -------------------------------------------------------------------------------


#: What a step calls before its model, around it and to repeat it.
in_each_part = pytest.mark.parametrize(
    ("owner", "name"),
    [
        (steps, "Layers"),
        (steps, "ModelState"),
        (steps, "environment_now"),
        (steps, "unknown_input"),
        (steps, "flattened"),
        (steps, "kind_of"),
        (steps.Decoding, "memory_of"),
        (steps, "modules_of_a_step"),
        (steps, "lock_of"),
        (steps, "first_layers"),
        (steps, "in_capture"),
        (steps, "uses_of"),
        (steps, "Step"),
        (Step, "replay"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)


@in_each_part
def test_an_error_of_ours_is_a_reason_to_decode_eagerly(model, monkeypatch, owner, name):
    cache, said = filled_cache(model), []
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails(RuntimeError("Cannot access data pointer")))
        call(model, said, cache)
    assert len(set(said)) == 1
    assert "RuntimeError: Cannot access data pointer" in said[0]
    assert call(model).obstacle is None


@in_each_part
def test_an_error_of_the_user_is_raised(model, monkeypatch, owner, name):
    """That of a signal's handler, which may come anywhere: a step does not run a second time."""
    cache, said = filled_cache(model), []
    decoder = steps.Decoder(model, said.append)

    def limit(*args, **kwargs):
        raise TimeoutError("the user's")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, limit)
        with pytest.raises(TimeoutError, match=r"^the user's$"):
            decode(decoder, cache)
    assert not said
    assert call(model).obstacle is None


def test_an_error_before_the_first_step(model, monkeypatch, caplog):
    inputs = text_inputs(model.config)
    expected = model.generate(**inputs, max_new_tokens=3, cache_implementation="static")
    monkeypatch.setattr(captured_decoding, "may_capture", fails(RuntimeError("no settings")))
    with caplog.at_level(logging.WARNING, "gemma4_compat"):
        for _ in range(2):
            found = model.generate(**inputs, max_new_tokens=3, cache_implementation="static")
            assert torch.equal(found, expected)
    assert caplog.text.count("RuntimeError: no settings") == 1


@pytest.mark.parametrize("number", [0, 1], ids=["eager step", "capture"])
def test_errors_of_the_model_are_the_users(model, monkeypatch, number):
    norm = model.model.language_model.norm

    def fail(self, states):
        raise ValueError("the user's")

    cache, said = filled_cache(model), []
    decoder = steps.Decoder(model, said.append)
    if number:
        decode(decoder, cache, number)
    monkeypatch.setattr(type(norm), "forward", fail)
    with pytest.raises(ValueError, match=r"^the user's$"):
        decode(decoder, cache, 1)
    assert "forward" not in vars(norm)


def test_lent_memory_that_raises(model, monkeypatch):
    call(model)
    gc.collect()
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=40)
    steps.decoding_of(model).lend(cache, 1)
    fail = fails(RuntimeError("out of order"))
    monkeypatch.setattr(cache_memory._LentLayer, "lend_to", fail)
    with torch.no_grad():
        model(**text_inputs(model.config), past_key_values=cache)
    assert torch.equal(cache.layers[0].keys, filled_cache(model).layers[0].keys)


# -- what is tried again --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "calls"),
    [("OutOfMemoryError: CUDA out of memory", 4), ("ValueError: not in a graph", 1)],
)
def test_a_failed_capture(model, monkeypatch, why, calls):
    """Two attempts in each call if memory was short, else one in the first call."""
    tried, said = [], []

    def fail(*args):
        tried.append(args[2:3])
        raise CaptureFailed(why)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "Step", fail)
        call(model, said)
        call(model, said)
    assert len(tried) == calls
    assert set(said) == {why}
    call(model)
    assert Step.made == (calls > 1)


# -- other threads, and copies --------------------------------------------------------------------


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("number", [0, 1], ids=["eager step", "capture"])
def test_others_do_not_see_a_step(model, monkeypatch, number):
    """Not the states that other threads ask for, nor copies and pickles of the model."""
    mlp, actions = type(model.model.language_model.layers[0].mlp), []
    original = mlp.forward

    def forward(self, states):
        while actions:
            actions.pop()()
        return original(self, states)

    monkeypatch.setattr(mlp, "forward", forward)
    norm = model.model.language_model.norm
    add_hook_to_module(norm, AlignDevicesHook())
    cache, decoding = filled_cache(model), steps.decoding_of(model)
    expected = decode(model, copy.deepcopy(cache), 1)
    before, found = decoding.state(model), {}

    def look():
        found["state"] = in_a_thread(lambda: decoding.state(model))
        found["new"] = in_a_thread(lambda: steps.ModelState(model, before.environment))
        found["copy"] = copy.deepcopy(model)
        found["pickle"] = pickle.loads(pickle.dumps(model.model.language_model.layers[0]))

    decoder = steps.Decoder(model, pytest.fail)
    spare = copy.deepcopy(cache)
    if number:
        decode(decoder, cache, number)
    actions.append(look)
    decode(decoder, cache, 1)
    assert found["state"] is before
    assert found["new"].change(before.environment) is None
    with torch.no_grad():
        found["copy"].model.language_model.norm.weight.zero_()
    assert torch.equal(decode(model, copy.deepcopy(spare), 1), expected)
    assert not decode(found["copy"], spare, 1).any()
    states = torch.randn(1, 2, model.config.get_text_config().hidden_size, dtype=model.dtype)
    layer = model.model.language_model.layers[0]
    for name in ("input_layernorm", "mlp"):
        assert torch.equal(getattr(found["pickle"], name)(states), getattr(layer, name)(states))


# -- bounds ---------------------------------------------------------------------------------------


def test_memories_of_kept_caches_are_bounded(model):
    caches = [filled_cache(model) for _ in range(7)]
    for cache in caches:
        call(model, cache=cache)
    assert len(steps.decoding_of(model).memories) <= 4


def test_a_call_keeps_its_memory(model):
    """Other calls do not make it capture again."""
    decoders = [(steps.Decoder(model, pytest.fail), filled_cache(model)) for _ in range(7)]
    for _ in range(4):
        for decoder, cache in decoders:
            decode(decoder, cache, 1)
    assert Step.made == len(decoders)


def test_memory_is_dropped_if_its_holders_cannot_be_counted(model, monkeypatch):
    original = cache_memory._holders
    with monkeypatch.context() as patch:
        patch.setattr(cache_memory, "_holders", lambda tensor: original(tensor) + 1)
        cache_memory.can_count_holders.cache_clear()
        for _ in range(3):
            call(model)
            gc.collect()
        assert steps.decoding_of(model).memories == []
    cache_memory.can_count_holders.cache_clear()
    assert cache_memory.can_count_holders(torch.device("cpu"))
    # A device that PyTorch counts in another way: tensors on meta stand for it.
    with monkeypatch.context() as patch:
        more = {"meta": 1, "cpu": 0}
        patch.setattr(
            cache_memory, "_holders", lambda tensor: original(tensor) + more[tensor.device.type]
        )
        assert not cache_memory.can_count_holders(torch.device("meta"))
        assert cache_memory.can_count_holders(torch.device("cpu"))
    cache_memory.can_count_holders.cache_clear()


@pytest.mark.cuda
def test_the_holders_on_a_gpu_are_counted():
    assert cache_memory.can_count_holders(torch.device("cuda", 0))


def test_inputs_of_ever_new_kinds(model):
    cache, said = filled_cache(model), []
    decoder = steps.Decoder(model, said.append)
    length = text_inputs(model.config)["input_ids"].shape[1]
    with torch.no_grad():
        for n in range(1, 8):
            mask = torch.ones(1, length + n, dtype=torch.long)
            decoder(input_ids=torch.tensor([[7]]), attention_mask=mask, **{cache_name(): cache})
    assert set(said) == {"its steps have inputs of ever new kinds"}
    assert len(decoder.state.warm) == 3


def test_a_hook_between_two_tokens(model):
    cache, said = filled_cache(model), []
    decoder = steps.Decoder(model, said.append)
    decode(decoder, cache, 3)
    state = decoder.state
    torch.ones(1, requires_grad=True).register_hook(lambda gradient: None)
    decode(decoder, cache, 1)
    assert (decoder.state, said) == (state, [])
    handle = model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    expected = decode(model, copy.deepcopy(cache), 1)
    assert torch.equal(decode(decoder, cache, 1), expected)
    assert said == ["lm_head has a forward hook"]
    handle.remove()


def test_an_adapter_switched_between_two_tokens(model, adapter_dir, second_adapter_dir):
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(model, adapter_dir)
    adapted.load_adapter(second_adapter_dir, "second")
    decoder, cache = steps.Decoder(model, pytest.fail), filled_cache(model)
    decode(decoder, cache, 3)
    states = [decoder.state]
    for switch in (adapted.set_adapter, adapted.base_model.merge_adapter):
        switch(*["second"] if switch == adapted.set_adapter else [])
        decode(decoder, cache, 1)
        states.append(decoder.state)
    with adapted.disable_adapter():
        decode(decoder, cache, 1)
        states.append(decoder.state)
    assert len(set(states)) == 4


def test_layers_that_are_merged_one_after_the_other(model, adapter_dir):
    """As another thread merges them, while a step is captured after the first."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    PeftModel.from_pretrained(model, adapter_dir)
    decoder, cache = steps.Decoder(model, pytest.fail), filled_cache(model)
    modules = model.model.language_model.modules()
    first, *others = (layer for layer in modules if isinstance(layer, LoraLayer))
    states = []
    for layers in ((), (first,), others):
        for layer in layers:
            layer.merge()
        decode(decoder, cache, 3)
        states.append(decoder.state)
    assert len(set(states)) == 3


def other_adapter(model, adapted):
    context = adapted.disable_adapter()  # as around the forward of a reference model
    return context.__enter__, partial(context.__exit__, None, None, None)


def other_weight(model, adapted):
    norm = model.model.language_model.layers[1].input_layernorm
    weights = norm.weight, torch.nn.Parameter(2 * norm.weight)
    return [partial(setattr, norm, "weight", weight) for weight in reversed(weights)]


def other_mode(model, adapted):
    return model.train, model.eval


def other_forward(model, adapted):
    norm = model.model.language_model.layers[1].input_layernorm
    return partial(setattr, norm, "forward", lambda x: x), partial(delattr, norm, "forward")


@pytest.mark.parametrize("is_back", [True, False], ids=["and back", ""])
@pytest.mark.parametrize("change", [other_adapter, other_weight, other_mode, other_forward])
def test_a_change_by_another_thread_during_a_capture(
    model, adapter_dir, monkeypatch, change, is_back
):
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(model, adapter_dir)
    mlp, actions = type(model.model.language_model.layers[0].mlp), []
    names = {"original": mlp.forward, "actions": actions}
    code = """
def forward(self, states):
    actions and actions.pop(0)()
    return original(self, states)
"""
    # the name of a file of the package: no code of a user
    exec(compile(code, steps.__file__, "exec"), names)
    monkeypatch.setattr(mlp, "forward", names["forward"])
    cache, said = filled_cache(model), []
    decoder = steps.Decoder(model, said.append)
    decode(decoder, cache, 1)
    do, undo = change(model, adapted)
    actions.append(do)
    if is_back:
        actions.append(undo)
    decode(decoder, cache, 1)
    assert said == ["other code changed the model during a capture"]
    if not is_back:
        undo()
    made = Step.made
    assert call(model).obstacle is None  # the next call is captured
    assert Step.made == made + 1


def test_graphs_and_kinds_are_bounded():
    entries = {}
    for number in range(9):
        steps._put(entries, number, None, 4)
    assert list(entries) == [5, 6, 7, 8]


def test_a_layer_with_unknown_state_is_not_lent(model, monkeypatch):
    """A release may count tokens in an attribute that this package does not know."""
    original = StaticLayer.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.tokens, self.name = 0, "a layer"

    monkeypatch.setattr(StaticLayer, "__init__", init)
    for count in (3, 0):
        cache = filled_cache(model)
        memory = steps.decoding_of(model).memory_of(cache)
        cache.layers[0].tokens = count
        if count:
            steps.decoding_of(model).memories.clear()
            memory = steps.decoding_of(model).memory_of(cache)
        del cache
        gc.collect()
        other = StaticCache(config=model.config.get_text_config(), max_cache_len=40)
        steps.decoding_of(model).lend(other, 1)
        with torch.no_grad():
            model(**text_inputs(model.config), past_key_values=other)
        assert other.layers[0].tokens == 0
        assert memory.is_in(other) is (count == 0)
        del other
        steps.decoding_of(model).memories.clear()
        gc.collect()


@pytest.mark.parametrize("way", ["hook", "list", "method", "closure"])
def test_a_snapshot_keeps_no_module_alive(way):
    root, inner = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    if way == "hook":
        add_hook_to_module(inner, AlignDevicesHook())
    elif way == "list":
        vars(root)["others"] = [inner]
    elif way == "method":
        vars(root)["call"] = inner.forward
    else:
        vars(root)["call"] = partial(lambda module, states: module(states), inner)
    snapshot = Snapshot([root, inner])
    assert snapshot.change() is None
    seen = weakref.ref(inner.weight)
    vars(root).pop("others", None)
    vars(root).pop("call", None)
    del inner
    gc.collect()
    assert seen() is None
    assert snapshot.change() is not None


def transposed(layer):
    layer.weight.data = layer.weight.data.t()


def other_values(layer):
    layer.scale.data = torch.ones(1)


def other_number(layer):
    layer.scale.fill_(2.0)


def other_buffer(layer):
    layer.offset.fill_(2.0)


def other_number_at_its_address(layer):
    array = layer.scale.numpy()
    layer.scale = None
    array[0] = 2.0
    layer.scale = torch.from_numpy(array)


def other_argument(layer):
    layer.by.args[0].fill_(2.0)


def other_keywords(layer):
    layer.act.keywords["min"] = 0.5


def other_threshold(layer):
    layer.state.threshold = 6.0


def other_scales(layer):
    layer.state.SCB.data = torch.ones(2)


def other_code(layer):
    function.__code__ = (lambda x: 2 * x).__code__


def swapped(layer):
    torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(torch.ones(4, 4)))


def function(x):
    return x


@pytest.mark.parametrize(
    "change",
    [
        transposed,
        other_values,
        other_number,
        other_buffer,
        other_number_at_its_address,
        other_argument,
        other_keywords,
        other_threshold,
        other_scales,
        other_code,
        swapped,
    ],
)
def test_a_change_in_place(change):
    from bitsandbytes import MatmulLtState

    layer = torch.nn.Linear(4, 4)
    layer.scale, layer.act = torch.zeros(1), partial(torch.clamp, min=0.1)
    layer.state = MatmulLtState(SCB=torch.zeros(2))
    layer.register_buffer("offset", torch.zeros(2))
    layer.by = partial(torch.mul, torch.tensor(2.0))
    layer.by.args[0].fill_(3.0)
    snapshot = Snapshot([layer])
    snapshot.add({(0, "function"): (globals(), "function", function, "the tests")})
    code = function.__code__
    assert snapshot.change() is None
    try:
        change(layer)
        assert snapshot.change() is not None
    finally:
        function.__code__ = code


# -- what is left alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_8_bit_layers_with_an_outlier_threshold(model_dir, monkeypatch, caplog, batch):
    """They count outliers on the CPU: each step stays eager, and one line says how to change it."""
    inputs = text_inputs(new_model(model_dir).config, batch=batch)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "cache_implementation": "static"}
    monkeypatch.setattr(captured_decoding, "may_capture", lambda *args: True)
    model = new_model(model_dir, "int8")
    with gemma4_compat.disabled("captured_decoding"):
        expected = model.generate(**inputs, **options)
    with caplog.at_level(logging.WARNING, "gemma4_compat"):
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **options), expected)
    assert Step.made == 0
    (line,) = [each.getMessage() for each in caplog.records if "eagerly" in each.getMessage()]
    assert "its 8-bit layers search their inputs for outliers" in line
    assert "BitsAndBytesConfig(llm_int8_threshold=0.0) turns the search off" in line
    model = load_model(model_dir, "int8", llm_int8_threshold=0.0)
    model.generate(**inputs, **options)
    assert Step.made == 1


def test_the_garbage_collector_stays_off_while_any_gpu_captures():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with graph.no_garbage_collection():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    before = gc.get_threshold()
    with graph.no_garbage_collection():
        thread.start()
        assert inside.wait(60)
    assert not collects()
    leave.set()
    thread.join()
    assert collects()
    assert gc.get_threshold() == before


def collects():
    """Whether the collector runs by itself while objects are made."""
    before = sum(each["collections"] for each in gc.get_stats())
    made = [[] for _ in range(10 * 700)]
    return bool(made) and sum(each["collections"] for each in gc.get_stats()) > before


def test_other_threads_may_switch_the_garbage_collector():
    """What they want is true after the capture, and lets nothing into it."""
    try:
        with graph.no_garbage_collection():
            gc.disable()
        assert not gc.isenabled()
        with graph.no_garbage_collection():
            gc.enable()
            assert not collects()
        assert gc.isenabled()
        assert collects()
    finally:
        gc.enable()


def test_other_threads_may_set_the_threshold_of_the_garbage_collector():
    before = gc.get_threshold()
    try:
        with graph.no_garbage_collection():
            gc.set_threshold(321)
        assert gc.get_threshold() == (321, *before[1:])
        gc.set_threshold(0)
        with graph.no_garbage_collection():
            pass
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_gpus_do_not_wait_for_each_other():
    device = torch.device("cuda", 0)

    def other_gpu():
        with graph._turn(graph._captures, torch.device("cuda", 1)):
            return True

    with graph._turn(graph._captures, device), graph._turn(graph._replays, device):
        assert in_a_thread(other_gpu)


def test_a_handler_of_a_signal_during_a_step(monkeypatch):
    """It may generate, or wait for another thread that does: that one decodes eagerly then."""
    monkeypatch.setattr(graph, "_PATIENCE", 0.1)
    device = torch.device("cuda", 0)

    def turn():
        with contextlib.suppress(graph.NotCaptured), graph._turn(graph._replays, device):
            return "has its turn"
        return "has none"

    with graph._turn(graph._replays, device):
        assert (turn(), in_a_thread(turn)) == ("has its turn", "has none")
    assert in_a_thread(turn) == "has its turn"
