"""Trainer restores what ``from_pretrained`` of the checkpoint's folder restores."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import config_of, save_random, split

WEIGHTS = "model.safetensors"
NOT_RESTORED = r"not restored: .*(embed_vision|model\.layers)"
SHOWS = pytest.mark.regression("renamed_checkpoint_weights", NOT_RESTORED)


def unified(folder):
    """12B: its image embedder is renamed."""
    pytest.importorskip("transformers.models.gemma4_unified")
    import transformers

    text = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
    }  # fmt: skip
    vision = {"patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 64, "mm_posemb_size": 16}
    config = transformers.Gemma4UnifiedConfig(
        text_config=text,
        vision_config=vision | {"output_proj_dims": 64},
        audio_config={"audio_embed_dim": 64},
    )
    model_class = transformers.Gemma4UnifiedForConditionalGeneration
    moved(model_class(config), 0).save_pretrained(folder)
    return model_class


def gemma3n_text(folder):
    """The text model of a checkpoint of the whole model: all of its weights are renamed."""
    model_class, _ = config_of("Gemma3n")
    save_random("Gemma3n", folder)
    names = {key: key.split("model.")[-1] for key in load_file(folder / WEIGHTS)}
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {f"model.language_model.{names[key]}": each for key, each in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    return model_class


MODELS = pytest.mark.parametrize("make", [unified, gemma3n_text])


def moved(model, seed=1):
    """Random weights: a training of all of them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def trainer_of(model, folder, cls=None, **options):
    import transformers

    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, **options}
    args = transformers.TrainingArguments(output_dir=str(folder / "out"), **options)
    rows = [{"input_ids": [2, 3 + i, 9], "labels": [2, 3 + i, 9]} for i in range(8)]
    return (cls or transformers.Trainer)(model=model, args=args, train_dataset=rows)


def assert_restored(found, expected):
    """All tensors have the same bits."""
    tensors = found.state_dict()
    pairs = expected.state_dict().items()
    wrong = [k for k, each in pairs if not torch.equal(tensors[k].cpu(), each.cpu())]
    assert not wrong, f"not restored: {wrong}"


def resume(trainer, folder):
    trainer._load_from_checkpoint(str(folder))


def best(trainer, folder):
    trainer.state.best_model_checkpoint = str(folder)
    trainer._load_best_model()


def save(trainer, folder, how):
    """One file, shards, or a file of PyTorch."""
    if how == "shards":
        trainer.model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    else:
        trainer.save_model(str(folder))
    if how == "pytorch":
        torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()


@SHOWS
@MODELS
@pytest.mark.parametrize("load", [resume, best])
@pytest.mark.parametrize("how", ["file", "shards", "pytorch"])
def test_trainer_restores_what_from_pretrained_restores(tmp_path, caplog, make, load, how):
    model_class = make(tmp_path)
    trained = moved(model_class.from_pretrained(tmp_path))
    folder = tmp_path / "checkpoint"
    save(trainer_of(trained, tmp_path), folder, how)
    model = model_class.from_pretrained(tmp_path)
    logging.getLogger("transformers").propagate = True
    try:
        load(trainer_of(model, tmp_path), folder)
    finally:
        logging.getLogger("transformers").propagate = False
    assert_restored(model, model_class.from_pretrained(folder))
    assert_restored(model, trained)
    assert "unexpected keys" not in caplog.text
    assert "embed_vision" not in caplog.text
    assert "load_state_dict" not in vars(model)


@SHOWS
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path):
    """With the optimiser; the base has other weights than the checkpoint."""
    model_class = unified(tmp_path)
    options = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "seed": 3}
    whole = moved(model_class.from_pretrained(tmp_path))
    trainer_of(whole, tmp_path, **options).train()
    model = model_class.from_pretrained(tmp_path)
    checkpoint = tmp_path / "out" / "checkpoint-2"
    trainer_of(model, tmp_path, **options).train(resume_from_checkpoint=str(checkpoint))
    assert_restored(model, whole)


@SHOWS
@pytest.mark.parametrize("how", ["compiled", "parallel", "split", "own_trainer"])
def test_wrapped_models(tmp_path, how):
    import transformers

    class Own(transformers.Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
            super()._load_from_checkpoint(resume_from_checkpoint, model=model)

    model_class = unified(tmp_path)
    trained = moved(model_class.from_pretrained(tmp_path))
    trained.save_pretrained(tmp_path / "checkpoint")
    model = model_class.from_pretrained(tmp_path)
    given = model
    if how == "compiled":
        given = torch.compile(model)
    elif how == "split":
        given = split(model, tmp_path, {"model.embed_vision": "disk", "": "cpu"})
    trainer = trainer_of(given, tmp_path, Own if how == "own_trainer" else None)
    if how == "parallel":
        wrapped = torch.nn.DataParallel(model)
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint"), wrapped)
    else:
        resume(trainer, tmp_path / "checkpoint")
    if how == "split":
        model.save_pretrained(tmp_path / "again")
        model = model_class.from_pretrained(tmp_path / "again")
    assert_restored(model, trained)


@SHOWS
def test_key_mapping_and_names_of_the_model(tmp_path):
    """A user's own names; and a checkpoint that was written with the names of the model."""
    model_class = unified(tmp_path)
    tensors = {k.replace("layers", "blocks"): v for k, v in load_file(tmp_path / WEIGHTS).items()}
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    mapping = {"key_mapping": {"blocks": "layers"}}
    trained = moved(model_class.from_pretrained(tmp_path, **mapping))
    trained.save_pretrained(tmp_path / "checkpoint")
    assert any("blocks" in key for key in load_file(tmp_path / "checkpoint" / WEIGHTS))
    model = model_class.from_pretrained(tmp_path, **mapping)
    resume(trainer_of(model, tmp_path), tmp_path / "checkpoint")
    assert_restored(model, trained)
    moved(model, seed=2)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "plain")
    own = {k: v.contiguous() for k, v in trained.state_dict().items() if k != "lm_head.weight"}
    save_file(own, tmp_path / "plain" / WEIGHTS, metadata={"format": "pt"})
    resume(trainer_of(model, tmp_path), tmp_path / "plain")
    assert_restored(model, trained)
