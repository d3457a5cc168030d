"""The next layer on the disk is in the page cache before it runs; the values are the same."""

from __future__ import annotations

import copy
import ctypes
import gc
import mmap
import os
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch

import gemma4_compat
from gemma4_compat.runtime.host import read_ahead
from tests.support import assert_same, load_model, logits, split

DECODER = "model.language_model.layers."
#: the decoder layers that the tests put on the disk
ON_DISK = range(1, 6)


def with_layers_on_disk(model, folder, layers=ON_DISK):
    """The last decoder layers in an offload folder, which has one file for each tensor."""
    return split(model, folder, {**{f"{DECODER}{i}": "disk" for i in layers}, "": "cpu"})


def in_checkpoint(model, model_dir):
    """The last decoder layers on the disk, in the checkpoint's own file."""
    from accelerate import dispatch_model

    file = str(Path(model_dir) / "model.safetensors")
    names = [n for n, _ in model.named_parameters() if n.startswith(DECODER)]
    index = {
        name: {"safetensors_file": file, "weight_name": name, "dtype": "bfloat16"}
        for name in names
        if int(name.removeprefix(DECODER).partition(".")[0]) in ON_DISK
    }
    return dispatch_model(
        model,
        {**{f"{DECODER}{i}": "disk" for i in ON_DISK}, "": "cpu"},
        main_device="cpu",
        offload_index=index,
        skip_keys=model._skip_keys_device_placement,
    )


def files_of(folder, layer):
    """The files of a layer that have at least one page."""
    files = [f for f in Path(folder).glob(f"{DECODER}{layer}.*.dat") if f.stat().st_size >= 4096]
    assert files
    return files


def cached(file):
    """The share of a file that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        mapped = mmap.mmap(opened.fileno(), size, flags=mmap.MAP_PRIVATE)  # writable: for ctypes
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    first = ctypes.c_char.from_buffer(mapped)
    address = ctypes.c_void_p(ctypes.addressof(first))
    failed = libc.mincore(address, ctypes.c_size_t(size), pages)
    del first
    mapped.close()
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages) / len(pages)


def evict(files):
    """Remove files from the page cache; skip the test if the file system keeps them in memory."""
    gc.collect()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if any(cached(file) for file in files):
        pytest.skip("this file system keeps its files in memory")


def in_cache(files, seconds=5.0):
    """Whether these files are completely in the page cache after some seconds at most."""
    end = time.monotonic() + seconds
    while not (complete := all(cached(file) == 1 for file in files)):
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return complete


def run_until(model, layer, action):
    """Run a forward, and call ``action`` between this decoder layer and the next."""
    module = model.get_submodule(f"{DECODER}{layer}")
    found = []
    handle = module.register_forward_hook(lambda *_: found.append(action()))
    logits(model, ["text"])
    handle.remove()
    return found[0]


def layers_of(model):
    hook = model.get_submodule(f"{DECODER}{ON_DISK[-1]}.mlp.up_proj")._hf_hook
    hooks = getattr(hook, "hooks", [hook])
    maps = [each.weights_map for each in hooks if getattr(each, "weights_map", None) is not None]
    return vars(maps[0].dataset).get("_layers_on_disk")


def finish(model):
    """Wait until the threads have read all that was requested."""
    for reader in layers_of(model).readers:
        reader.join(10)
        assert not reader.is_alive()


@pytest.mark.regression("disk_read_ahead", r"layer 3 is not in the page cache")
def test_the_next_layer_is_in_the_page_cache(model_dir, tmp_path):
    model = with_layers_on_disk(load_model(model_dir), tmp_path)
    evict([file for layer in ON_DISK for file in files_of(tmp_path, layer)])
    next_one, others = run_until(
        model,
        2,
        lambda: (in_cache(files_of(tmp_path, 3)), max(map(cached, files_of(tmp_path, 4)))),
    )
    assert next_one, "layer 3 is not in the page cache"
    assert not others, "only one layer is read ahead"


@pytest.mark.regression("disk_read_ahead", r"the first layer is not in the page cache")
def test_after_the_last_layer_comes_the_first(model_dir, tmp_path):
    model = with_layers_on_disk(load_model(model_dir), tmp_path)
    first = files_of(tmp_path, ON_DISK[0])
    run_until(model, ON_DISK[1], lambda: evict(first))
    assert in_cache(first), "the first layer is not in the page cache"


# Without a GPU, bitsandbytes cannot load single 8-bit layers from the disk.
@pytest.mark.parametrize("kind", [None, "nf4", "nf4-nested"])
def test_logits(model_dir, tmp_path, kind):
    expected = logits(load_model(model_dir, kind))
    model = with_layers_on_disk(load_model(model_dir, kind), tmp_path)
    for _ in range(2):
        evict([file for layer in ON_DISK for file in files_of(tmp_path, layer)])
        assert_same(logits(model), expected)
    assert layers_of(model).ranges


@pytest.mark.parametrize("kind", [None, "nf4", "nf4-nested", "int8"])
def test_the_whole_model_on_the_disk(model_dir, tmp_path, kind):
    from accelerate import disk_offload

    expected = logits(load_model(model_dir, kind))
    model = disk_offload(load_model(model_dir, kind), str(tmp_path), torch.device("cpu"))
    for _ in range(2):
        assert_same(logits(model), expected)
    stacks = layers_of(model).stacks
    assert [f"{DECODER}{i}" for i in range(6)] in stacks.values()
    assert len(stacks) > 1, "the towers' layers, too"


def test_layers_in_the_checkpoint(model_dir):
    expected = logits(load_model(model_dir))
    model = in_checkpoint(load_model(model_dir), model_dir)
    for _ in range(2):
        assert_same(logits(model), expected)
    layers = layers_of(model)
    assert layers.stacks == {DECODER.rstrip("."): [f"{DECODER}{i}" for i in ON_DISK]}


@pytest.mark.parametrize("place", ["checkpoint", "offload folder"])
def test_the_ranges_are_those_of_the_tensors(model_dir, tmp_path, place):
    whole = load_model(model_dir)
    values = {
        n: p.detach().view(torch.uint8).numpy().tobytes() for n, p in whole.named_parameters()
    }
    if place == "checkpoint":
        model = in_checkpoint(load_model(model_dir), model_dir)
    else:
        model = with_layers_on_disk(load_model(model_dir), tmp_path)
    layers, offsets = layers_of(model), {}
    located = [name for name in layers.index if name in values]
    assert len(located) > len(ON_DISK)
    for name in located:
        file, start, stop = layers.locate(name, layers.index[name], offsets)
        assert Path(file).read_bytes()[start:stop] == values[name]
    ranges = layers.located()
    assert {*ranges} == {f"{DECODER}{i}" for i in ON_DISK}
    if place == "checkpoint":
        sizes = {layer: sum(r.stop - r.start for r in each) for layer, each in ranges.items()}
        for layer, size in sizes.items():
            assert size >= sum(len(values[n]) for n in located if n.startswith(f"{layer}."))


def test_neighbours_are_read_together():
    gap = read_ahead._GAP
    parts = [("b", 0, 5), ("a", 10, 20), ("a", 0, 10), ("a", 20 + gap, 99 + gap)]
    parts.append(("a", 100 + 2 * gap, 101 + 2 * gap))
    merged = list(read_ahead._merged([read_ahead.Range(*part) for part in parts]))
    assert merged == [("a", 0, 99 + gap), ("a", 100 + 2 * gap, 101 + 2 * gap), ("b", 0, 5)]
    piece = read_ahead._PIECE
    pieces = list(read_ahead.Range("a", 3, 2 * piece + 4).split())
    assert pieces == [
        ("a", 3, 3 + piece),
        ("a", 3 + piece, 3 + 2 * piece),
        ("a", 3 + 2 * piece, 4 + 2 * piece),
    ]


def test_what_is_cached_is_not_read(model_dir, tmp_path):
    model = with_layers_on_disk(load_model(model_dir), tmp_path)
    logits(model, ["text"])
    finish(model)
    layers_of(model).readers = []
    logits(model, ["text"])
    assert layers_of(model).readers == []


@pytest.mark.parametrize("every", [1, 2])
def test_a_page_cache_without_room(model_dir, tmp_path, every):
    """Remove layers from the page cache before they run, as a system without free memory does."""
    model = with_layers_on_disk(load_model(model_dir), tmp_path)
    expected = logits(load_model(model_dir), ["text"])
    lost = list(ON_DISK)[::every]
    files = {model.get_submodule(f"{DECODER}{i}"): files_of(tmp_path, i) for i in lost}

    def lose(module, *_):
        finish(model)
        evict(files[module])

    for module in files:
        module.register_forward_pre_hook(lose)
    for _ in range(4):
        assert_same(logits(model, ["text"]), expected)
    layers_of(model).readers = []
    assert_same(logits(model, ["text"]), expected)
    assert layers_of(model).readers == []


def test_without_layers_on_the_disk(model_dir):
    from accelerate import cpu_offload

    model = cpu_offload(load_model(model_dir), torch.device("cpu"))
    assert_same(logits(model), logits(load_model(model_dir)))
    dataset = model.get_submodule(f"{DECODER}1.mlp.up_proj")._hf_hook.weights_map.dataset
    assert not hasattr(dataset, "_layers_on_disk")


def test_two_models_in_turn(model_dir, tmp_path):
    expected = logits(load_model(model_dir), ["text"])
    models = [
        with_layers_on_disk(load_model(model_dir), tmp_path / "one"),
        in_checkpoint(load_model(model_dir), model_dir),
    ]
    for _ in range(2):
        for model in models:
            assert_same(logits(model, ["text"]), expected)
    assert layers_of(models[0]) is not layers_of(models[1])


def test_copies(model_dir, tmp_path):
    expected = logits(load_model(model_dir), ["text"])
    model = with_layers_on_disk(load_model(model_dir), tmp_path)
    logits(model, ["text"])
    copied = copy.deepcopy(model)
    assert layers_of(copied) is None
    assert_same(logits(copied, ["text"]), expected)
    hook = model.get_submodule(f"{DECODER}2.mlp.up_proj")._hf_hook
    loader = pickle.loads(pickle.dumps(hook.weights_map.dataset))
    assert vars(loader)["_layers_on_disk"] is None
    assert_same(logits(model, ["text"]), expected)


def test_a_file_is_gone(model_dir, tmp_path):
    model = with_layers_on_disk(load_model(model_dir), tmp_path)
    for file in files_of(tmp_path, 3):
        file.unlink()
    with gemma4_compat.disabled("disk_read_ahead"), pytest.raises(FileNotFoundError) as without:
        logits(model, ["text"])
    with pytest.raises(FileNotFoundError) as found:
        logits(model, ["text"])
    assert str(found.value) == str(without.value)
    finish(model)


def test_a_strange_index(model_dir, tmp_path):
    """Entries that do not describe a tensor do not matter to those that do."""
    expected = logits(load_model(model_dir), ["text"])
    model = with_layers_on_disk(load_model(model_dir), tmp_path)
    (tmp_path / "damaged").write_bytes(b"no header")
    model.get_submodule(f"{DECODER}2.mlp.up_proj")._hf_hook.weights_map.dataset.index.update(
        {
            f"{DECODER}2.a": None,
            f"{DECODER}2.b": {"safetensors_file": str(tmp_path / "damaged")},
            f"{DECODER}2.c": {"safetensors_file": 3},
            f"{DECODER}2.d": {},
        }
    )
    assert_same(logits(model, ["text"]), expected)
    assert len(layers_of(model).ranges[f"{DECODER}2"]) >= len(files_of(tmp_path, 2))


def test_threads(model_dir, tmp_path):
    expected = logits(load_model(model_dir), ["text"])
    model = with_layers_on_disk(load_model(model_dir), tmp_path)
    found, barrier = [], threading.Barrier(2)

    def run():
        barrier.wait(60)
        found.extend(logits(model, ["text"]) for _ in range(3))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 6
    for each in found:
        assert_same(each, expected)


@pytest.mark.usefixtures("pristine")
def test_uninstalled_between_forwards(model_dir, tmp_path):
    expected = logits(load_model(model_dir))
    model = with_layers_on_disk(load_model(model_dir), tmp_path)
    assert_same(logits(model), expected)
    gemma4_compat.uninstall("disk_read_ahead")
    assert_same(logits(model), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(model_dir, language_adapter_dir, tmp_path, checkpointing):
    from peft import PeftModel

    from gemma4_compat.tiny import text_inputs

    def gradients(base):
        model = PeftModel.from_pretrained(base, language_adapter_dir, is_trainable=True)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model.train()
        inputs = text_inputs(base.config)
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients(load_model(model_dir))
    found = gradients(with_layers_on_disk(load_model(model_dir), tmp_path))
    assert found.keys() == expected.keys() != set()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_an_error_is_logged_once(model_dir, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no page cache")

    monkeypatch.setattr(read_ahead.DiskLayers, "enter", fail)
    expected = logits(load_model(model_dir), ["text"])
    model = with_layers_on_disk(load_model(model_dir), tmp_path)
    with caplog.at_level("INFO", "gemma4_compat"):
        for _ in range(2):
            assert_same(logits(model, ["text"]), expected)
    assert caplog.text.count("is not read ahead") == 1


def test_a_request_that_was_interrupted_is_made_again(model_dir, tmp_path, monkeypatch):
    model = with_layers_on_disk(load_model(model_dir), tmp_path, ON_DISK[-1:])
    layers, read, start = layers_of(model), [], threading.Thread.start

    def interrupted(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise KeyboardInterrupt

    monkeypatch.setattr(read_ahead, "_read", read.append)
    monkeypatch.setattr(read_ahead, "_is_cached", lambda ranges: bool(read))
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        logits(model, ["text"])
    logits(model, ["text"])
    finish(model)
    (ranges,) = layers.ranges.values()
    assert {piece.file for piece in read} == {each.file for each in ranges} != set()
    assert not layers.pieces
