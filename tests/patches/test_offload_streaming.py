"""Each offloaded decoder layer goes to the GPU in one copy, and computes the same as before."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import gemma4_compat
from gemma4_compat.runtime.host import blocks, parts
from gemma4_compat.tiny import text_inputs
from tests.support import assert_same, load_model, logits, new_model, with_layers_on_the_cpu

KINDS = pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
FIRST, LAST = "model.language_model.layers.1.", "model.language_model.layers.4."


@pytest.fixture
def cpu_streams(monkeypatch):
    """Stream layers from the CPU to the CPU; only CUDA streams and page-locking are left out."""
    monkeypatch.setattr(blocks, "STREAMED_TO", ("cpu", "cuda"))


def offloaded(model, folder=None):
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def dispatches():
    gc.collect()
    return list(blocks.dispatches.values())


def layers_of(model, module=f"{FIRST}self_attn.q_proj"):
    module = model.get_submodule(module)
    hook = getattr(module, "base_layer", module)._hf_hook
    parts = (vars(each).get("_streamed_part") for each in getattr(hook, "hooks", [hook]))
    return next(part.layer.dispatch for part in parts if part is not None)


def on_device(model):
    return [name for name, layer in layers_of(model).layers.items() if layer.on_device]


@KINDS
@pytest.mark.usefixtures("cpu_streams")
def test_logits(model_dir, kind):
    expected = logits(new_model(model_dir, kind))
    model = offloaded(new_model(model_dir, kind))
    for _ in range(3):
        assert_same(logits(model), expected)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not on_device(model)
    blocks = [layer for layer in layers_of(model).layers.values() if layer.host is not None]
    assert len(blocks) > len(model.model.language_model.layers), "the vision tower's, too"


@pytest.mark.usefixtures("cpu_streams")
def test_three_layers_at_a_time(model_dir):
    model = offloaded(new_model(model_dir, "nf4"))
    seen = []

    def look(module, *_):
        seen.append([name.rpartition(".")[2] for name in on_device(model)])

    for layer in model.model.language_model.layers:
        layer.mlp.register_forward_pre_hook(look)
    logits(model, ["text"])
    count = len(model.model.language_model.layers)
    expected = [[str(j) for j in range(i, min(i + 3, count))] for i in range(count)]
    assert seen == expected


@pytest.mark.usefixtures("cpu_streams")
def test_weights_are_in_memory_once(model_dir):
    model = offloaded(new_model(model_dir, "nf4"))
    logits(model, ["text"])
    layers = layers_of(model)
    for layer in layers.layers.values():
        for part in layer.parts:
            for name, pieces in part.pieces.items():
                for piece in pieces.values():
                    assert piece.host.untyped_storage().data_ptr() == layer.host.data_ptr()
                assert layers.tensors[part.prefix + name] is pieces[""].host


@pytest.mark.usefixtures("cpu_streams")
@pytest.mark.parametrize("kind", [None, "int8"])
def test_other_layers(model_dir, kind):
    expected = logits(new_model(model_dir, kind))
    model = offloaded(new_model(model_dir, kind))
    for _ in range(2):
        assert_same(logits(model), expected)
    assert any(layer.host is not None for layer in layers_of(model).layers.values())
    assert not on_device(model)


def before_blocks(monkeypatch, call):
    """Call this before each allocation of a block on the device."""
    empty_like = torch.empty_like

    def empty(tensor, **options):
        if tensor.dtype == torch.uint8 and list(options) == ["device"]:
            call()
        return empty_like(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", empty)


@pytest.mark.parametrize("kind", [None, "nf4-nested", "int8"])
@pytest.mark.parametrize("room", [2, 1, 0], ids="room for {} layers".format)
@pytest.mark.usefixtures("cpu_streams")
def test_no_room_for_layers(model_dir, monkeypatch, kind, room):
    """With little GPU memory no layer is copied ahead; with none, accelerate copies each tensor."""
    expected = logits(new_model(model_dir, kind))
    model = offloaded(new_model(model_dir, kind))

    def limited():
        if sum(bool(layer.on_device) for layer in layers_of(model).layers.values()) >= room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    before_blocks(monkeypatch, limited)
    for _ in range(2):
        assert_same(logits(model), expected)
    assert layers_of(model).alone or room == 0
    assert (layers_of(model).layers[FIRST.rstrip(".")].refused is None) == (room > 0)
    assert all(parameter.is_meta for parameter in model.parameters())


def failing_to_copy(monkeypatch, error, ahead):
    calls = []

    def fails():
        calls.append(None)
        if (len(calls) > 1) is ahead:
            raise error

    before_blocks(monkeypatch, fails)


@pytest.mark.usefixtures("cpu_streams")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("text", ["an illegal memory access was encountered", "invalid function"])
def test_the_errors_of_other_kernels_are_raised(model_dir, monkeypatch, text, ahead):
    """CUDA reports the error of a kernel at a later call: this is no lack of memory."""
    expected = logits(new_model(model_dir), ["text"])
    model = offloaded(new_model(model_dir))
    with monkeypatch.context() as context:
        failing_to_copy(context, RuntimeError(f"CUDA error: {text}"), ahead)
        with pytest.raises(RuntimeError, match=text):
            logits(model, ["text"])
    assert_same(logits(model, ["text"]), expected)
    assert not layers_of(model).alone


@pytest.mark.usefixtures("cpu_streams")
@pytest.mark.parametrize("ahead", [False, True])
def test_other_errors_are_told_once(model_dir, monkeypatch, caplog, ahead):
    """Accelerate copies the layer; the next forward tries again."""
    parts._say.cache_clear()
    caplog.set_level("INFO", "gemma4_compat")
    expected = logits(new_model(model_dir), ["text"])
    model = offloaded(new_model(model_dir))
    with monkeypatch.context() as context:
        failing_to_copy(context, KeyError("renamed"), ahead)
        for _ in range(2):
            assert_same(logits(model, ["text"]), expected)
    lines = [each.getMessage() for each in caplog.records if "renamed" in each.getMessage()]
    assert len(lines) == 1
    assert "KeyError" in lines[0]
    assert not layers_of(model).alone
    assert_same(logits(model, ["text"]), expected)
    assert layers_of(model).layers[FIRST.rstrip(".")].refused is None


@KINDS
@pytest.mark.usefixtures("cpu_streams")
def test_generate(model_dir, kind):
    inputs = text_inputs(new_model(model_dir).config)
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = new_model(model_dir, kind).generate(**inputs, **options)
    model = offloaded(new_model(model_dir, kind))
    assert torch.equal(model.generate(**inputs, **options), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["nf4", None, "int8"])
@pytest.mark.usefixtures("cpu_streams")
def test_training_after_inference_mode(model_dir, language_adapter_dir, kind, checkpointing):
    from peft import PeftModel

    inputs = text_inputs(new_model(model_dir).config)

    def gradients(base):
        model = PeftModel.from_pretrained(base, language_adapter_dir, is_trainable=True)
        if base.lm_head.weight.is_meta:  # a forward packs the weights of a whole model
            with torch.inference_mode():
                model(**inputs)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model.train()
        for _ in range(2):
            model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients(new_model(model_dir, kind))
    found = gradients(offloaded(new_model(model_dir, kind)))
    assert found.keys() == expected.keys() != set()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.usefixtures("cpu_streams")
def test_a_merged_adapter_is_kept(model_dir, language_adapter_dir):
    from peft import PeftModel

    def merged(base):
        logits(base, ["text"]) if base.lm_head.weight.is_meta else None
        return PeftModel.from_pretrained(base, language_adapter_dir).merge_and_unload()

    expected = logits(merged(new_model(model_dir, "nf4")))
    model = merged(offloaded(new_model(model_dir, "nf4")))
    for _ in range(2):
        assert_same(logits(model), expected)


@pytest.mark.usefixtures("cpu_streams")
def test_tensors_replaced_by_somebody(model_dir):
    model, whole = offloaded(new_model(model_dir, "nf4")), new_model(model_dir, "nf4")
    logits(model, ["text"])
    name = f"{FIRST}input_layernorm"
    module, reference = model.get_submodule(name), whole.get_submodule(name)
    tensors = layers_of(model).tensors
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * 2
    reference.weight.data *= 2
    assert_same(logits(model), logits(whole))
    # in place, in the tensor on the host
    tensors[f"{LAST}input_layernorm.weight"].mul_(3)
    whole.get_submodule(f"{LAST}input_layernorm").weight.data.mul_(3)
    assert_same(logits(model), logits(whole))
    # in another dtype, as after prepare_model_for_kbit_training
    module.weight.data = module.weight.data.float()
    reference.weight.data = reference.weight.data.float()
    assert_same(logits(model), logits(whole))


@pytest.mark.usefixtures("cpu_streams")
def test_after_a_forward_that_raised(model_dir):
    expected = logits(new_model(model_dir, "nf4"))
    model = offloaded(new_model(model_dir, "nf4"))

    def interrupt(*_):
        raise KeyboardInterrupt

    handles = [
        model.get_submodule(f"{FIRST}mlp.down_proj").register_forward_hook(interrupt),
        model.get_submodule(f"{FIRST}mlp.act_fn").register_forward_hook(interrupt),
    ]
    with pytest.raises(KeyboardInterrupt):
        logits(model, ["text"])
    for handle in handles:
        handle.remove()
    for _ in range(2):
        assert_same(logits(model), expected)
    assert not on_device(model)


@pytest.mark.usefixtures("cpu_streams")
def test_nothing_is_left_on_the_device_after_an_error(model_dir):
    model = offloaded(new_model(model_dir, "nf4"))
    logits(model, ["text"])
    resting = {name: each.is_meta for name, each in model.named_parameters()}

    def fail(*_):
        raise ValueError("an error of the user's")

    handle = model.get_submodule(f"{FIRST}mlp.act_fn").register_forward_hook(fail)
    with pytest.raises(ValueError, match="of the user's"):
        logits(model, ["text"])
    handle.remove()
    assert {name: each.is_meta for name, each in model.named_parameters()} == resting
    assert not any(layer.on_device for each in dispatches() for layer in each.layers.values())


@pytest.mark.usefixtures("cpu_streams")
def test_hooks_taken_off(model_dir):
    from accelerate.hooks import remove_hook_from_module

    expected = logits(new_model(model_dir, "nf4"))
    model = offloaded(new_model(model_dir, "nf4"))
    assert_same(logits(model), expected)
    remove_hook_from_module(model, recurse=True)
    assert not [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert_same(logits(model), expected)


@pytest.mark.usefixtures("cpu_streams")
def test_copied_hooks_stream_as_accelerate_does(model_dir):
    """Copy a norm: bitsandbytes' weights on meta cannot be copied, even without the patch."""
    model = offloaded(new_model(model_dir, "nf4"))
    logits(model, ["text"])
    norm = model.get_submodule(f"{FIRST}input_layernorm")
    copied = copy.deepcopy(norm)
    x = torch.randn(2, 3, norm.weight.shape[0], dtype=torch.bfloat16)
    assert torch.equal(copied(x), norm(x))
    assert vars(copied._hf_hook)["_streamed_part"] is None


@pytest.mark.usefixtures("cpu_streams")
def test_memory_goes_with_the_model(model_dir):
    before = dispatches()
    model = offloaded(new_model(model_dir, "nf4"))
    logits(model, ["text"])
    block = weakref.ref(layers_of(model).layers[FIRST.rstrip(".")].host)
    del model
    assert dispatches() == before
    assert block() is None


@pytest.mark.usefixtures("cpu_streams", "pristine")
def test_uninstalled_during_a_forward(model_dir):
    """The forward of a module ends as it began."""
    model = offloaded(new_model(model_dir))
    expected = logits(model, ["text"])
    linear = model.get_submodule(f"{FIRST}self_attn.q_proj")
    forward, hook = linear._old_forward, linear._hf_hook

    def uninstalls(*args, **kwargs):
        gemma4_compat.uninstall("offload_streaming", "host_embedding")
        return forward(*args, **kwargs)

    linear._old_forward = uninstalls
    assert_same(logits(model, ["text"]), expected)
    linear._old_forward = forward
    assert not hook._streamed_part.placed
    assert hook._streamed_part.is_unchanged(hook, linear), "other parameters than before"


@pytest.mark.usefixtures("cpu_streams", "pristine")
def test_uninstalled_between_forwards(model_dir):
    expected = logits(new_model(model_dir, "nf4"))
    model = offloaded(new_model(model_dir, "nf4"))
    assert_same(logits(model), expected)
    gemma4_compat.uninstall("offload_streaming")
    assert_same(logits(model), expected)


@pytest.mark.usefixtures("cpu_streams")
def test_saved(model_dir, tmp_path):
    expected = logits(new_model(model_dir, "nf4"))
    model = offloaded(new_model(model_dir, "nf4"))
    logits(model, ["text"])
    model.save_pretrained(tmp_path)
    assert_same(logits(load_model(tmp_path)), expected)


# -- on a GPU -----------------------------------------------------------------------------------


def on_gpu(model_dir, kind, layers=range(1, 5)):
    """The model on the GPU, with some decoder layers offloaded to the CPU."""
    return with_layers_on_the_cpu(load_model(model_dir, kind, {"": 0}), layers)


def copies(call):
    """The number of copies to the GPU and of copies to the host in a call."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    return sum("HtoD" in name for name in names), sum("DtoH" in name for name in names)


@pytest.mark.cuda
@KINDS
@pytest.mark.regression(
    "offload_streaming", r"copies to the GPU for 4 layers", behind="quant_state_offload"
)
def test_one_copy_a_layer(model_dir, kind):
    whole = load_model(model_dir, kind, {"": 0})
    expected = logits(whole)
    model = on_gpu(model_dir, kind)
    for _ in range(2):
        assert_same(logits(model), expected)
    inputs = {name: tensor.cuda() for name, tensor in text_inputs(model.config).items()}
    with torch.no_grad():
        whole(**inputs)
        of_whole = copies(lambda: whole(**inputs))
        of_split = copies(lambda: model(**inputs))
    more = of_split[0] - of_whole[0]
    assert more <= 4 + 1, f"{more} copies to the GPU for 4 layers"
    assert of_split[1] == of_whole[1], "copies to the host"
    assert layers_of(model).layers[FIRST.rstrip(".")].host.is_pinned()


@pytest.mark.cuda
@KINDS
def test_generate_and_prefill_on_the_gpu(model_dir, kind):
    whole, model = load_model(model_dir, kind, {"": 0}), on_gpu(model_dir, kind)
    inputs = {name: tensor.cuda() for name, tensor in text_inputs(model.config).items()}
    options = {"max_new_tokens": 20, "do_sample": False}
    for _ in range(3):
        assert torch.equal(model.generate(**inputs, **options), whole.generate(**inputs, **options))
    torch.manual_seed(0)
    ids = torch.randint(5, 200, (4, 700), device="cuda:0")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(ids).logits, whole(ids).logits)
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        model(ids)
    assert torch.cuda.memory_allocated() == before, "a layer stayed on the GPU"


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [None, "nf4", "int8"], ids=["bf16", "nf4", "int8"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_on_the_gpu(model_dir, language_adapter_dir, kind, checkpointing):
    from peft import PeftModel

    def gradients(base):
        model = PeftModel.from_pretrained(base, language_adapter_dir, is_trainable=True)
        inputs = {name: tensor.cuda() for name, tensor in text_inputs(base.config).items()}
        with torch.inference_mode():
            model(**inputs)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
            model.train()
        for _ in range(2):
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients(load_model(model_dir, kind, {"": 0}))
    split = on_gpu(model_dir, kind)
    found = gradients(split)
    assert blocks.streamed_layers(split.modules())
    assert found.keys() == expected.keys() != set()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.cuda
def test_many_copies_in_flight(model_dir):
    """The layers are so large that copying and computing overlap."""
    import bitsandbytes as bnb
    from accelerate import dispatch_model

    torch.manual_seed(0)
    blocks = [nn.Sequential(bnb.nn.Linear4bit(4096, 4096, bias=False)) for _ in range(8)]
    whole = nn.ModuleDict({"layers": nn.ModuleList(blocks), "head": nn.Linear(4096, 8)}).half()
    whole = whole.cuda()

    class Model(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.layers, self.head = parts["layers"], parts["head"]

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) + x
            return self.head(x)

    x = torch.randn(512, 4096, device="cuda", dtype=torch.float16)
    model = Model(whole)
    with torch.no_grad():
        expected = model(x)
        split = copy.deepcopy(model)
        device_map = {"head": 0, **{f"layers.{i}": "cpu" for i in range(8)}}
        split = dispatch_model(split, device_map, main_device=0)
        for _ in range(10):
            assert torch.equal(split(x), expected)
