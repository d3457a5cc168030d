"""The recipe for speech runs, and its figures are those of a model on one device.

The reference has the values of the 4-bit weights in plain layers, and its forward is written out.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gemma4_compat
from gemma4_compat.tiny import build_checkpoint
from tests.sound import alone, tiny_processor, waves
from tests.support import adapter_parameters, assert_same, dequantized, load_model, logits, split
from tests.test_docs import ON_CPU, blocks, text_of
from tests.test_merge import merged_in_memory

PLE = "model.language_model.embed_tokens_per_layer"
#: what differs in the test: the device, the tiny processor, and a column that is decoded already
CHANGES = {
    **ON_CPU,
    "AutoProcessor.from_pretrained(MODEL, ": "tiny_processor(",
    'data = data.cast_column("audio", Audio(sampling_rate=16000))\n': "",
    "model = get_peft_model(base": f'base = split(base, "away", {{"{PLE}": "disk", "": "cpu"}})\n'
    "model = get_peft_model(base",
    '"bf16": True,': '"bf16": True, "use_cpu": True, "report_to": [],',
    "compute_metrics=accuracy": "compute_metrics=lambda found: seen.append(found) or accuracy(found)",
    " = Trainer(": " = first = recording(Trainer)(",
    " = SFTTrainer(": " = recording(SFTTrainer)(",
    "max_new_tokens=100": "max_new_tokens=5",
}
LENGTHS = (8000, 11000, 9500, 16001, 12345)
TEXTS = ("w5 w6", "w7 w8 w9 w10", "w11", "w12 w13 w14", "w15 w16")


def snapshot(model, of=lambda parameter: parameter):
    return {name: of(p).detach().clone() for name, p in adapter_parameters(model).items()}


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
    section = text_of("docs/recipes.md").partition("## Fine-tune on speech")[2]
    code = [each for each in blocks("docs/recipes.md", "python") if each in section]
    with pytest.MonkeyPatch.context() as patched:
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
    """The model on one device, without 4-bit layers, with an adapter of the recipe's kind."""
    from peft import get_peft_model

    base = load_model(recipe.model_dir, "nf4-nested", llm_int8_skip_modules=None)
    return get_peft_model(dequantized(base), recipe.config)


def with_adapter(one, values):
    parameters = adapter_parameters(one)
    assert parameters.keys() == values.keys()
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    return one.get_base_model()


def written_out(whole, batch):
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
    return 30 * torch.tanh(whole.lm_head(hidden) / 30).float()


def reference(one, values, batch):
    whole = with_adapter(one, values)
    with torch.autocast("cpu", torch.bfloat16):
        return written_out(whole, batch)


def test_batches(recipe):
    """Each row is its prompt, as for ``generate``, and its answer; features are of its sound."""
    rows = [recipe.data["train"][i] for i in range(4)]
    batch, prompt = recipe.collate(rows), recipe.ask([row["audio"] for row in rows])
    length = prompt["input_ids"].shape[1]
    for name in prompt:
        assert torch.equal(batch[name][:, :length] if "features" not in name else batch[name],
                           prompt[name])  # fmt: skip
    for row, ids, labels, mask, features in zip(
        rows, batch["input_ids"], batch["labels"], batch["attention_mask"],
        batch["input_features"], strict=True,
    ):  # fmt: skip
        count = len(row["text"].split()) + 1
        said = [int(word[1:]) for word in row["text"].split()]
        assert ids[length : length + count - 1].tolist() == said
        assert labels[length : length + count].tolist() == ids[length : length + count].tolist()
        assert (labels != -100).sum() == count
        assert not mask[length + count :].any()
        assert recipe.processor.tokenizer.convert_ids_to_tokens(ids[length + count - 1].item()) == "<turn|>"
        extractor = recipe.processor.feature_extractor
        expected = extractor([np.float32(row["audio"]["array"])], return_tensors="pt")["input_features"][0]
        assert torch.equal(features[: len(expected)], expected)


def test_losses_and_gradients(recipe, one):
    """Each step of both trainers; float32 sums in another order are the only difference."""
    steps = [*recipe.first.steps, *recipe.trainer.steps]
    assert len(steps) == 2 + 1 + 2
    for step in steps:
        found = reference(one, step.before, step.batch)
        one.zero_grad()
        loss = F.cross_entropy(found[:, :-1].flatten(0, 1), step.batch["labels"][:, 1:].flatten())
        loss.backward()
        print(step.loss, loss.item())
        worst = {n: ((p.grad - step.gradients[n]).norm() / p.grad.norm()).item() for n, p in adapter_parameters(one).items() if p.grad is not None}
        print(max(worst.values()), [n for n, g in step.gradients.items() if "lora_B" in n and not g.any()])


def test_evaluation(recipe, one):
    found = recipe.seen[-1]
    expected = reference(one, recipe.resumed, recipe.collate([recipe.data["test"][0]])).argmax(-1)
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
    inputs, whole = dict(recipe.inputs), with_adapter(one, snapshot(recipe.model))
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
