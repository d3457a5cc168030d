"""A warning is logged before an adapter is merged into quantized weights."""

from __future__ import annotations

import pytest

import gemma4_compat
from tests.support import assert_same, load_model, logits

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

LOGGER = "gemma4_compat.patches.adapters.quantized_merge"


def adapted(model_dir, adapter_dir, kind):
    return peft.PeftModel.from_pretrained(load_model(model_dir, kind), adapter_dir)


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name == LOGGER]


@pytest.mark.regression("quantized_merge", r"no warning")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_merge_and_unload_warns_once(model_dir, language_adapter_dir, kind, caplog):
    model = adapted(model_dir, language_adapter_dir, kind)
    model.merge_adapter()
    model.unmerge_adapter()
    model.merge_and_unload()
    assert said(caplog), "no warning"
    (message,) = said(caplog)
    assert {"nf4": "4 bit", "int8": "8 bit"}[kind] in message
    assert "gemma4-compat merge BASE ADAPTER OUT" in message


def test_what_the_warning_says_is_so(model_dir, language_adapter_dir):
    """Merging changes the outputs of a 4-bit model several times as much as those in bf16."""

    def moved(kind):
        expected = logits(adapted(model_dir, language_adapter_dir, kind).eval(), ["text"])["text"]
        # Merge before the first forward, because bitsandbytes repacks weights on some CPUs.
        model = adapted(model_dir, language_adapter_dir, kind).merge_and_unload().eval()
        return ((logits(model, ["text"])["text"] - expected).norm() / expected.norm()).item()

    assert moved("nf4") > 5 * moved(None)


def test_each_model_warns(model_dir, language_adapter_dir, caplog):
    for _ in range(2):
        adapted(model_dir, language_adapter_dir, "nf4").merge_adapter()
    assert len(said(caplog)) == 2


def test_unquantized_models_do_not_warn(model_dir, language_adapter_dir, caplog):
    adapted(model_dir, language_adapter_dir, None).merge_and_unload()
    assert not said(caplog)


def test_unloading_without_merging_does_not_warn(model_dir, language_adapter_dir, caplog):
    adapted(model_dir, language_adapter_dir, "nf4").unload()
    assert not said(caplog)


def test_merge_is_unchanged(model_dir, language_adapter_dir, pristine):
    found = adapted(model_dir, language_adapter_dir, "nf4").merge_and_unload()
    with gemma4_compat.disabled("quantized_merge"):
        expected = adapted(model_dir, language_adapter_dir, "nf4").merge_and_unload()
    assert_same(logits(found.eval(), ["text"]), logits(expected.eval(), ["text"]))
