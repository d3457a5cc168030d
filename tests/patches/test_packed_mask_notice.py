"""A warning says that packed samples attend to each other, and its advice separates them."""

from __future__ import annotations

import logging

import pytest
import torch

from gemma4_compat.patches.training import packed_mask_notice
from tests.support import config_of, load_model

NAME = packed_mask_notice.__name__
LENGTHS = (9, 14, 5)
ROW = sum(LENGTHS)


def text_model():
    cls, config = config_of("Gemma4")
    torch.manual_seed(0)
    return cls(config).train()


@pytest.fixture
def model(model_dir):
    """A model of text and images."""
    return load_model(model_dir).float().train()


@pytest.fixture
def notices(caplog, monkeypatch):
    monkeypatch.setattr(packed_mask_notice, "_looked", [])
    packed_mask_notice._warn.cache_clear()
    caplog.set_level(logging.WARNING, logger=NAME)
    yield lambda: [each.getMessage() for each in caplog.records if each.name == NAME]
    packed_mask_notice._warn.cache_clear()


def packed():
    """Three samples in one row."""
    ids = torch.randint(5, 96, (1, ROW), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": ids, "position_ids": positions}


def error(model, **options):
    """How far the logits of the packed samples are from those of each sample alone."""
    inputs = packed()
    found = model(**inputs, **options).logits.detach()
    alone = [
        model(input_ids=each, use_cache=False).logits.detach()
        for each in inputs["input_ids"].split(LENGTHS, 1)
    ]
    return float((found - torch.cat(alone, 1)).abs().max())


def check_notice(model, notices, **options):
    wrong = error(model, **options)
    assert wrong > 0.01, "this model does not show the bug"
    assert notices(), "packed samples attend to each other, and no warning"
    error(model, **options)
    assert len(notices()) == 1, "once for each process"


ONES = {"attention_mask": torch.ones(1, ROW, dtype=torch.long)}
REGRESSION = pytest.mark.regression(
    "packed_mask_notice", "packed samples attend to each other, and no warning"
)


@REGRESSION
def test_a_mask_of_ones(model, notices):
    check_notice(model, notices, **ONES)


@REGRESSION
def test_a_model_of_text(notices):
    check_notice(text_model(), notices, use_cache=False, **ONES)


@REGRESSION
def test_a_cache(notices):
    check_notice(text_model(), notices, use_cache=True)


@REGRESSION
def test_padding_after_the_samples(model, notices):
    """Positions and mask are padded, as for a multiple of eight."""
    inputs = {name: torch.nn.functional.pad(each, (0, 4)) for name, each in packed().items()}
    mask = (torch.arange(ROW + 4) < ROW).long()[None]
    model(**inputs, attention_mask=mask)
    assert notices(), "packed samples attend to each other, and no warning"


@pytest.mark.parametrize("kind", ["text and images", "text"])
def test_the_advice(request, notices, kind):
    """Only rounding is left: the rows of a product are added up in another order."""
    model = text_model() if kind == "text" else request.getfixturevalue("model")
    assert error(model, use_cache=False) < 1e-4
    assert not notices()


QUIET = {
    "evaluation": (lambda model: model.eval(), {}),
    "frozen": (lambda model: model.requires_grad_(False), {}),
    "one sample": (None, {"position_ids": torch.arange(ROW)[None]}),
    "a number for each sample": (
        None,
        {"attention_mask": torch.arange(1, 4).repeat_interleave(torch.tensor(LENGTHS))[None]},
    ),
    "a mask of the user's": (None, {"attention_mask": torch.zeros(1, 1, ROW, ROW)}),
    "padding": (
        None,
        {
            "position_ids": (torch.arange(ROW) - 4).clamp(min=0)[None],
            "attention_mask": (torch.arange(ROW) >= 4).long()[None],
        },
    ),
}


@pytest.mark.parametrize("case", QUIET)
def test_no_other_forward_warns(model, notices, case):
    change, inputs = QUIET[case]
    if change is not None:
        change(model)
    model(**{**packed(), **ONES, **inputs})
    assert not notices()


def test_only_the_first_steps_are_looked_at(model, notices):
    one = {**packed(), **ONES, "position_ids": torch.arange(ROW)[None]}
    for _ in range(packed_mask_notice.LOOKS):
        model(**one)
    model(**packed(), **ONES)
    assert not notices()


def test_compiled(notices):
    """The look is not part of the graph."""
    from gemma4_compat import disabled

    model, inputs = text_model(), {**packed(), **ONES, "use_cache": False}
    graphs = []
    for names in (("packed_mask_notice",), ("pipeline_device",)):  # one that is not needed here
        torch.compiler.reset()
        with disabled(*names):
            graphs.append(torch._dynamo.explain(model.model)(**inputs))
    assert graphs[0].graph_break_count == graphs[1].graph_break_count
    assert graphs[0].op_count == graphs[1].op_count
    assert not notices()
