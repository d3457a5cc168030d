"""``compute_metrics`` gets the logits of images and sound as an array, as those of text.

The reference is a loop over the same batches that calls the model.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

from gemma4_compat.tiny import audio_inputs, image_inputs, text_inputs
from tests.patches import test_chunked_prefill_images as chunked
from tests.patches.test_gradient_accumulation import LANGUAGE
from tests.patches.test_gradient_accumulation import unified as tiny_unified
from tests.support import load_model


def gemma3n(model_dir, kind):
    model = chunked.gemma3n_with_tower(model_dir)
    random = torch.Generator().manual_seed(1)
    bins = model.config.audio_config.input_feat_size
    more = {
        "text": {},
        "image": {"pixel_values": torch.rand(2, 3, 8, 8, generator=random)},
        "audio": {
            "input_features": torch.randn(2, 32, bins, generator=random),
            "input_features_mask": torch.ones(2, 32, dtype=torch.bool),
        },
    }
    token = {"text": 5, "image": chunked.IMAGE, "audio": chunked.AUDIO}[kind]
    return model, {**chunked.gemma3n_prompt(token), **more[kind]}


def multimodal(model_dir, kind):
    model = load_model(model_dir).float()
    return model, {"text": text_inputs, "image": image_inputs, "audio": audio_inputs}[kind](
        model.config
    )


def unified(model_dir, kind):
    model = tiny_unified(model_dir).eval()
    model.config.image_token_id, model.config.audio_token_id = 500, 501
    token = {"text": 5, "image": 500, "audio": 501}[kind]
    ids = torch.tensor([[2, 7, *[token] * 4, 10, 11]])
    random = torch.Generator().manual_seed(1)
    more = {
        "text": {},
        "image": {
            "pixel_values": torch.rand(1, 4, 48, generator=random),
            "image_position_ids": torch.tensor([[[0, 0], [0, 1], [1, 0], [1, 1]]]),
        },
        "audio": {
            "input_features": torch.randn(1, 4, 64, generator=random),
            "input_features_mask": torch.ones(1, 4, dtype=torch.bool),
        },
    }
    types = {"text": 0, "image": 1, "audio": 3}[kind] * (ids == token).long()
    return model, {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types,
        **more[kind],
    }


def rows_of(inputs):
    """Two rows, the second with other words."""
    rows = []
    for word in (9, 40):
        ids = inputs["input_ids"].clone()
        ids[:, -1] = word
        rows.append({**inputs, "input_ids": ids, "labels": ids})
    return rows


class OwnTrainer(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


def predictions(model, rows, folder, ignore_keys=None, trainer=Trainer, **options):
    """What ``compute_metrics`` gets."""
    got = []
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=1,
        use_cpu=True,
        report_to=[],
        remove_unused_columns=False,
        **options,
    )
    trainer(
        model=model,
        args=arguments,
        eval_dataset=rows,
        data_collator=lambda batch: batch[0],
        compute_metrics=lambda found: got.append(found.predictions) or {},
    ).evaluate(ignore_keys=ignore_keys)
    return got[0]


def expected(model, rows):
    with torch.no_grad():
        return np.concatenate([model(**row).logits.numpy() for row in rows])


SHOWN = pytest.mark.regression(
    "features_in_predictions", "'tuple' object has no attribute 'argmax'|have the same type"
)


def check(found, model, rows):
    assert found.argmax(-1).shape == (len(rows), rows[0]["input_ids"].shape[1])
    assert np.array_equal(found, expected(model, rows))


@SHOWN
@pytest.mark.parametrize(
    ("make", "kind"),
    [(multimodal, "image"), (gemma3n, "image"), (gemma3n, "audio"), (unified, "image")],
)
def test_logits(make, kind, model_dir, tmp_path):
    model, inputs = make(model_dir, kind)
    rows = rows_of(inputs)
    check(predictions(model, rows, tmp_path), model, rows)


def test_a_trainer_of_the_users(model_dir, tmp_path, caplog):
    """It passes the arguments by position; the message comes once for each trainer."""
    model, inputs = multimodal(model_dir, "image")
    rows = rows_of(inputs)
    check(predictions(model, rows, tmp_path, trainer=OwnTrainer), model, rows)
    (message,) = [each for each in caplog.messages if "[0] is the first row" in each]
    assert "ignore_keys=[]" in message


@pytest.mark.each_stack
@pytest.mark.parametrize("make", [multimodal, unified])
def test_sound(make, model_dir, tmp_path):
    """Some releases of transformers have no features of sound among the outputs."""
    model, inputs = make(model_dir, "audio")
    rows = rows_of(inputs)
    check(predictions(model, rows, tmp_path), model, rows)


@SHOWN
def test_text_and_images(model_dir, tmp_path):
    """Without the patch, an array and a tuple cannot be joined."""
    model, image = multimodal(model_dir, "image")
    text = text_inputs(model.config)
    text = {name: torch.nn.functional.pad(each, (0, 1)) for name, each in text.items()}
    rows = [*rows_of(text), *rows_of(image)]
    check(predictions(model, rows, tmp_path), model, rows)


@SHOWN
def test_adapter(model_dir, tmp_path):
    from peft import LoraConfig, get_peft_model

    model, inputs = multimodal(model_dir, "image")
    model = get_peft_model(model, LoraConfig(target_modules=LANGUAGE)).eval()
    rows = rows_of(inputs)
    check(predictions(model, rows, tmp_path), model, rows)


@pytest.mark.each_stack
def test_sft_trainer(model_dir, tmp_path):
    """Its newest releases have a ``prediction_step`` of their own."""
    datasets, trl = (pytest.importorskip(name) for name in ("datasets", "trl"))
    from tests.test_training import tokenizer

    model, inputs = multimodal(model_dir, "image")
    rows, got = rows_of(inputs), []
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        per_device_eval_batch_size=1,
        use_cpu=True,
        report_to=[],
        bf16=False,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    numbers = datasets.Dataset.from_dict({"number": [0, 1]})
    trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=numbers,
        eval_dataset=numbers,
        processing_class=tokenizer(),
        data_collator=lambda batch: rows[batch[0]["number"]],
        compute_metrics=lambda found: got.append(found.predictions) or {},
    ).evaluate()
    check(got[0], model.eval(), rows)


@pytest.mark.each_stack
def test_a_cache(model_dir, tmp_path):
    model, inputs = multimodal(model_dir, "text")
    rows = rows_of(inputs)
    check(predictions(model, rows, tmp_path, use_cache=True), model, rows)


class OwnConfig(transformers.Gemma4Config):
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "cache"]


def with_own_class(model):
    model.config.__class__ = OwnConfig


def with_own_list(model):
    model.config.keys_to_ignore_at_inference = []


@pytest.mark.parametrize("own", [with_own_class, with_own_list, None])
def test_the_users_choice(model_dir, tmp_path, own):
    """Features are predictions if the caller or the user's config does not leave them out."""
    model, inputs = multimodal(model_dir, "image")
    if own is not None:
        own(model)
    rows = rows_of(inputs)
    found = predictions(model, rows, tmp_path, ignore_keys=[] if own is None else None)
    assert np.array_equal(found[0], expected(model, rows))
    assert len(found) == 2
