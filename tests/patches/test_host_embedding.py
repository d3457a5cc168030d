"""An offloaded embedding looks up its rows on the host or on disk."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from unittest.mock import patch

import accelerate
import pytest
import torch
from packaging.version import Version
from torch import nn

import gemma4_compat
from gemma4_compat.runtime.host import page_locked
from gemma4_compat.runtime.host import table as table_module
from gemma4_compat.tiny import text_inputs
from tests.support import assert_same, load_model, logits, new_model, split

PLE = "model.language_model.embed_tokens_per_layer"
TOKENS = "model.language_model.embed_tokens"


def dispatched(model, folder, device_map, main_device="cpu", **options):
    from accelerate import dispatch_model

    return dispatch_model(
        model,
        {"": main_device, **device_map},
        main_device=main_device,
        offload_dir=str(folder),
        skip_keys=model._skip_keys_device_placement,
        **options,
    )


def table(model):
    return model.get_submodule(PLE)


def allocated(call):
    """The bytes of host memory that a call allocates in total, without memory-mapped files."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.key_averages() if event.key != "aten::from_file"]
    return sum(max(event.self_cpu_memory_usage, 0) for event in events)


#: The patch is for models with classes of this module.
GEMMA = "transformers.models.gemma4.modeling_gemma4"
Embedding = type("Embedding", (nn.Embedding,), {"__module__": GEMMA})


class Offloaded:
    """An embedding that is offloaded to the host or to disk, and a copy that is not offloaded."""

    def __init__(self, where, folder, make=Embedding, dtype=torch.bfloat16):
        from accelerate import cpu_offload, disk_offload

        torch.manual_seed(0)
        self.whole = make(5000, 64).to(dtype)
        self.embedding = copy.deepcopy(self.whole)
        if where == "disk":
            disk_offload(self.embedding, str(folder), execution_device="cpu")
        else:
            cpu_offload(self.embedding, execution_device=torch.device("cpu"))

    def check(self, ids):
        found, expected = self.embedding(ids), self.whole(ids)
        assert found.dtype == expected.dtype
        assert found.requires_grad == expected.requires_grad
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
        assert self.embedding.weight.is_meta


IDS = torch.tensor([[0, 4999, 7], [7, 7, 1]])


@pytest.mark.regression("host_embedding", r"bytes for 2 of 2000 rows")
def test_only_rows_are_read_from_disk(tmp_path):
    from accelerate import disk_offload

    embedding = Embedding(2000, 64)
    expected = embedding.weight[[3, 1999]].clone()
    disk_offload(embedding, str(tmp_path), execution_device="cpu")
    found = []
    spent = allocated(lambda: found.append(embedding(torch.tensor([3, 1999]))))
    assert torch.equal(found[0], expected)
    assert spent < 2000 * 64 * 4 / 10, f"{spent} bytes for 2 of 2000 rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("ids", [IDS, IDS.int(), IDS[0], IDS[:0], torch.tensor(3)])
def test_shapes_and_dtypes(tmp_path, where, ids, dtype):
    pair = Offloaded(where, tmp_path, dtype=dtype)
    for _ in range(2):
        pair.check(ids)
    with torch.no_grad():
        pair.check(ids)
    with torch.inference_mode():
        pair.check(ids)


class Scaled(nn.Embedding):
    """The forward reads the weight's dtype and device, as Gemma's does, and its values."""

    __module__ = GEMMA

    def forward(self, ids):
        scale = torch.tensor(3.0, device=self.weight.device).to(self.weight.dtype)
        return super().forward(ids) * scale + self.weight[0] + self.weight.sum()


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize(
    "make",
    [
        Scaled,
        lambda *size: Embedding(*size, padding_idx=7),
        lambda *size: Embedding(*size, max_norm=0.5),
        lambda *size: Embedding(*size).requires_grad_(False),
    ],
    ids=["scaled", "padding", "max_norm", "frozen"],
)
def test_kinds_of_embeddings(tmp_path, where, make):
    pair = Offloaded(where, tmp_path, make)
    pair.check(IDS)
    pair.check(IDS)


def test_a_replaced_function_of_torch_runs_once(tmp_path, monkeypatch):
    pair = Offloaded("cpu", tmp_path)
    original = nn.functional.embedding
    monkeypatch.setattr(nn.functional, "embedding", lambda *args: 2 * original(*args))
    pair.check(IDS)


@pytest.mark.parametrize("on", ["class", "instance"])
@pytest.mark.parametrize(
    "use",
    [
        copy.deepcopy,
        lambda weight: nn.Parameter(weight, requires_grad=False),
        lambda weight: torch.tensor(weight.tolist(), dtype=weight.dtype),
        lambda weight: weight if isinstance(weight, nn.Parameter) else 2 * weight,
    ],
)
def test_a_forward_of_the_user_gets_a_parameter(tmp_path, on, use):
    def forward(self, ids):
        return nn.functional.embedding(ids, use(self.weight))

    class Own(Embedding):
        pass

    Own.__module__, Own.forward = __name__, forward
    if on == "class":
        Offloaded("cpu", tmp_path, Own).check(IDS)
        return
    from accelerate import cpu_offload

    embedding = Embedding(50, 8)
    expected = embedding(IDS % 50)
    embedding.forward = forward.__get__(embedding)
    cpu_offload(embedding, execution_device=torch.device("cpu"))
    assert torch.equal(embedding(IDS % 50), expected)


def test_after_a_forward_that_raised(tmp_path):
    pair = Offloaded("cpu", tmp_path)
    with pytest.raises(IndexError):
        pair.embedding(torch.tensor([5000]))
    pair.check(IDS)


def test_who_loads_the_weight_gets_it(tmp_path):
    """Other code can load the weight through the hook, as PEFT does when it merges."""
    pair = Offloaded("disk", tmp_path)
    hook = pair.embedding._hf_hook
    hook.pre_forward(pair.embedding)
    assert torch.equal(pair.embedding.weight, pair.whole.weight)
    assert type(pair.embedding.weight) is nn.Parameter
    hook.post_forward(pair.embedding, torch.zeros(1))
    pair.check(IDS)


def test_deepcopy(tmp_path):
    pair = Offloaded("cpu", tmp_path)
    pair.check(IDS)
    copied = copy.deepcopy(pair.embedding)
    assert copied.weight.is_meta
    assert torch.equal(copied(IDS), pair.whole(IDS))


def test_deepcopy_after_an_interrupted_forward(tmp_path):
    pair = Offloaded("cpu", tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    with patch.object(nn.functional, "embedding", interrupt), pytest.raises(KeyboardInterrupt):
        pair.embedding(IDS)
    copied = copy.deepcopy(pair.embedding)
    assert copied.weight.is_meta
    assert torch.equal(copied(IDS), pair.whole(IDS))
    pair.check(IDS)


def test_interrupted_while_the_weight_is_put_back(tmp_path):
    """The next one who leaves, or the next forward, puts back what was not put back."""
    pair = Offloaded("cpu", tmp_path)
    leave = table_module._Lookups.leave.__code__
    first = leave.co_firstlineno
    for line in range(first + 1, max(line for *_, line in leave.co_lines() if line) + 1):

        def at_line(frame, event, arg, line=line):
            if frame.f_code is leave and event == "line" and frame.f_lineno == line:
                sys.settrace(None)
                raise KeyboardInterrupt
            return at_line

        sys.settrace(at_line)
        try:
            pair.embedding(IDS)
        except KeyboardInterrupt:
            pair.embedding._hf_hook.post_forward(pair.embedding, torch.zeros(1))
            assert type(pair.embedding.weight) is nn.Parameter, line - first
        finally:
            sys.settrace(None)
        pair.check(IDS)


@pytest.mark.skipif(Version(accelerate.__version__) < Version("1.13"), reason="breaks compiling")
def test_compiled(tmp_path):
    pair = Offloaded("cpu", tmp_path)
    compiled = torch.compile(pair.embedding, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(IDS), pair.whole(IDS))
    pair.check(IDS)


def test_uninstalled(tmp_path, pristine):
    pair = Offloaded("disk", tmp_path)
    pair.check(IDS)
    gemma4_compat.uninstall("host_embedding")
    pair.check(IDS)


@pytest.mark.parametrize("kind", [None, "nf4", "nf4-nested"])
@pytest.mark.parametrize("names", [[PLE], [PLE, TOKENS], [PLE, TOKENS, "lm_head"]])
def test_model(model_dir, tmp_path, kind, names):
    expected = logits(new_model(model_dir, kind))
    model = dispatched(new_model(model_dir, kind), tmp_path, dict.fromkeys(names, "disk"))
    for _ in range(2):
        assert_same(logits(model), expected)
        assert table(model).weight.is_meta


def test_model_from_its_own_checkpoint_file(model_dir, tmp_path):
    """transformers reads modules on "disk" from the safetensors file of the checkpoint."""

    expected = logits(new_model(model_dir))
    model = new_model(model_dir)
    files = {
        f"{PLE}.weight": {
            "safetensors_file": str(next(model_dir.glob("*.safetensors"))),
            "weight_name": f"{PLE}.weight",
            "dtype": "bfloat16",
        }
    }
    model = dispatched(model, tmp_path, {PLE: "disk"}, offload_index=files)
    assert_same(logits(model), expected)
    ids = torch.tensor([[1, 2]])
    bytes_of_table = table(model).weight.numel() * 2
    assert allocated(lambda: table(model)(ids)) < bytes_of_table / 10


def test_generate(model_dir, tmp_path):
    whole = new_model(model_dir)
    model = dispatched(new_model(model_dir), tmp_path, {PLE: "disk"})
    inputs = text_inputs(whole.config)
    for cache in ("dynamic", "static"):
        options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
        assert torch.equal(model.generate(**inputs, **options), whole.generate(**inputs, **options))


def test_adapter_and_training_step(model_dir, tmp_path, adapter_dir):
    from peft import PeftModel

    def gradients(base):
        model = PeftModel.from_pretrained(base, adapter_dir, is_trainable=True)
        inputs = text_inputs(base.config)
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    loss, expected = gradients(new_model(model_dir, "nf4"))
    split = dispatched(new_model(model_dir, "nf4"), tmp_path, {PLE: "disk"})
    found_loss, found = gradients(split)
    assert torch.equal(found_loss, loss)
    assert found.keys() == expected.keys() != set()
    assert not [name for name, grad in expected.items() if not torch.equal(found[name], grad)]
    assert table(split).weight.is_meta


def lora_on_the_embedding(base):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["embed_tokens_per_layer"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def test_adapter_on_the_embedding_itself(model_dir, tmp_path):
    expected = lora_on_the_embedding(new_model(model_dir))
    model = lora_on_the_embedding(dispatched(new_model(model_dir), tmp_path, {PLE: "disk"}))
    assert_same(logits(model), logits(expected))
    merged, expected = model.merge_and_unload(), expected.merge_and_unload()
    assert_same(logits(merged), logits(expected))


# -- on a GPU -----------------------------------------------------------------------------------


class Peak:
    """Measures the peak of the GPU memory in a block: ``bytes``, above the amount before it."""

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error):
        torch.cuda.synchronize()
        self.bytes = torch.cuda.max_memory_allocated() - self.before


@pytest.mark.cuda
@pytest.mark.regression("host_embedding", r"bytes on the GPU for 6 of 200000 rows")
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_rows_travel_to_the_gpu(tmp_path, where):
    whole = Embedding(200000, 64)
    model = nn.Sequential(whole, nn.Linear(64, 8))
    expected = copy.deepcopy(model).cuda()(IDS.cuda())
    from accelerate import dispatch_model

    model = dispatch_model(model, {"0": where, "1": 0}, main_device=0, offload_dir=tmp_path)
    for _ in range(2):
        with Peak() as peak:
            found = model(IDS.cuda())
        assert torch.equal(found, expected)
        spent = peak.bytes
        assert spent < 200000 * 64 * 4 / 10, f"{spent} bytes on the GPU for 6 of 200000 rows"


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("kind", [None, "nf4-nested"])
def test_model_on_the_gpu(model_dir, tmp_path, kind, where):
    inputs = text_inputs(new_model(model_dir).config)
    inputs = {name: tensor.to("cuda:0") for name, tensor in inputs.items()}
    options = {"max_new_tokens": 4, "do_sample": False}
    whole = load_model(model_dir, kind, {"": 0})
    expected, tokens = logits(whole), whole.generate(**inputs, **options)
    device_map = {PLE: where, TOKENS: where}
    model = dispatched(load_model(model_dir, kind, {"": 0}), tmp_path, device_map, main_device=0)
    for _ in range(2):
        assert_same(logits(model), expected)
    assert torch.equal(model.generate(**inputs, **options), tokens)
    assert table(model).weight.is_meta


@pytest.mark.cuda
def test_more_rows_than_are_staged_at_once(tmp_path):
    torch.manual_seed(0)
    whole = Embedding(3000, 2048)
    ids = torch.randint(0, 3000, (4, 2500), device="cuda:0")
    expected = copy.deepcopy(whole).cuda()(ids)
    from accelerate import dispatch_model

    model = nn.Sequential(whole, nn.Identity())
    model = dispatch_model(model, {"0": "cpu", "1": 0}, main_device=0)
    for _ in range(3):
        assert torch.equal(model(ids), expected)


@pytest.mark.cuda
def test_natural_map(model_dir):
    """The map is passed to from_pretrained, as in a user's script."""
    expected = logits(load_model(model_dir, None, {"": 0}))
    model = load_model(model_dir, None, {PLE: "cpu", "": 0})
    assert_same(logits(model), expected)
    assert table(model).weight.is_meta


def test_forward_that_raises_leaves_the_weight_at_rest(model_dir, tmp_path):
    """After an error, accelerate does not call ``post_forward``."""
    model = split(new_model(model_dir), tmp_path, {PLE: "disk", "": "cpu"})
    expected = logits(model)
    with pytest.raises((IndexError, RuntimeError)):
        table(model)(torch.tensor([[10**6]]))
    assert type(table(model).weight) is torch.nn.Parameter
    assert table(model).weight.is_meta
    assert_same(logits(model), expected)
    assert_same(logits(copy.deepcopy(model)), expected)


@pytest.mark.regression("host_embedding", r"must be Tensor, not NoneType|threads differ")
def test_two_threads_look_up_at_once(model_dir, tmp_path):
    model = split(new_model(model_dir), tmp_path, {PLE: "disk", "": "cpu"})
    embedding = table(model)
    ids = torch.arange(64)[None]
    with torch.no_grad():
        expected = embedding(ids)
    wrong, start = [], threading.Barrier(4)

    def look_up():
        start.wait()
        try:
            for _ in range(300):
                with torch.no_grad():
                    if not torch.equal(embedding(ids), expected):
                        wrong.append("other rows")
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=look_up) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong, f"threads differ: {wrong[0]}"
    assert embedding.weight.is_meta


def on_gpu(embedding):
    """Offload the embedding to the CPU, with a GPU as execution device."""
    from accelerate import dispatch_model

    model = dispatch_model(nn.Sequential(embedding, nn.Identity()), {"0": "cpu", "1": 0}, 0)
    return model, vars(model[0])["_hf_hook"]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_table_is_read_in_place(dtype):
    whole = Embedding(5000, 64, dtype=dtype)
    ids = torch.randint(0, 5000, (3, 70), device="cuda:0")
    expected = copy.deepcopy(whole).cuda()(ids)
    model, hook = on_gpu(whole)
    locked = page_locked.in_place_of(hook)
    assert locked.nbytes == 0, "page-locked while loading"
    model(ids)
    assert locked.nbytes == 0, "page-locked for a forward that records a graph"
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(ids), expected)
    assert locked.nbytes == 5000 * 64 * whole.weight.element_size()
    assert torch.equal(model(ids), expected)  # the same with an autograd graph


@pytest.mark.cuda
def test_lookup_does_not_wait_for_the_gpu():
    model, _ = on_gpu(Embedding(5000, 64))
    ids = torch.randint(0, 5000, (1, 7), device="cuda:0")
    with torch.no_grad():
        expected = model(ids)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = model(ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@pytest.mark.cuda
def test_page_locked_memory_is_given_back():
    ids = torch.zeros(1, 1, dtype=torch.long, device="cuda:0")
    embedding = Embedding(5000, 64)
    model, hook = on_gpu(embedding)
    with torch.no_grad():
        model(ids)
    memory = page_locked.host_tensor(hook.weights_map, "weight")
    assert memory.is_pinned()
    del model, hook, embedding
    gc.collect()
    assert not memory.is_pinned()


@pytest.mark.cuda
def test_memory_that_cannot_be_page_locked(caplog):
    """Rows go through the CPU, with one warning; the CUDA error does not affect later kernels."""
    embedding = Embedding(5000, 64)
    ids = torch.randint(0, 5000, (1, 7), device="cuda:0")
    expected = copy.deepcopy(embedding).cuda()(ids)
    model, hook = on_gpu(embedding)
    memory = page_locked.host_tensor(hook.weights_map, "weight")
    assert page_locked.page_lock(memory)  # CUDA does not lock memory twice
    page_locked._warn_pageable.cache_clear()
    with torch.no_grad(), caplog.at_level("WARNING", "gemma4_compat"):
        for _ in range(2):
            assert torch.equal(model(ids), expected)
    assert caplog.text.count("cannot be page-locked") == 1
    assert page_locked.in_place_of(hook).nbytes is None
    assert (torch.ones(3, device="cuda") + 1).sum() == 6


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_embedding_of_a_qat_checkpoint(tmp_path, monkeypatch, where, bits):
    """Its two tables are looked up where they are stored, and none is loaded."""
    quantized = pytest.importorskip("transformers.integrations.gemma_quant").QuantizedEmbedding
    packed = type("QuantizedEmbedding", (quantized,), {"__module__": GEMMA})

    def make(rows, width):
        table = packed(rows, width, torch.bfloat16, embed_scale=3.0, num_bits=bits)
        table.embedding_quantized.data.random_(-8 if bits == 8 else 0, 8)
        table.embedding_scale.data.uniform_(0.1, 1)
        return table.requires_grad_(False)

    offloaded = Offloaded(where, tmp_path, make, torch.float32)
    monkeypatch.setattr(table_module._host_table(), "load", None)
    for ids in ([[1, 4999, 1]], [[0]], [[-1, 3]]):
        offloaded.check(torch.tensor(ids))
        offloaded.check(torch.tensor(ids, dtype=torch.int32))
    assert offloaded.embedding.embedding_quantized.is_meta
    assert offloaded.embedding.embedding_scale.is_meta
    with pytest.raises(IndexError):
        offloaded.embedding(torch.tensor([5000]))
    assert offloaded.embedding.embedding_quantized.is_meta
