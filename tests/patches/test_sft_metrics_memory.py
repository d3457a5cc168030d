"""TRL's metrics take rows of the logits; all others that read the output get a tensor."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from gemma4_compat import disabled
from gemma4_compat.runtime.loss import head
from tests.patches.test_loss_memory import ROWS, VOCABULARY, Largest, adapted
from tests.support import load_model
from tests.test_training import tokenizer

datasets = pytest.importorskip("datasets", reason="SFTTrainer needs datasets")
trl = pytest.importorskip("trl", reason="trl is not installed")
METRICS = ("loss", "entropy", "mean_token_accuracy")
FUSED = hasattr(trl.trainer.utils, "add_fused_lm_head")  # with which TRL does without logits
pytestmark = pytest.mark.skipif(FUSED, reason="this TRL computes its metrics without logits")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(head, "BYTES", ROWS * VOCABULARY * 24)


def trainer(model_dir, folder, kind=trl.SFTTrainer, options=(), **arguments):
    words = " ".join(f"w{4 + 7 * number % 490}" for number in range(180))
    data = datasets.Dataset.from_dict({"text": [words[: 80 * number] for number in range(6, 10)]})
    config = trl.SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, logging_steps=1, bf16=False, **dict(options),
    )  # fmt: skip
    return kind(
        model=adapted(load_model(model_dir).float()), args=config, train_dataset=data,
        eval_dataset=data, processing_class=tokenizer(), **arguments,
    )  # fmt: skip


def metrics(made, watch=None):
    with watch or nullcontext():
        made.train()
    [found] = ([log[m] for m in METRICS] for log in made.state.log_history if "entropy" in log)
    return [*found, made.evaluate()["eval_loss"]]


@pytest.mark.regression("sft_metrics_memory", r"logits of \d+ tokens are in memory")
def test_entropy_and_accuracy(model_dir, tmp_path):
    """They are those of whole logits."""
    with disabled("loss_memory"):
        whole = metrics(trainer(model_dir, tmp_path))
    largest = Largest()
    rows = metrics(trainer(model_dir, tmp_path), largest)
    assert rows == pytest.approx(whole, rel=1e-5)
    tokens = largest.entries // VOCABULARY
    assert tokens <= 128, f"the logits of {tokens} tokens are in memory"  # a piece of the metrics


def own_loss(outputs, labels, num_items_in_batch=None):
    seen.append(type(outputs.logits))
    found = outputs.logits[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(found, labels[:, 1:].flatten())


class Own(trl.SFTTrainer):
    def compute_loss(self, *args, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(*args, return_outputs=True, **kwargs)
        seen.append(type(outputs.logits))
        return (loss, outputs) if return_outputs else loss


seen = []


@pytest.mark.parametrize(
    "options",
    [
        {"compute_loss_func": own_loss},
        {"kind": Own},
        {"compute_metrics": lambda found: {"own": float(found.predictions.sum())}},
        {"options": {"label_smoothing_factor": 0.1}},
    ],
    ids=["loss", "subclass", "metrics", "smoothing"],
)
def test_code_of_the_user_gets_tensors(model_dir, tmp_path, options):
    seen.clear()
    with disabled("loss_memory"):
        whole = metrics(trainer(model_dir, tmp_path, **options))
    assert metrics(trainer(model_dir, tmp_path, **options)) == pytest.approx(whole, rel=1e-5)
    assert set(seen) <= {torch.Tensor}
    assert bool(seen) == ("options" not in options and "compute_metrics" not in options)
