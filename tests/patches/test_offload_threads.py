"""Several threads can run one model with offloaded modules."""

from __future__ import annotations

import copy
import linecache
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

import gemma4_compat
from gemma4_compat.runtime.host import blocks, forward_lock
from tests.conftest import WITHOUT
from tests.support import logits, new_model, split

LAYERS = {**{f"model.language_model.layers.{i}": "disk" for i in (1, 2, 4)}, "": "cpu"}
DISTURBED = r"meta|differs from that of one thread|PYTORCH_NVML_BASED_CUDA_CHECK"
THREADS = 2


@pytest.fixture(autouse=True)
def _frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def prompt(number):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 500, (1, 6 + number % 5), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generated(model, number):
    return model.generate(**prompt(number), max_new_tokens=4, eos_token_id=None)


def offloaded_linear(model):
    return model.model.language_model.layers[1].mlp.down_proj


@contextmanager
def meeting(module):
    """Make the threads meet in an offloaded module once, so that the bug does not depend on chance.

    One thread waits until the other has left and the weights stay on meta.  With the lock of
    the patch, the threads cannot meet; after the timeout they do not wait again.
    """
    barrier = threading.Barrier(THREADS, timeout=30 if WITHOUT else 1)
    forward, met = module._old_forward, []

    def meets(*args, **kwargs):
        with suppress(threading.BrokenBarrierError):
            waits = not met and barrier.wait()
            met.append(True)
            end, on_meta = time.monotonic() + 20, 0
            while waits and on_meta < 20 and time.monotonic() < end:
                time.sleep(0.01)
                on_meta = on_meta + 1 if next(module.parameters()).is_meta else 0
        return forward(*args, **kwargs)

    module._old_forward = meets
    yield
    module._old_forward = forward


def in_threads(call, calls=2, threads=THREADS):
    """The results of ``call(0), call(1)...``; the threads run the calls in turn."""
    results, errors = {}, []

    def work(first):
        try:
            for number in range(first, calls * threads, threads):
                results[number] = call(number)
        except Exception as error:  # an exception in a thread would be lost
            errors.append(error)

    started = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]
    return [results[number] for number in range(calls * threads)]


def assert_as_in_one_thread(call, calls=2, meet=None):
    expected = [call(number) for number in range(calls * THREADS)]
    with nullcontext() if meet is None else meeting(meet):
        found = in_threads(call, calls)
    for number, each in enumerate(found):
        assert torch.equal(each, expected[number]), f"{number} differs from that of one thread"


def layers_on_disk(model, folder):
    return split(model, folder, LAYERS)


def all_on_disk(model, folder):
    return disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def all_on_cpu(model, folder):
    return cpu_offload(model, execution_device=torch.device("cpu"))


def shows(**other):
    return pytest.mark.regression("offload_threads", DISTURBED, **other)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(None, marks=shows(), id="bf16"),
        pytest.param("nf4-nested", marks=shows(behind="hf_initialized_flag"), id="nf4"),
    ],
)
def test_generate(model_dir, tmp_path, kind):
    model = layers_on_disk(new_model(model_dir, kind), tmp_path)
    linear = offloaded_linear(model)
    assert_as_in_one_thread(lambda number: generated(model, number), calls=4, meet=linear)


@pytest.mark.slow
def test_generate_many_times(model_dir, tmp_path):
    """The threads meet anywhere."""
    model = layers_on_disk(new_model(model_dir), tmp_path)
    assert_as_in_one_thread(lambda number: generated(model, number), calls=15)


def test_one_offloaded_module(model_dir):
    model = new_model(model_dir)
    cpu_offload(model.model.language_model.layers[1].mlp, execution_device=torch.device("cpu"))
    assert_as_in_one_thread(lambda number: generated(model, number), meet=offloaded_linear(model))


@pytest.mark.parametrize("offload", [all_on_disk, all_on_cpu])
def test_generate_without_a_device_map(model_dir, tmp_path, offload):
    """Without the patches, such a model cannot generate in one thread either."""
    model = offload(new_model(model_dir), tmp_path)
    assert_as_in_one_thread(lambda number: generated(model, number), meet=offloaded_linear(model))


@pytest.mark.regression("offload_threads", DISTURBED, behind="peft_redispatch")
def test_with_an_adapter(model_dir, language_adapter_dir, tmp_path):
    peft = pytest.importorskip("peft")
    model = layers_on_disk(new_model(model_dir), tmp_path)
    linear = offloaded_linear(model)
    model = peft.PeftModel.from_pretrained(model, language_adapter_dir).eval()
    assert_as_in_one_thread(lambda number: generated(model, number), meet=linear)


@pytest.mark.parametrize("path", ["model.language_model", "model.language_model.layers.1.mlp"])
def test_parts_of_the_model(model_dir, tmp_path, path):
    """The part is called directly: a call of the model locks all its modules."""
    model = layers_on_disk(new_model(model_dir), tmp_path)
    part, linear = model.get_submodule(path), offloaded_linear(model)

    def call(number):
        with torch.no_grad():
            if path.endswith("mlp"):
                values = torch.randn(1, 200, 128, generator=torch.Generator().manual_seed(number))
                return part(values.to(torch.bfloat16))
            return part(**prompt(number), use_cache=False).last_hidden_state

    assert_as_in_one_thread(call, meet=linear)


@pytest.mark.regression("offload_threads", DISTURBED, behind="peft_redispatch")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(model_dir, language_adapter_dir, tmp_path, checkpointing):
    """Checkpointing runs layers again in the backward pass, outside of the model's forward."""
    peft = pytest.importorskip("peft")
    model = layers_on_disk(new_model(model_dir), tmp_path)
    linear = offloaded_linear(model)
    model = peft.PeftModel.from_pretrained(model, language_adapter_dir, is_trainable=True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    weights = [p for p in model.parameters() if p.requires_grad]

    def call(number):
        inputs = prompt(number)
        inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        return torch.cat([each.flatten() for each in found if each is not None])

    assert_as_in_one_thread(call, meet=linear)


@pytest.mark.regression("offload_threads", DISTURBED)
def test_a_copy(model_dir, tmp_path):
    model = copy.deepcopy(layers_on_disk(new_model(model_dir), tmp_path))
    assert_as_in_one_thread(lambda number: generated(model, number), meet=offloaded_linear(model))


def test_an_error_gives_the_lock_back(model_dir, tmp_path):
    model = layers_on_disk(new_model(model_dir), tmp_path)
    expected = logits(model, ["text"])["text"]
    mlp = model.model.language_model.layers[1].mlp

    def fail(*args):
        raise KeyError("users")

    handle = mlp.down_proj.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="users"):
        logits(model, ["text"])
    handle.remove()
    found = in_threads(lambda number: logits(model, ["text"])["text"])
    assert all(torch.equal(each, expected) for each in found)


def test_an_error_inside_the_forward_of_an_offloaded_module(model_dir, tmp_path, monkeypatch):
    """It calls the model, which fails.  Then it still has its own weights."""
    monkeypatch.setattr(blocks, "STREAMED_TO", ("cpu", "cuda"))
    model = all_on_cpu(new_model(model_dir), tmp_path)
    expected, linear, errors = text(model), offloaded_linear(model), []
    forward, first = linear._old_forward, model.model.language_model.layers[0].mlp.down_proj

    def fails(*args, **kwargs):
        raise KeyError("users")

    def calls(*args, **kwargs):
        if not errors:
            before, first._old_forward = first._old_forward, fails
            errors.append(True)
            with pytest.raises(KeyError):
                text(model)
            first._old_forward = before
        return forward(*args, **kwargs)

    linear._old_forward = calls
    assert torch.equal(text(model), expected)
    assert errors


def test_a_hook_that_calls_the_model(model_dir, tmp_path):
    """The hook runs inside the model's forward, in the same thread."""
    model = layers_on_disk(new_model(model_dir), tmp_path)
    expected = logits(model, ["text"])["text"]
    inner = []

    def call(module, args, output):
        if not inner:
            inner.append(None)
            inner[0] = logits(model, ["text"])["text"]

    handle = model.model.language_model.layers[2].register_forward_hook(call)
    found = logits(model, ["text"])["text"]
    handle.remove()
    assert torch.equal(found, expected)
    assert torch.equal(inner[0], expected)


def test_a_stream_of_text(model_dir, tmp_path):
    """The tokens come from a thread that generates, while this thread waits."""
    model = layers_on_disk(new_model(model_dir), tmp_path)
    expected = generated(model, 0)[0, prompt(0)["input_ids"].shape[1] :].tolist()
    tokens = []

    class Streamer:
        def put(self, value):
            tokens.extend(value.flatten().tolist())
            assert logits(model, ["text"])  # as a user's callback may do

        def end(self):
            tokens.append("end")

    work = threading.Thread(
        target=model.generate,
        kwargs={**prompt(0), "max_new_tokens": 4, "eos_token_id": None, "streamer": Streamer()},
        daemon=True,
    )
    work.start()
    work.join(timeout=300)
    assert tokens[-5:] == [*expected, "end"]


def test_models_do_not_wait_for_each_other():
    """Each forward waits for that of the other model; with a common lock, they would never end."""
    meeting = threading.Barrier(2, timeout=60)

    class Meets(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, values):
            meeting.wait()
            return values * self.weight

    modules = [Meets(), Meets()]
    for module in modules:
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", offload=True))

    def run(module):
        with torch.no_grad():
            module(torch.ones(2))

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not meeting.broken


def text(model):
    return logits(model, ["text"])["text"]


def test_a_worker_inside_a_forward(model_dir, tmp_path):
    """A hook waits for workers that run other layers of the model."""
    model = layers_on_disk(new_model(model_dir), tmp_path)
    expected = text(model)
    layers = model.model.language_model.layers
    values = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    mlps = [layers[number].mlp for number in (2, 4)]
    alone = [mlp(values) for mlp in mlps]
    results = []

    def hook(module, args, output):
        with ThreadPoolExecutor(2) as pool, torch.no_grad():
            results.append(list(pool.map(lambda mlp: mlp(values), mlps)))

    handle = layers[1].mlp.down_proj.register_forward_hook(hook)
    for _ in range(2):
        (found,) = in_threads(lambda number: text(model), calls=1, threads=1)
        assert torch.equal(found, expected)
    handle.remove()
    assert len(results) == 2
    assert all(torch.equal(a, b) for found in results for a, b in zip(found, alone, strict=True))
    assert all(torch.equal(each, expected) for each in in_threads(lambda number: text(model)))


def test_models_that_call_each_other(model_dir, tmp_path):
    models = [layers_on_disk(new_model(model_dir), tmp_path / name) for name in "ab"]
    expected = text(models[0])
    both = threading.Barrier(2, timeout=60)
    inner, handles = {}, []

    def calls(own, other):
        def hook(module, args, output):
            if own not in inner:
                inner[own] = None
                both.wait()
                inner[own] = text(models[other])

        return hook

    for own, other in ((0, 1), (1, 0)):
        linear = offloaded_linear(models[own])
        handles.append(linear.register_forward_hook(calls(own, other)))
    found = in_threads(lambda number: text(models[number]), calls=1)
    assert all(torch.equal(each, expected) for each in [*found, *inner.values()])


@pytest.mark.parametrize("place", ["module", "hook"])
def test_a_merge_during_a_forward(model_dir, tmp_path, monkeypatch, place):
    """It waits: the weights on the device are a copy that the end of the forward discards.

    Between two modules it waits, too: one forward does not add an adapter that is merged.
    """
    from peft import LoraConfig, get_peft_model

    model = layers_on_disk(new_model(model_dir).float(), tmp_path)
    layer = offloaded_linear(model)
    adapted = get_peft_model(
        model, LoraConfig(target_modules=r".*layers\.1\.mlp\.down_proj", init_lora_weights=False)
    )
    expected, inside, goes_on, found = text(adapted), threading.Event(), threading.Event(), []
    forward = layer._old_forward
    monkeypatch.setattr(forward_lock, "_PATIENCE", 0.05, raising=False)

    def waits(*args, **kwargs):
        inside.set()
        goes_on.wait(60)
        return forward(*args, **kwargs) if place == "module" else None

    if place == "module":
        layer._old_forward = waits
    else:
        hook = layer.register_forward_pre_hook(waits)
    runs = threading.Thread(target=lambda: found.append(text(adapted)), daemon=True)
    runs.start()
    assert inside.wait(60)
    if place == "module":
        layer._old_forward = forward
    else:
        hook.remove()
    merges = threading.Thread(target=adapted.merge_adapter, daemon=True)
    merges.start()
    merges.join(0.5)
    assert merges.is_alive()
    goes_on.set()
    for thread in (runs, merges):
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for ever"
    assert found
    assert torch.equal(found[0], expected)
    assert adapted.base_model.model.model.language_model.layers[1].mlp.down_proj.merged
    torch.testing.assert_close(text(adapted), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_during_a_forward(model_dir, tmp_path):
    model = layers_on_disk(new_model(model_dir), tmp_path)
    expected = text(model)
    inside, forked = threading.Event(), threading.Event()

    def hook(module, args, output):
        inside.set()
        forked.wait(60)

    handle = model.model.language_model.layers[0].register_forward_hook(hook)
    work = threading.Thread(target=text, args=(model,), daemon=True)
    work.start()
    assert inside.wait(60)
    child = os.fork()
    if child == 0:
        handle.remove()
        os._exit(0 if torch.equal(text(model), expected) else 3)
    forked.set()
    end = time.monotonic() + 60
    status = (0, 0)
    while status[0] == 0 and time.monotonic() < end:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    if status[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    work.join(60)
    assert status == (child, 0), "the child waits for ever, or computes something else"


def test_an_interrupt_leaves_no_lock(model_dir, tmp_path):
    """A ``KeyboardInterrupt`` at each line of the lock's own code.

    Python itself raises it after calls, so not where ``with`` and ``try`` begin and end.
    """
    model = layers_on_disk(new_model(model_dir), tmp_path)
    expected = text(model)
    lines = 0

    def interrupt_at(wanted):
        def trace(frame, event, argument):
            nonlocal lines
            path, number = frame.f_code.co_filename, frame.f_lineno
            if not path.endswith("forward_lock.py"):
                return trace if event == "call" else None
            source = linecache.getline(path, number).strip()
            if event == "line" and not source.startswith(("with ", "try:")):
                lines += 1
                if lines == wanted:
                    raise KeyboardInterrupt
            return trace

        return trace

    for wanted in range(1, 30):
        lines = 0
        sys.settrace(interrupt_at(wanted))
        try:
            text(model)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        lock = model._hf_hook._forward_lock
        for each in (lock.turn, lock.weights):
            assert not each.now._is_owned(), f"line {wanted} leaves a lock"
        assert torch.equal(text(model), expected)
    assert lines >= 29


def reading(model, seconds):
    """The model's down_proj reads from a slow disk; returns how many threads read, at each read."""
    hook, inside, most = offloaded_linear(model)._hf_hook, [], []

    class Slow(type(hook.weights_map)):
        def __getitem__(self, name):
            inside.append(name)
            most.append(len(inside))
            time.sleep(seconds)
            inside.remove(name)
            return super().__getitem__(name)

    hook.weights_map.__class__ = Slow
    return most


@pytest.mark.parametrize(
    ("seconds", "quick"), [(1, True), pytest.param(65, False, marks=pytest.mark.slow)]
)
def test_a_slow_disk(model_dir, tmp_path, monkeypatch, seconds, quick):
    """The other thread waits for one read as long as it takes: it neither goes on nor raises."""
    if quick:
        for name in ("_PATIENCE", "_LOOK", "_WAITS", "_STANDS_STILL"):
            monkeypatch.setattr(forward_lock, name, 0.05, raising=False)
        monkeypatch.setattr(forward_lock, "_HOPELESS", 1, raising=False)
    model = layers_on_disk(new_model(model_dir), tmp_path)
    expected, most = text(model), reading(model, seconds)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(text(model)), daemon=True) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert len(found) == 2
    assert all(torch.equal(each, expected) for each in found)
    assert set(most) == {1}, "two threads load the weights of one module"


def test_a_wait_for_ever_is_an_error(model_dir, tmp_path, monkeypatch):
    """A user's forward of an offloaded module waits for a thread that runs the same model."""
    monkeypatch.setattr(forward_lock, "_PATIENCE", 0.05)
    monkeypatch.setattr(forward_lock, "_HOPELESS", 6)
    model = layers_on_disk(new_model(model_dir), tmp_path)
    expected, linear = text(model), offloaded_linear(model)
    forward, errors = linear._old_forward, []

    def waits(*args, **kwargs):
        if not errors:
            with ThreadPoolExecutor(1) as pool:
                errors.append(pool.submit(text, model).exception(timeout=60))
        return forward(*args, **kwargs)

    linear._old_forward = waits
    assert torch.equal(text(model), expected)
    assert type(errors[0]) is gemma4_compat.DeadlockError
    for word in ("Linear", "may wait for this thread", "GEMMA4_COMPAT_OFFLOAD_THREADS=0"):
        assert word in str(errors[0])
    assert torch.equal(text(model), expected)


def test_a_hook_that_waits_for_the_whole_model(model_dir, tmp_path, monkeypatch):
    """Threads that call the model go on without a turn, and do not wait again for the same hook."""
    model = layers_on_disk(new_model(model_dir), tmp_path)
    expected, inner, took = text(model), [], []

    def hook(module, args, output):
        if not took:
            took.append(-time.monotonic())
            with ThreadPoolExecutor(2) as pool:
                inner.extend(pool.map(lambda number: text(model), range(6)))
            took[0] += time.monotonic()

    handle = model.model.language_model.layers[1].mlp.register_forward_hook(hook)
    found = text(model)
    handle.remove()
    assert all(torch.equal(each, expected) for each in (found, *inner))
    assert took[0] < 3 * 2.5, "each call waits for the turn"


def test_the_next_thread_starts_at_once(model_dir, tmp_path):
    """It does not poll: it runs as soon as the lock is free."""
    model = layers_on_disk(new_model(model_dir), tmp_path)
    lock = model._hf_hook._forward_lock
    took = []

    def waits():
        with lock.in_turn():
            took.append(time.monotonic())

    for _ in range(20):
        thread = threading.Thread(target=waits)
        with lock.in_turn():
            thread.start()
            time.sleep(0.02)
            took.append(-time.monotonic())
        thread.join()
    assert min(map(sum, zip(took[::2], took[1::2], strict=True))) < 0.0003


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_the_end_of_a_forward_leaves_the_layers_of_other_threads(
    model_dir, tmp_path, monkeypatch, end
):
    """It comes after the lock: another thread may be about to read its copy of a layer."""
    monkeypatch.setattr(blocks, "STREAMED_TO", ("cpu", "cuda"))
    model = all_on_cpu(new_model(model_dir), tmp_path)
    expected = text(model)
    view, begun, ended = blocks.OffloadedLayer.view, threading.Event(), threading.Event()
    found, last = [], model.model.language_model.layers[5].mlp.down_proj

    def waits(layer, piece):
        if threading.current_thread() is other and not begun.is_set():
            begun.set()
            ended.wait(1)
        return view(layer, piece)

    def start(*_):
        if other.ident is None:
            other.start()

    def after(*_):  # before the hook of the package
        if threading.current_thread() is not other:
            assert begun.wait(60)
            if end == "raises":
                raise KeyError("users")

    other = threading.Thread(target=lambda: found.append(text(model)), daemon=True)
    monkeypatch.setattr(blocks.OffloadedLayer, "view", waits)
    last.register_forward_hook(start)
    model.register_forward_hook(after, prepend=True)
    with pytest.raises(KeyError) if end == "raises" else nullcontext():
        text(model)
    ended.set()
    other.join(60)
    assert torch.equal(found[0], expected)


def test_models_without_offloaded_modules_have_no_lock(model_dir, tmp_path):
    model = split(new_model(model_dir), tmp_path, {"model": "cpu", "": "cpu"})
    assert not hasattr(model, "_hf_hook")
    model = layers_on_disk(new_model(model_dir), tmp_path)
    idle = model.model.language_model.layers[0].mlp.down_proj
    assert not hasattr(idle._hf_hook, "_forward_lock")
    remove_hook_from_module(model, recurse=True)
    assert not [m for m in model.modules() if isinstance(vars(m).get("forward"), partial)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_forward_that_raises_leaves_no_weights(model_dir, tmp_path, error):
    """accelerate would mistake one of them for a tied weight that was at its address before."""
    model = split(new_model(model_dir), tmp_path, LAYERS)
    offloaded = {name for name, each in model.named_parameters() if each.is_meta}
    expected = logits(model)
    module = model.model.language_model.layers[2].mlp.down_proj

    def failing(*args, **kwargs):
        raise error

    before = module._old_forward
    module._old_forward = failing
    with pytest.raises(error):
        logits(model)
    module._old_forward = before
    left = [name for name, each in model.named_parameters() if not each.is_meta]
    assert not offloaded.intersection(left), "weights stay after a forward that raised"
    found = logits(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
