"""A step over micro batches of unequal lengths equals the step over a single batch of all rows.

There are two references: the mean over all tokens, computed by hand from the logits, and
``Trainer`` with one batch a step.  In float32, the sums over tokens are rounded in another order.
They differ by about 1e-7, relative to the norm of all gradients.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import gemma4_compat
from gemma4_compat.tiny import audio_inputs, image_inputs, text_inputs
from tests.support import load_model, split
from tests.test_training import tokenizer

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
DIFFERENT = r"the gradients of two micro batches differ by \d"
INPUTS = {"text": text_inputs, "image": image_inputs, "audio": audio_inputs}
LANGUAGE = r".*language_model.*\.(q|o|gate|up|down)_proj"


def gemma4(model_dir, cls=None):
    cls = cls or transformers.Gemma4ForConditionalGeneration
    return cls.from_pretrained(model_dir, dtype=torch.float32)


TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "pad_token_id": 0,
}


def unified(model_dir):
    pytest.importorskip("transformers.models.gemma4_unified")
    vision = {"patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 64, "mm_posemb_size": 16}
    return randomized(
        transformers.Gemma4UnifiedForConditionalGeneration,
        transformers.Gemma4UnifiedConfig(
            text_config={**TEXT, "global_head_dim": 64},
            vision_config=vision | {"output_proj_dims": 64},
            audio_config={"audio_embed_dim": 64},
        ),
    )


def gemma3n(model_dir):
    """Use a vision tower that does not need timm; the data contain only text."""
    text = {
        **TEXT,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 3,
    }
    audio = {
        "hidden_size": 32,
        "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 1,
        "sscp_conv_channel_size": [8, 4],
        "vocab_size": 8,
        "vocab_offset": 504,
    }
    config = transformers.Gemma3nConfig(text_config=text, audio_config=audio)
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    vision.vocab_size, vision.vocab_offset, vision.rms_norm_eps = 8, 496, 1e-6
    vars(config)["vision_config"] = vision  # setattr would check the type
    return randomized(transformers.Gemma3nForConditionalGeneration, config)


def randomized(cls, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


MODELS = pytest.mark.parametrize("make", [gemma4, unified, gemma3n])


def adapted(model):
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=LANGUAGE))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return model


def rows(kind="text", config=None):
    """Two rows: three tokens of the first and almost all tokens of the second are targets."""
    if kind != "text":
        batch = INPUTS[kind](config, batch=2)
    else:
        ids = torch.randint(3, 480, (2, 14), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        batch["attention_mask"][0, 4:] = 0
    labels = batch["input_ids"].masked_fill(batch["input_ids"] >= 490, -100)
    labels[0, 4:] = -100
    batch["labels"] = labels
    return [{name: value[row] for name, value in batch.items()} for row in range(2)]


class KeepsGradients(transformers.TrainerCallback):
    def __init__(self):
        self.gradients = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        trained = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
        self.gradients = {name.removeprefix("module."): grad.clone() for name, grad in trained}


def trainer(model, folder, data, micro_batches=1, cls=transformers.Trainer, loss=None, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=len(data) // micro_batches,
        per_device_eval_batch_size=len(data),
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=0,
        learning_rate=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        **options,
    )
    keeper = KeepsGradients()
    made = cls(
        model=model,
        args=arguments,
        train_dataset=data,
        callbacks=[keeper],
        compute_loss_func=loss,
    )
    made.keeper = keeper
    return made


def gradients(*args, **kwargs):
    made = trainer(*args, **kwargs)
    made.train()
    assert made.keeper.gradients
    return made.keeper.gradients


def by_hand(model, data):
    """The mean loss over all targets of all rows, and its gradients."""
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    labels = batch.pop("labels")[:, 1:]
    output = model.train()(**batch).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())
    loss.backward()
    trained = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return loss.item(), dict(trained)


def difference(found, expected):
    assert found.keys() == expected.keys()
    norm = sum(grad.double().square().sum() for grad in expected.values()).sqrt()
    assert norm > 1e-3
    parts = ((found[name].double() - expected[name].double()).square().sum() for name in found)
    return (sum(parts).sqrt() / norm).item()


def assert_equal(found, expected):
    apart = difference(found, expected)
    assert apart < TOLERANCE, f"the gradients of two micro batches differ by {apart:.2g}"


@MODELS
@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.regression("gradient_accumulation", DIFFERENT)
def test_two_micro_batches(make, with_adapter, model_dir, tmp_path):
    def model():
        return adapted(make(model_dir)) if with_adapter else make(model_dir)

    _, expected = by_hand(model(), rows())
    found = gradients(model(), tmp_path, rows())
    assert difference(found, expected) < TOLERANCE, "one batch differs from the sum by hand"
    assert_equal(gradients(model(), tmp_path, rows(), micro_batches=2), expected)


@pytest.mark.parametrize("kind", ["image", "audio"])
@pytest.mark.regression("gradient_accumulation", DIFFERENT)
def test_images_and_sound(kind, model_dir, tmp_path):
    """The forward passes ``num_items_in_batch`` to the towers as well."""
    data = rows(kind, gemma4(model_dir).config)
    _, expected = by_hand(gemma4(model_dir), data)
    assert_equal(gradients(gemma4(model_dir), tmp_path, data, micro_batches=2), expected)


@pytest.mark.regression("gradient_accumulation", DIFFERENT)
def test_checkpointing(model_dir, tmp_path):
    _, expected = by_hand(adapted(gemma4(model_dir)), rows())
    options = {"gradient_checkpointing": True}
    model = adapted(gemma4(model_dir))
    model.enable_input_require_grads()
    assert_equal(gradients(model, tmp_path, rows(), micro_batches=2, **options), expected)


def test_quantized_and_split(model_dir, tmp_path):
    """The reference is one batch on a quantized model that is not split.

    Much of the arithmetic is in bfloat16.  A row alone is rounded like a row in a batch, but the
    final division differs.
    """
    expected = gradients(adapted(load_model(model_dir, "nf4")), tmp_path, rows())
    model = adapted(split(load_model(model_dir, "nf4"), tmp_path / "offloaded"))
    found = gradients(model, tmp_path, rows(), micro_batches=2)
    apart = difference(found, expected)
    assert apart < 0.02, f"the gradients of two micro batches differ by {apart:.2g}"


@pytest.mark.regression("gradient_accumulation", DIFFERENT)
def test_sft_trainer(model_dir, tmp_path):
    datasets = pytest.importorskip("datasets", reason="SFTTrainer needs datasets")
    trl = pytest.importorskip("trl", reason="trl is not installed")

    def found(micro_batches):
        sentences = [" ".join(f"w{i}" for i in range(10, 10 + length)) for length in (3, 13)]
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=2 // micro_batches,
            gradient_accumulation_steps=micro_batches,
            gradient_checkpointing=False,
            max_grad_norm=0,
            learning_rate=0.0,
            save_strategy="no",
            report_to=[],
            bf16=False,
            use_cpu=True,
        )
        keeper = KeepsGradients()
        trl.SFTTrainer(
            model=adapted(gemma4(model_dir)),
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"text": sentences}),
            processing_class=tokenizer(),
            callbacks=[keeper],
        ).train()
        return keeper.gradients

    assert_equal(found(2), found(1))


@pytest.mark.slow
@pytest.mark.regression("gradient_accumulation", DIFFERENT)
def test_two_processes(model_dir, tmp_path):
    """Each process has one of the rows."""
    code = (
        "import sys, gemma4_compat, torch\n"
        "from tests.patches import test_gradient_accumulation as here\n"
        "model = here.adapted(here.gemma4(sys.argv[1]))\n"
        "found = here.gradients(model, sys.argv[2], here.rows(), micro_batches=2)\n"
        "torch.save(found, f'{sys.argv[2]}/gradients.pt')\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        code.replace(
            "micro_batches=2", "micro_batches=2, ddp_backend='gloo', ddp_broadcast_buffers=False"
        )
    )
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [*launcher, "--nproc-per-node=2", str(script), str(model_dir), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, cwd=ROOT,
        timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = torch.load(tmp_path / "gradients.pt")
    # Two processes run two micro batches each, so every row occurs twice.
    _, expected = by_hand(adapted(gemma4(model_dir)), rows())
    assert_equal(found, expected)


# -- what must be as before ------------------------------------------------------------------------


@MODELS
def test_evaluation(make, model_dir, tmp_path):
    expected, _ = by_hand(make(model_dir), rows())
    found = trainer(make(model_dir), tmp_path, rows()).evaluate(rows())["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_targets(model_dir, tmp_path):
    """The batch has the loss 0, not NaN, which is the mean of no values."""
    data = rows()
    data[0]["labels"] = torch.full_like(data[0]["labels"], -100)
    _, expected = by_hand(gemma4(model_dir), data[1:])
    assert_equal(gradients(gemma4(model_dir), tmp_path, data, micro_batches=2), expected)


class Trainer(transformers.Trainer):
    pass


class ReadsTheNumber(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen = num_items_in_batch
        return model(**inputs).loss


class MeanOfItsOwn(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1].float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class SetsItLater(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compute_loss = lambda model, inputs, **kwargs: model(**inputs).loss


class WeightsItself(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        targets = (inputs["labels"][:, 1:] != -100).sum()
        return super().compute_loss(model, inputs, *args, **kwargs) * targets / 16 * 2


class SquaresIt(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) ** 2


class ScalesItsGradient(Trainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        loss.register_hook(lambda gradient: 3 * gradient)
        return loss


class ChangesItInPlace(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return loss.add_(0.1 * outputs.logits.float().square().mean())


class AddsATerm(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return loss + 0.1 * outputs.logits.float().square().mean()


class ComputesTwice(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return (model(**inputs).loss + model(**inputs).loss) / 2


@pytest.mark.parametrize(
    "cls",
    [
        ReadsTheNumber, MeanOfItsOwn, type("Inherits", (MeanOfItsOwn,), {}), SetsItLater,
        WeightsItself, SquaresIt, ScalesItsGradient, ChangesItInPlace, AddsATerm, ComputesTwice,
    ],
)  # fmt: skip
def test_a_trainer_with_a_loss_of_its_own(cls, model_dir, tmp_path):
    """The gradients are those without the patch."""
    options = {"micro_batches": 2, "cls": cls}
    found = gradients(gemma4(model_dir), tmp_path, rows(), **options)
    with gemma4_compat.disabled("gradient_accumulation"):
        expected = gradients(gemma4(model_dir), tmp_path, rows(), **options)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class PassesOn(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class PassesKeywords(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs)


class PassesAll(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class DropsTheNumber(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


class LogsOutputs(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.largest = outputs.logits.max().item()
        return (loss, outputs) if return_outputs else loss


class LeavesTheSuperclassOut(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compute_loss = transformers.Trainer.compute_loss.__get__(self)


class Evaluates(Trainer):
    """The losses of its evaluations are not weighted, even those of the same rows."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            evaluated = [self.evaluate([row])["eval_loss"] for row in rows()]
            with gemma4_compat.disabled("gradient_accumulation"):
                assert evaluated == [self.evaluate([row])["eval_loss"] for row in rows()]
            model.train()
        return result


@pytest.mark.parametrize(
    "cls",
    [
        PassesOn,
        PassesKeywords,
        PassesAll,
        DropsTheNumber,
        LogsOutputs,
        LeavesTheSuperclassOut,
        Evaluates,
    ],
)
@pytest.mark.regression("gradient_accumulation", DIFFERENT)
def test_a_trainer_that_returns_the_loss(cls, model_dir, tmp_path):
    _, expected = by_hand(gemma4(model_dir), rows())
    options = {"micro_batches": 2, "cls": cls}
    assert_equal(gradients(gemma4(model_dir), tmp_path, rows(), **options), expected)


@pytest.mark.parametrize("cls", [ReadsTheNumber, PassesOn, SetsItLater])
def test_a_trainer_is_as_before(cls, model_dir, tmp_path):
    """Its flag, its attributes and the losses in its log."""

    def trained():
        made = trainer(gemma4(model_dir), tmp_path, rows(), micro_batches=2, cls=cls)
        names = set(vars(made))
        made.train()
        return made, names ^ set(vars(made)), getattr(made, "seen", None)

    made, changed, seen = trained()
    with gemma4_compat.disabled("gradient_accumulation"):
        other, expected, seen_without = trained()
    assert changed == expected
    assert made.model_accepts_loss_kwargs == other.model_accepts_loss_kwargs
    assert seen == seen_without


def test_one_warning(model_dir, tmp_path, caplog):
    """One for each trainer that changes the loss."""
    for cls in (WeightsItself, ReadsTheNumber, WeightsItself):
        with caplog.at_level(logging.WARNING, logger="gemma4_compat"):
            gradients(gemma4(model_dir), tmp_path, rows(), micro_batches=2, cls=cls)
    said = [r.getMessage() for r in caplog.records if "micro batch" in r.getMessage()]
    assert len(said) == 2
    assert all("WeightsItself.compute_loss changes the loss" in text for text in said)


def test_several_gpus_in_one_process(model_dir, tmp_path, caplog):
    """``DataParallel`` divides the batch, and the means of its parts are averaged: one warning."""
    for count in (2, 2, 1):
        made = trainer(gemma4(model_dir), tmp_path, rows(), micro_batches=2)
        made.args._n_gpu = count
        with caplog.at_level(logging.WARNING, logger="gemma4_compat"):
            made.train()
        said = [text for text in caplog.messages if "DataParallel" in text]
        assert len(said) == (count > 1)
        assert all("CUDA_VISIBLE_DEVICES=0" in text for text in said)
        caplog.clear()


def test_micro_batches_of_equal_length(model_dir, tmp_path):
    """The gradients are those without the patch, up to rounding."""
    data = [{**row, "labels": row["input_ids"]} for row in rows()]
    for row in data:
        row["attention_mask"] = torch.ones_like(row["attention_mask"])
    found = gradients(gemma4(model_dir), tmp_path, data, micro_batches=2)
    with gemma4_compat.disabled("gradient_accumulation"):
        expected = gradients(gemma4(model_dir), tmp_path, data, micro_batches=2)
    assert_equal(found, expected)


def test_a_model_with_a_loss_of_its_own(model_dir, tmp_path):
    from transformers import Gemma4ForConditionalGeneration

    class Mine(Gemma4ForConditionalGeneration):
        def forward(self, input_ids, attention_mask, labels):
            output = super().forward(input_ids, attention_mask=attention_mask, labels=labels)
            output.loss = output.loss * (labels[:, 1:] != -100).sum() / 16
            return output

    def found():
        return gradients(gemma4(model_dir, Mine), tmp_path, rows(), micro_batches=2)

    patched = found()
    with gemma4_compat.disabled("gradient_accumulation"):
        expected = found()
    assert all(torch.equal(patched[name], expected[name]) for name in expected)


@pytest.mark.parametrize("own", ["class", "instance"])
def test_a_model_that_says_what_it_accepts(own, model_dir, tmp_path):
    """Trainer passes the number, and the fix changes nothing."""
    from transformers import Gemma4ForConditionalGeneration

    class Mine(Gemma4ForConditionalGeneration):
        accepts_loss_kwargs = True

    def found():
        model = gemma4(model_dir, Mine if own == "class" else None)
        model.accepts_loss_kwargs = True
        return gradients(model, tmp_path, rows(), micro_batches=2)

    patched = found()
    with gemma4_compat.disabled("gradient_accumulation"):
        expected = found()
    assert all(torch.equal(patched[name], expected[name]) for name in expected)


@pytest.mark.regression("gradient_accumulation", DIFFERENT)
def test_a_step_that_runs_twice(model_dir, tmp_path):
    """As adversarial training does, with a copy of the batch."""

    class Twice(transformers.Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            loss = super().training_step(model, dict(inputs), *args, **kwargs)
            return loss + super().training_step(model, inputs, *args, **kwargs)

    found = gradients(gemma4(model_dir), tmp_path, rows(), micro_batches=2, cls=Twice)
    _, expected = by_hand(gemma4(model_dir), rows())
    assert_equal(found, {name: 2 * grad for name, grad in expected.items()})


@pytest.mark.parametrize("stage", ["training_step", "get_batch_samples"])
def test_a_trainer_with_a_step_of_its_own(stage, model_dir, tmp_path):
    """A step that replaces the batch, and one whose batches Trainer does not collect."""

    class Replaces(transformers.Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            labels = inputs["labels"].masked_fill(inputs["labels"] % 2 == 0, -100)
            return super().training_step(model, {**inputs, "labels": labels}, *args, **kwargs)

    class Collects(transformers.Trainer):
        def get_batch_samples(self, iterator, number, device):
            return [next(iterator) for _ in range(number)], None

    options = {"cls": Replaces if stage == "training_step" else Collects, "micro_batches": 2}
    found = gradients(gemma4(model_dir), tmp_path, rows(), **options)
    with gemma4_compat.disabled("gradient_accumulation"):
        expected = gradients(gemma4(model_dir), tmp_path, rows(), **options)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class CutsLongRows(transformers.Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        if (inputs["labels"] != -100).sum() > 4:
            inputs["labels"][:, 6:] = -100
        return super().training_step(model, inputs, *args, **kwargs)


class CopiesLongRows(transformers.Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        if (inputs["labels"] != -100).sum() > 4:
            inputs = {name: value.clone() for name, value in inputs.items()}
        return super().training_step(model, inputs, *args, **kwargs)


class MendsSomeLosses(transformers.Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss if (inputs["labels"] != -100).sum() < 4 else loss.nan_to_num()


@pytest.mark.parametrize("cls", [CutsLongRows, CopiesLongRows, MendsSomeLosses])
def test_some_micro_batches_are_the_users(cls, model_dir, tmp_path):
    """After the first one, all gradients are those without the patch."""

    def last_step():
        made = trainer(gemma4(model_dir), tmp_path, rows(), micro_batches=2, cls=cls)
        made.args.max_steps = 3
        made.train()
        return made.keeper.gradients

    found = last_step()
    with gemma4_compat.disabled("gradient_accumulation"):
        expected = last_step()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class MendsTheSecondLoss(transformers.Trainer):
    calls = 0

    def compute_loss(self, *args, **kwargs):
        self.calls += 1
        loss = super().compute_loss(*args, **kwargs)
        return loss + 0 * loss if self.calls == 2 else loss


def test_one_step_has_one_kind_of_weights(model_dir, tmp_path, caplog):
    """The second micro batch has a loss of the user's, after the first one was weighted."""
    options = {"micro_batches": 2, "cls": MendsTheSecondLoss}
    with caplog.at_level(logging.WARNING, logger="gemma4_compat"):
        found = gradients(gemma4(model_dir), tmp_path, rows(), **options)
    assert "from the next step on" in caplog.text
    assert_equal(found, by_hand(gemma4(model_dir), rows())[1])


def test_a_loss_function_of_the_users(model_dir, tmp_path):
    """With and without the patch, Trainer passes the number to the function."""

    def loss(outputs, labels, num_items_in_batch=None):
        logits, labels = outputs.logits[:, :-1].float(), labels[:, 1:]
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return total / num_items_in_batch

    def found():
        return gradients(gemma4(model_dir), tmp_path, rows(), micro_batches=2, loss=loss)

    patched = found()
    with gemma4_compat.disabled("gradient_accumulation"):
        expected = found()
    assert all(torch.equal(patched[name], expected[name]) for name in expected)


@pytest.mark.regression("gradient_accumulation", DIFFERENT)
def test_label_smoothing(model_dir, tmp_path):
    options = {"label_smoothing_factor": 0.1}
    expected = gradients(gemma4(model_dir), tmp_path, rows(), **options)
    assert_equal(
        gradients(gemma4(model_dir), tmp_path, rows(), micro_batches=2, **options), expected
    )


def test_another_model(llama_dir, tmp_path):
    def found():
        model = transformers.LlamaForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
        data = [{**row, "input_ids": row["input_ids"] % 250} for row in rows()]
        for row in data:
            row["labels"] = torch.where(row["labels"] < 0, -100, row["labels"] % 250)
        return gradients(model, tmp_path, data, micro_batches=2)

    patched = found()
    with gemma4_compat.disabled("gradient_accumulation"):
        expected = found()
    assert all(torch.equal(patched[name], expected[name]) for name in expected)
