"""A QAT checkpoint dequantizes one row of its token embeddings for the pad token, not all."""

from __future__ import annotations

import pytest
import torch

from tests.support import assert_same, logits, save_qat, split

gemma_quant = pytest.importorskip("transformers.integrations.gemma_quant")

TOKENS = "model.language_model.embed_tokens"


@pytest.fixture
def model(model_dir, tmp_path):
    from transformers import Gemma4ForConditionalGeneration

    folder = save_qat(model_dir, tmp_path / "qat")
    return Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.mark.regression("packed_pad_embedding", r"the whole table")
def test_one_row(model, monkeypatch):
    expected = logits(model)
    original = gemma_quant.QuantizedEmbedding._dequantize_weights

    def counted(self, rows, scales):
        assert rows.shape[0] != self.num_embeddings, "the whole table"
        return original(self, rows, scales)

    monkeypatch.setattr(gemma_quant.QuantizedEmbedding, "_dequantize_weights", counted)
    assert_same(logits(model), expected)


def test_a_weight_of_the_user_is_read(model):
    read = []

    class Own(gemma_quant.QuantizedEmbedding):
        @property
        def weight(self):
            read.append(self)
            return super().weight

    expected = logits(model)
    model.get_submodule(TOKENS).__class__ = Own
    assert_same(logits(model), expected)
    assert read


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_row_equals_that_of_the_table(bits):
    from gemma4_compat.patches.offloading.packed_pad_embedding import _Rows

    table = gemma_quant.QuantizedEmbedding(64, 32, torch.bfloat16, num_bits=bits)
    torch.manual_seed(0)
    table.embedding_quantized.data.random_(-8 if bits == 8 else 0, 8)
    table.embedding_scale.data.uniform_(0.1, 1)
    assert torch.equal(_Rows(table)[3, :], table.weight[3, :])


@pytest.mark.regression("packed_pad_embedding", r"Tensor on device meta")
def test_embeddings_on_the_disk(model, tmp_path):
    expected = logits(model)
    model = split(model, tmp_path, {TOKENS: "disk", "": "cpu"})
    assert_same(logits(model), expected)
    assert model.get_submodule(TOKENS).embedding_quantized.is_meta


def test_compiled_without_graph_breaks(model):
    expected = logits(model, ["text"])
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    from gemma4_compat.tiny import text_inputs

    with torch.no_grad():
        states = compiled(**text_inputs(model.config), use_cache=False).last_hidden_state
        found = model.lm_head(states)
    cap = model.config.get_text_config().final_logit_softcapping
    found = found if cap is None else torch.tanh(found / cap) * cap
    assert_same({"text": found.float()}, expected)
