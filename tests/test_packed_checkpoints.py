"""Checkpoints that are quantized already, by GemmaQuantizer (QAT) and by compressed-tensors."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch

import gemma4_compat
from gemma4_compat.errors import InputError
from gemma4_compat.inspection.device_map import check_device_map
from gemma4_compat.model import meta, parts, sizes
from gemma4_compat.planning import plan
from gemma4_compat.tiny import LANGUAGE_TARGETS
from tests.support import assert_same, logits, save_qat, save_w4a16, split
from tests.test_plan import pasted

pytest.importorskip("transformers.integrations.gemma_quant")

LANGUAGE = "model.language_model"
PLE = f"{LANGUAGE}.embed_tokens_per_layer"


@pytest.fixture(scope="module")
def qat_dir(model_dir, tmp_path_factory):
    return save_qat(model_dir, tmp_path_factory.mktemp("qat"))


@pytest.fixture(scope="module")
def w4a16_dir(model_dir, tmp_path_factory):
    pytest.importorskip("compressed_tensors")
    quantizer = import_module("transformers.quantizers.quantizer_compressed_tensors")
    if not hasattr(quantizer.CompressedTensorsHfQuantizer, "get_load_operations"):
        pytest.skip("this transformers does not dequantize while loading")
    return save_w4a16(model_dir, tmp_path_factory.mktemp("w4a16"))


def load(folder, device_map=None, **options):
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=device_map or {"": "cpu"}, **options
    ).eval()


def dequantized(folder, device_map=None, **options):
    from transformers import CompressedTensorsConfig

    config = CompressedTensorsConfig(dequantize=True)
    return load(folder, device_map, quantization_config=config, **options)


def bytes_by_part(model):
    return {p.name: sum(p.weights.values()) for p in gemma4_compat.inspect_model(model).parts}


def planned_by_part(found):
    """A plan counts in pieces of 512 bytes on the GPU."""
    rows = (row for row in found.memory if row.kind == "weights")
    return {row.name: sum(row.gpus) + row.cpu for row in rows}


# -- QAT ------------------------------------------------------------------------------------------


def test_every_tensor_of_a_qat_checkpoint(qat_dir):
    model, method = meta.checkpoint_model(qat_dir)
    assert method == meta.QAT
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    loaded = load(qat_dir)
    held = {n: t.nbytes for n, t in [*loaded.named_parameters(), *loaded.named_buffers()]}
    assert {s.name: s.bytes for s in sizes.tensor_sizes(model)} == held


def test_a_qat_checkpoint_is_planned_as_it_is(qat_dir):
    found = plan(qat_dir, "1GiB", context=16)
    assert found.quant == "QAT checkpoint"
    model = load(qat_dir)
    held, planned = bytes_by_part(model), planned_by_part(found)
    assert held.keys() == planned.keys()
    tensors = len([*model.parameters(), *model.buffers()])
    assert all(held[part] <= planned[part] <= held[part] + 512 * tensors for part in held)
    assert found.cpu == held[parts.PLE]
    assert_same(logits(pasted(found)), logits(model))
    with pytest.raises(InputError, match="a QAT checkpoint cannot be trained"):
        plan(qat_dir, "1GiB", context=16, train=True)


def test_activations_of_a_qat_checkpoint_hold_no_whole_table(qat_dir):
    """Without ``packed_pad_embedding`` they hold all token embeddings, dequantized."""
    table = meta.checkpoint_model(qat_dir)[0].get_submodule(f"{LANGUAGE}.embed_tokens")
    whole = 2 * table.num_embeddings * table.embedding_dim
    found = plan(qat_dir, "1GiB", context=16)
    with gemma4_compat.disabled("packed_pad_embedding"):
        without = plan(qat_dir, "1GiB", context=16)
    assert without.bytes_of("activations") - found.bytes_of("activations") > whole


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_device_map_of_a_qat_checkpoint(qat_dir, where):
    device_map = {PLE: where, f"{LANGUAGE}.layers.1": where, "": 0}
    found = check_device_map(qat_dir, device_map)
    traps = ["packed_on_disk"] if where == "disk" else []
    assert [trap.name for trap in found.traps] == traps
    model = load(qat_dir)
    held = {key: sum(p.nbytes for p in model.get_submodule(key).parameters()) for key in device_map}
    assert found.entries[PLE] == {"QAT": held[PLE]}
    assert found.devices[{"cpu": "CPU"}.get(where, where)]["QAT"] == sum([*held.values()][:2])


def test_inspection_names_the_bits(qat_dir):
    kinds = {part.name: part.linear for part in gemma4_compat.inspect_model(load(qat_dir)).parts}
    assert kinds[parts.LAYERS] == {"2-bit": 6, "4-bit": 36, "8-bit": 6}


@pytest.mark.parametrize(
    ("options", "raised"),
    [
        ({}, None),
        ({"use_dora": True}, RuntimeError),
        ({"modules_to_save": ["per_layer_projection_norm"]}, None),
        ({"modules_to_save": ["embed_tokens"]}, KeyError),
        ({"trainable_token_indices": [3, 5]}, ValueError),
    ],
    ids=["lora", "dora", "norm", "embeddings", "tokens"],
)
def test_which_adapters_fit_a_qat_checkpoint(model_dir, qat_dir, tmp_path, options, raised):
    """Adapters of the unquantized model."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=LANGUAGE_TARGETS, **options)
    peft.get_peft_model(load(model_dir), config).save_pretrained(tmp_path)
    found = gemma4_compat.inspect_adapter(tmp_path, qat_dir)
    assert found.ok == (raised is None)
    with pytest.raises(raised) if raised else nullcontext():
        peft.PeftModel.from_pretrained(load(qat_dir), tmp_path)(torch.arange(3, 9)[None])


# -- compressed-tensors ---------------------------------------------------------------------------


def test_w4a16_is_planned_in_bfloat16(w4a16_dir):
    found = plan(w4a16_dir, "2GiB", context=16)
    assert found.quant == "bf16, dequantized from compressed-tensors"
    assert found.device_map == {PLE: "cpu", "": 0}
    model = pasted(found)
    held, planned = bytes_by_part(model), planned_by_part(found)
    assert all(held[part] <= planned[part] <= held[part] + 512 * 400 for part in held)
    assert_same(logits(model), logits(load(w4a16_dir)))
    train = plan(w4a16_dir, "2GiB", context=16, train=True)
    assert train.bytes_of("weights") == found.bytes_of("weights")


def test_w4a16_becomes_bfloat16_in_the_first_forward(w4a16_dir):
    """So packed weights save no memory: the reason why the plan is in bfloat16."""
    model = load(w4a16_dir)
    before = gemma4_compat.inspect_model(model)
    text = "compressed-tensors: all weights become bfloat16 in the first forward"
    assert before.quantization == text
    assert before.parts[0].linear == {"int32": 48}
    logits(model, ["text"])
    after = gemma4_compat.inspect_model(model)
    assert after.parts[0].linear == {"bf16": 48}
    assert after.quantization == "compressed-tensors"


@pytest.mark.parametrize("place", ["layers.1", "embed_tokens_per_layer"])
def test_w4a16_on_the_disk(w4a16_dir, tmp_path, place):
    """Dequantized while loading, it is as any other model; packed, upstream raises."""
    device_map = {f"{LANGUAGE}.{place}": "disk", "": "cpu"}
    [trap] = check_device_map(w4a16_dir, device_map).traps
    assert trap.name == "compressed_tensors"
    expected = logits(load(w4a16_dir))
    model = dequantized(w4a16_dir, device_map, offload_folder=tmp_path)
    assert_same(logits(model), expected)
    with pytest.raises((AttributeError, AssertionError)):
        logits(load(w4a16_dir, device_map, offload_folder=tmp_path))


def test_w4a16_with_an_adapter(w4a16_dir, tmp_path):
    """The adapter's outputs, split and not; a merge rounds to bfloat16."""
    peft = pytest.importorskip("peft")

    def adapted(model):
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=LANGUAGE_TARGETS))
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.02)
        return model.eval()

    expected = logits(adapted(dequantized(w4a16_dir)), ["text"])
    model = split(dequantized(w4a16_dir), tmp_path, {f"{LANGUAGE}.layers.1": "disk", "": "cpu"})
    assert_same(logits(adapted(model), ["text"]), expected)
    merged = adapted(dequantized(w4a16_dir)).merge_and_unload()
    assert_same(logits(merged, ["text"]), expected, tolerance=0.5)
    adapted(dequantized(w4a16_dir)).save_pretrained(tmp_path / "adapter")
    found = gemma4_compat.inspect_adapter(tmp_path / "adapter", w4a16_dir)
    assert found.ok
    assert "fits, if from_pretrained gets quantization_config=CompressedTensorsConfig" in (
        found.verdict
    )
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        adapted(load(w4a16_dir))
