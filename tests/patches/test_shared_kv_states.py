"""Shared keys and values reach the layers through hooks, FSDP2 and several devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import UserDict
from pathlib import Path

import gemma4_compat  # first, as in conftest.py, which the processes below do not import

# isort: split
import pytest
import torch

from gemma4_compat.engine.gate import holds

ROOT = Path(__file__).parents[2]
KEY_ERROR = r"KeyError: (1|'sliding_attention')$"
#: each family, and the first transformers release that passes shared_kv_states to its layers
FAMILIES = {"Gemma4": "5.6", "Gemma4Unified": "5.10", "Gemma3n": "5.6"}
LAUNCHER = pytest.mark.parametrize("family", FAMILIES)


def tiny(family="Gemma4"):
    """Six layers in float32; the last three use the keys and values of the second and third."""
    import transformers

    if not holds(f"transformers>={FAMILIES[family]}"):
        pytest.skip(f"{family} has no shared_kv_states in this transformers")
    options = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 4,
    }
    if family == "Gemma4":
        options |= {"global_head_dim": 32, "use_double_wide_mlp": True}
    if family == "Gemma4Unified":
        options["global_head_dim"] = 32
    else:
        options |= {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
    if family == "Gemma3n":
        options |= {
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 6,
        }
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}TextConfig")(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # The values are large, so that every layer affects the logits.
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tokens(device="cpu"):
    """Token ids, int64 [2, 9]; the rows are longer than the sliding window."""
    return torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)


def logits(model, device="cpu", **options):
    with torch.no_grad():
        return model(tokens(device), **options).logits.cpu()


def assert_equal(found, expected):
    assert expected.isfinite().all()
    assert expected.std() > 0.01, "the tiny model says nothing"
    worst = (found - expected).abs().max().item()
    assert worst == 0, f"logits differ by up to {worst:.3g}"


# -- accelerate ------------------------------------------------------------------------------------

DISK = {"": "cpu", "model.layers.1": "disk", "model.layers.4": "disk"}


def dispatched(model, folder):
    from accelerate import dispatch_model

    return dispatch_model(model, DISK, main_device="cpu", offload_dir=str(folder))


def hooked(model, folder):
    from accelerate import dispatch_model

    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


def cpu_offloaded(model, folder):
    from accelerate import cpu_offload

    return cpu_offload(model, torch.device("cpu"))


def disk_offloaded(model, folder):
    from accelerate import disk_offload

    return disk_offload(model, str(folder), torch.device("cpu"))


def from_checkpoint(model, folder):
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with init_empty_weights():
        empty = type(model)(model.config)
    empty.tie_weights()
    # accelerate cannot load with a map that has modules on disk and an entry for "".
    blocks = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    blocks += ["lm_head", *(f"model.layers.{i}" for i in range(6))]
    device_map = {**dict.fromkeys(blocks, "cpu"), **DISK}
    del device_map[""]
    return load_checkpoint_and_dispatch(
        empty, str(folder), device_map, offload_folder=str(folder / "offload")
    ).eval()


WAYS = [dispatched, hooked, from_checkpoint, cpu_offloaded, disk_offloaded]
# Without a map, only modules with their own tensors get hooks; Gemma3n's layers have no tensors.
WITHOUT_MAP = WAYS[3:]
CASES = [(f, way) for f in FAMILIES for way in WAYS if f != "Gemma3n" or way not in WITHOUT_MAP]


@pytest.mark.skipif(not holds("transformers<5.23"), reason="not affected")
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_kinds_of_dictionaries(kind):
    """From transformers 5.9 the model passes a UserDict, which accelerate copies, too."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def forward(self, states, shared_kv_states):
            shared_kv_states["sliding_attention"] = states
            return states

    given = kind()
    layer = add_hook_to_module(Layer(), AlignDevicesHook(execution_device="cpu"))
    layer(torch.ones(1), shared_kv_states=given)
    assert "sliding_attention" in given


@pytest.mark.parametrize(("family", "way"), CASES)
@pytest.mark.regression("shared_kv_states", KEY_ERROR)
def test_hooks_without_skip_keys(family, way, tmp_path):
    expected = logits(tiny(family))
    without_cache = logits(tiny(family), use_cache=False)
    model = way(tiny(family), tmp_path)
    for _ in range(2):
        assert_equal(logits(model), expected)
    assert_equal(logits(model, use_cache=False), without_cache)


@LAUNCHER
@pytest.mark.regression("shared_kv_states", KEY_ERROR)
def test_generate(family, tmp_path):
    options = {
        "do_sample": False,
        "max_new_tokens": 6,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    model, split = tiny(family), dispatched(tiny(family), tmp_path)
    for use_cache in (True, False):
        expected = model.generate(tokens(), use_cache=use_cache, **options)
        found = split.generate(tokens(), use_cache=use_cache, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert_equal(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.regression("shared_kv_states", KEY_ERROR)
def test_training_step(checkpointing, tmp_path):
    def gradients(model):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(tiny())
    found = gradients(hooked(tiny(), tmp_path))
    assert len(expected) > 60
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.regression("shared_kv_states", KEY_ERROR)
def test_peft_dispatches_the_model_again(model_dir, language_adapter_dir, tmp_path):
    from peft import PeftModel

    from gemma4_compat.tiny import TOWERS
    from tests import support

    expected = support.logits(
        PeftModel.from_pretrained(support.load_model(model_dir), language_adapter_dir)
    )
    model = support.split(support.load_model(model_dir), tmp_path)
    with gemma4_compat.disabled("peft_redispatch"):
        model = PeftModel.from_pretrained(
            model,
            language_adapter_dir,
            device_map={**dict.fromkeys(TOWERS, "disk"), "": "cpu"},
            offload_dir=str(tmp_path / "again"),
        )
    support.assert_same(support.logits(model), expected)


def test_skip_keys_given(tmp_path):
    """A model that works without the patch also works with it."""
    from accelerate import dispatch_model

    model = tiny()
    expected = logits(model)
    skip_keys = model._skip_keys_device_placement
    model = dispatch_model(model, {"": "cpu"}, force_hooks=True, skip_keys=skip_keys)
    assert_equal(logits(model), expected)


@pytest.mark.usefixtures("pristine")
def test_patch_comes_and_goes_under_a_dispatched_model(tmp_path):
    model = tiny()
    expected = logits(model)
    model = hooked(model, tmp_path)
    applied = gemma4_compat.status()["shared_kv_states"].state.value == "applied"
    with gemma4_compat.disabled("shared_kv_states"):
        if applied:
            with pytest.raises(KeyError):
                logits(model)
    assert_equal(logits(model), expected)


# -- what must stay as it is -----------------------------------------------------------------------


def test_compiled_without_a_graph_break():
    model = tiny()
    expected = logits(model, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_equal(logits(compiled, use_cache=False), expected)


def test_compiled_layer_by_layer():
    model = tiny()
    expected = logits(model, use_cache=False)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    for _ in range(2):
        assert_equal(logits(model, use_cache=False), expected)


def test_the_model_returns_its_own_container(pristine):
    if not holds("transformers>=5.8"):
        pytest.skip("these releases do not return shared_kv_states")
    model = tiny()

    def returned():
        with torch.no_grad():
            return model.model(tokens(), return_shared_kv_states=True).shared_kv_states

    found = returned()
    with gemma4_compat.disabled("shared_kv_states"):
        expected = returned()
    assert type(found) is type(expected)
    assert found.keys() == expected.keys() == {"sliding_attention", "full_attention"}
    for name in expected:
        assert all(torch.equal(a, b) for a, b in zip(found[name], expected[name], strict=True))


# -- FSDP2 -----------------------------------------------------------------------------------------


def check_fsdp(mesh):
    """The sharded model has the logits and gradients of the whole model, in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    whole, sharded = tiny().bfloat16(), tiny().bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    for model in (whole, sharded):
        model.output = model(tokens(), labels=tokens(), use_cache=False)
        model.output.loss.backward()
    assert_equal(sharded.output.logits.float(), whole.output.logits.float())
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    found = {n: p.grad.full_tensor() for n, p in sharded.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    # On the CPU, torch 2.8 adds the gradients of the ranks; 2.13 averages them.  Both are exact.
    differ = [
        [n for n in found if not torch.equal(found[n], times * expected[n])]
        for times in (1, mesh.size())
    ]
    assert [] in differ, differ


def fsdp_rank(store, rank, size):
    """Run check_fsdp as one of ``size`` processes."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    try:
        check_fsdp(init_device_mesh("cpu", (size,)))
        distributed.barrier()
        print("equal", flush=True)
    finally:
        distributed.destroy_process_group()


# In transformers 5.9 and later, this works without the patch.
BROKEN_BY_FSDP = holds("transformers<5.9")
fsdp_regression = (
    pytest.mark.regression("shared_kv_states", r"KeyError: (1|'sliding_attention')")
    if BROKEN_BY_FSDP
    else lambda function: function
)


@fsdp_regression
def test_fsdp_in_one_process(tmp_path):
    fsdp_rank(tmp_path / "store", 0, 1)


@pytest.mark.slow
@fsdp_regression
def test_fsdp_in_two_processes(tmp_path):
    tiny()  # skips old releases
    code = "from tests.patches.test_shared_kv_states import fsdp_rank\nfsdp_rank({!r}, {}, 2)"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code.format(str(tmp_path / "store"), rank)],
            cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    # Not the exit codes: gloo sometimes aborts a process that ends.
    outputs, errors = zip(*(rank.communicate(timeout=120) for rank in ranks), strict=True)
    assert outputs == ("equal\n", "equal\n"), errors


# -- more than one device --------------------------------------------------------------------------

# The last layer is on the first GPU, because Gemma3n combines its output with tensors there.
SPLITS = {
    "readers on the second GPU": [0, 0, 0, 1, 1, 0],
    "writers on the second GPU": [1, 1, 1, 0, 0, 0],
    "alternating": [1, 0, 1, 0, 1, 0],
    "readers offloaded": [1, 1, 1, "cpu", "cpu", "cpu"],
}


@pytest.mark.cuda(gpus=2)
@pytest.mark.parametrize("split", SPLITS)
@LAUNCHER
@pytest.mark.regression("shared_kv_states", KEY_ERROR)
def test_layers_on_two_gpus(family, split):
    from accelerate import dispatch_model

    expected = logits(tiny(family).to("cuda:0"), "cuda:0")
    model = tiny(family)
    # No entry for "": with one, accelerate adds hooks for GPU 0 to layers on GPU 1.
    device_map = {f"model.{name}": 0 for name, _ in model.model.named_children()}
    device_map |= {"lm_head": 0}
    del device_map["model.layers"]
    device_map |= {f"model.layers.{i}": device for i, device in enumerate(SPLITS[split])}
    model = dispatch_model(model, device_map, force_hooks=True)
    for _ in range(2):
        assert_equal(logits(model, "cuda:0"), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.regression("shared_kv_states", KEY_ERROR)
def test_offloaded_layers_run_on_the_gpu(offload, tmp_path):
    from accelerate import cpu_offload, disk_offload

    expected = logits(tiny().to("cuda:0"), "cuda:0")
    if offload == "cpu":
        model = cpu_offload(tiny(), torch.device("cuda:0"))
    else:
        model = disk_offload(tiny(), str(tmp_path), torch.device("cuda:0"))
    assert_equal(logits(model, "cuda:0"), expected)
