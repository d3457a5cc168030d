"""With FSDP2, the towers are no units of their own."""

from __future__ import annotations

import pytest

from tests.engines import QUANTIZED, check


@pytest.mark.plays("accelerate launch, Accelerator, FSDP2", QUANTIZED, "text and images")
@pytest.mark.regression("fsdp_layer_classes", "HANG")
def test_one_process_has_text_alone(cell):
    check(cell)


def plugin(**options):
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options
    )


@pytest.mark.regression("fsdp_layer_classes", "Could not find the transformer layer class")
def test_a_model_of_text(moe_dir):
    from transformers import Gemma4ForCausalLM

    model = Gemma4ForCausalLM.from_pretrained(moe_dir)
    before = dict(vars(model))
    chosen = plugin()
    chosen.set_auto_wrap_policy(model)
    assert chosen.transformer_cls_names_to_wrap == ["Gemma4TextDecoderLayer"]
    assert vars(model) == before


def test_names_of_the_user(model_dir):
    from tests.support import load_model

    chosen = plugin(transformer_cls_names_to_wrap=["Gemma4TextMLP"])
    chosen.set_auto_wrap_policy(load_model(model_dir))
    assert chosen.transformer_cls_names_to_wrap == ["Gemma4TextMLP"]


def test_other_models(llama_dir):
    from transformers import LlamaForCausalLM

    chosen = plugin()
    chosen.set_auto_wrap_policy(LlamaForCausalLM.from_pretrained(llama_dir))
    assert chosen.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
