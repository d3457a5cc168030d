"""The recipe for speech runs, and its figures are those of a model on one device.

The reference has the same 4-bit weights, and its forward is written out.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gemma4_compat.tiny import build_checkpoint
from tests.sound import tiny_processor, waves
from tests.support import adapter_parameters, assert_same, load_model, logits, split
from tests.test_docs import ON_CPU, SPEECH, blocks, text_of
from tests.test_merge import merged_in_memory

PAGE = "docs/recipes.md"
PLE = "model.language_model.embed_tokens_per_layer"
#: what differs in the test: the device, the tiny processor, and a column that is decoded already
CHANGES = {
    **ON_CPU,
    "AutoProcessor.from_pretrained(MODEL, ": "tiny_processor(",
    'data = data.cast_column("audio", Audio(sampling_rate=16000))\n': "",
    "model = get_peft_model(base": f'base = split(base, "away", {{"{PLE}": "disk", "": "cpu"}})\n'
    "model = get_peft_model(base",
    '"bf16": True,': '"bf16": True, "use_cpu": True, "report_to": [],',
    "compute_metrics=accuracy": "compute_metrics=lambda got: seen.append(got) or accuracy(got)",
    " = Trainer(": " = first = recording(Trainer)(",
    " = SFTTrainer(": " = recording(SFTTrainer)(",
    "SFTConfig(**options,": 'SFTConfig(**{**options, "num_train_epochs": 1},',
    "max_new_tokens=100": "max_new_tokens=5",
}
LENGTHS = (8000, 11000, 9500, 16001, 12345)
TEXTS = ("w5 w6", "w7 w8 w9 w10", "w11", "w12 w13 w14", "w15 w16")


def snapshot(model, of=lambda parameter: parameter):
    values = {name: of(parameter) for name, parameter in adapter_parameters(model).items()}
    return {name: each.detach().clone() for name, each in values.items() if each is not None}


def recording(trainer_class):
    """The trainer class with a record of each step: batch, adapter before, loss, gradients."""

    class Recording(trainer_class):
        def training_step(self, model, inputs, *args, **kwargs):
            batch = {name: each.clone() for name, each in inputs.items()}
            before = snapshot(model)
            loss = super().training_step(model, inputs, *args, **kwargs).item()
            step = SimpleNamespace(batch=batch, before=before, loss=loss)
            step.gradients = snapshot(model, lambda parameter: parameter.grad)
            self.steps = (*getattr(self, "steps", ()), step)
            return torch.tensor(loss)

    return Recording


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The names that the recipe's blocks define."""
    datasets = pytest.importorskip("datasets", reason="the recipe needs datasets")
    pytest.importorskip("trl", reason="the recipe needs TRL")
    folder = tmp_path_factory.mktemp("speech")
    model_dir = folder / "google" / "gemma-4-E2B-it"
    model_dir.mkdir(parents=True)
    build_checkpoint(model_dir)
    sounds = [{"array": sound, "sampling_rate": 16000} for sound in waves(*LENGTHS)]
    rows = datasets.Dataset.from_dict({"audio": sounds, "text": [f"{text} " for text in TEXTS]})
    (folder / "my-speech").mkdir()
    rows.to_parquet(folder / "my-speech" / "train.parquet")
    defined = {"seen": [], "recording": recording, "tiny_processor": tiny_processor, "split": split}
    code = blocks(PAGE, "python", text_of(PAGE).partition(SPEECH)[2])
    assert all(any(text in block for block in code) for text in CHANGES if text not in ON_CPU)
    with pytest.MonkeyPatch.context() as patched, torch.random.fork_rng():
        torch.manual_seed(0)
        patched.chdir(folder)
        patched.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        for number, block in enumerate(code, 1):
            for text, changed in CHANGES.items():
                block = block.replace(text, changed)
            exec(compile(block, f"<speech {number}>", "exec"), defined)
            if "first" in defined and "resumed" not in defined:
                defined["trained"] = snapshot(defined["model"])
                with torch.no_grad():
                    for parameter in adapter_parameters(defined["model"]).values():
                        parameter.zero_()
                defined["first"].train(resume_from_checkpoint="speech/checkpoint-1")
                defined["resumed"] = snapshot(defined["model"])
    return SimpleNamespace(**defined, folder=folder, model_dir=model_dir)


@pytest.fixture(scope="module")
def one(recipe):
    """The model on one device, with an adapter of the recipe's kind."""
    from peft import get_peft_model

    base = load_model(recipe.model_dir, "nf4-nested", llm_int8_skip_modules=None)
    return get_peft_model(base, recipe.config)


def with_adapter(one, values):
    parameters = adapter_parameters(one)
    assert parameters.keys() == values.keys()
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    return one.get_base_model()


def written_out(whole, batch, dtype=None):
    """The logits, from the parts of the model: float32 [rows, tokens, vocabulary]."""
    model = whole.model
    ids = batch["input_ids"]
    is_sound = ids == whole.config.audio_token_id
    plain = ids.masked_fill(is_sound, whole.config.text_config.pad_token_id)
    embedded = model.language_model.embed_tokens(plain)
    heard = model.audio_tower(batch["input_features"], batch["input_features_mask"])
    soft = model.embed_audio(inputs_embeds=heard.last_hidden_state)[heard.attention_mask]
    embedded = embedded.index_put((is_sound,), soft.to(embedded.dtype))
    hidden = model.language_model(
        inputs_embeds=embedded,
        per_layer_inputs=model.language_model.get_per_layer_inputs(plain, embedded),
        attention_mask=batch["attention_mask"],
    ).last_hidden_state
    found = whole.lm_head(hidden).to(dtype)
    return (30 * torch.tanh(found / 30)).float()


def reference(one, values, batch, dtype=None):
    whole = with_adapter(one, values)
    with torch.autocast("cpu", torch.bfloat16):
        return written_out(whole, batch, dtype)


def test_batches(recipe):
    """Each row is its prompt, as for ``generate``, and its answer; features are of its sound."""
    rows = [recipe.data["train"][i] for i in range(4)]
    batch, prompt = recipe.collate(rows), recipe.ask([row["audio"] for row in rows])
    length = prompt["input_ids"].shape[1]
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        assert torch.equal(batch[name][:, :length], prompt[name])
    for i, row in enumerate(rows):
        said = [int(word[1:]) for word in row["text"].split()]
        said.append(recipe.processor.tokenizer.convert_tokens_to_ids("<turn|>"))
        padding = batch["labels"].shape[1] - length - len(said)
        assert batch["labels"][i].tolist() == [-100] * length + said + [-100] * padding
        assert batch["input_ids"][i, length : length + len(said)].tolist() == said
        assert batch["attention_mask"][i, length:].tolist() == [1] * len(said) + [0] * padding
        sound = np.float32(row["audio"]["array"])
        alone = recipe.processor.feature_extractor([sound], return_tensors="pt")
        for name, [expected] in alone.items():
            assert torch.equal(batch[name][i, : len(expected)], expected)
        assert batch["input_features_mask"][i].sum() == alone["input_features_mask"].sum()


def test_losses_and_gradients(recipe, one):
    """Each step of both trainers.  Newer releases of TRL cap the logits in float32."""
    from trl.trainer import sft_trainer

    fused = hasattr(sft_trainer, "add_fused_lm_head")
    assert len(recipe.first.steps) == 3
    assert len(recipe.trainer.steps) == 1
    steps = [(None, step) for step in recipe.first.steps[:2]]  # the third is resumed
    steps += [(torch.float32 if fused else None, step) for step in recipe.trainer.steps]
    for dtype, step in steps:
        found = reference(one.train(), step.before, step.batch, dtype)
        labels = step.batch["labels"][:, 1:]
        one.zero_grad()
        loss = F.cross_entropy(found[:, :-1].flatten(0, 1), labels.flatten())
        loss.backward()
        assert step.loss == pytest.approx(loss.item(), rel=1e-6)  # a mean in another order
        used = {n: p.grad for n, p in adapter_parameters(one).items() if p.grad is not None}
        assert used.keys() == step.gradients.keys()
        for name, expected in used.items():
            difference = (step.gradients[name] - expected).norm() / expected.norm().clamp(min=1e-9)
            # The gradients of TRL's head are rounded once more, to bfloat16.
            assert difference <= (0 if dtype is None else 0.02), name
        assert all(g.any() for n, g in used.items() if "lora_B" in n)
        assert sum("embed_audio" in name for name in used) == 2
        for layer in range(6):
            assert any(f"language_model.layers.{layer}." in name for name in used)


def test_evaluation(recipe, one):
    found = recipe.seen[-1]
    expected = reference(
        one.eval(), recipe.resumed, recipe.collate([recipe.data["test"][0]])
    ).argmax(-1)
    assert isinstance(found.predictions, np.ndarray)
    np.testing.assert_array_equal(found.predictions, expected.numpy())
    few = SimpleNamespace(
        predictions=np.array([[9, 4, 5, 9]]), label_ids=np.array([[-100, -100, 4, 6]])
    )
    assert recipe.accuracy(few) == {"accuracy": 0.5}


def test_resumed(recipe):
    assert recipe.trained.keys() == recipe.resumed.keys()
    for name, value in recipe.trained.items():
        assert torch.equal(value, recipe.resumed[name]), name


def test_generated(recipe, one):
    inputs, whole = dict(recipe.inputs), with_adapter(one.eval(), snapshot(recipe.model))
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        while inputs["input_ids"].shape[1] < recipe.output.shape[1]:
            token = written_out(whole, inputs)[:, -1:].argmax(-1)
            inputs["input_ids"] = torch.cat([inputs["input_ids"], token], dim=1)
            inputs["attention_mask"] = F.pad(inputs["attention_mask"], (0, 1), value=1)
    assert recipe.output.shape[1] == length + 5
    assert torch.equal(recipe.output, inputs["input_ids"])


def test_merged(recipe):
    found = logits(load_model(recipe.folder / "speech-merged"), ["audio"])
    expected = merged_in_memory(recipe.model_dir, recipe.folder / "speech-lora")
    assert_same(found, {"audio": expected["audio"]})
    base = logits(load_model(recipe.model_dir), ["audio"])
    assert not torch.equal(found["audio"], base["audio"])
