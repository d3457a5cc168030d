"""Trainer restores what ``from_pretrained`` of the checkpoint's folder restores."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import config_of, save_random

WEIGHTS = "model.safetensors"
SHOWS = pytest.mark.regression(
    "renamed_checkpoint_weights", r"not restored: .*(embed_vision|layers)"
)


def unified(folder):
    """12B: its image embedder is renamed."""
    pytest.importorskip("transformers.models.gemma4_unified", reason="not in this transformers")
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
    return model_class, {}


def gemma3n_text(folder):
    """The text model of a checkpoint of the whole model: all of its weights are renamed."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    if get_checkpoint_conversion_mapping("gemma3n_text") is None:
        pytest.skip("this transformers does not load such a checkpoint")
    return with_names("Gemma3n", folder, "model.", "model.language_model."), {}


def own_names(folder):
    """A checkpoint with the user's names, and the ``key_mapping`` for it."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model_class = with_names("Gemma4 experts", folder, "layers", "blocks", **layers)
    return model_class, {"key_mapping": {"blocks": "layers"}}


def with_names(family, folder, old, new, **options):
    """The model class; the checkpoint has ``new`` in its names where the model has ``old``."""
    save_random(family, folder, **options)
    tensors = load_file(folder / WEIGHTS).items()
    names = {name: name.replace("model.language_model.", "model.") for name, _ in tensors}
    renamed = {names[name].replace(old, new, 1): each for name, each in tensors}
    save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})
    return config_of(family)[0]


def moved(model, seed=1):
    """Random weights: a training of all of them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def trainer_of(model, folder, **options):
    import transformers

    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, **options}
    args = transformers.TrainingArguments(output_dir=str(folder / "out"), **options)
    rows = [{"input_ids": [2, 3 + i, 9], "labels": [2, 3 + i, 9]} for i in range(8)]
    return transformers.Trainer(model=model, args=args, train_dataset=rows)


def assert_restored(found, expected):
    """All tensors have the same bits."""
    tensors = found.state_dict()
    wrong = [k for k, each in expected.state_dict().items() if not torch.equal(tensors[k], each)]
    assert not wrong, f"not restored: {wrong}"


def resume(trainer, folder):
    trainer._load_from_checkpoint(str(folder))


def best(trainer, folder):
    trainer.state.best_model_checkpoint = str(folder)
    trainer._load_best_model()


@SHOWS
@pytest.mark.parametrize(
    ("make", "load", "files"),
    [
        (own_names, resume, 1),
        (unified, resume, 1),
        (own_names, best, 2),
        (gemma3n_text, resume, 2),
        (gemma3n_text, best, 1),
        (unified, best, 2),
    ],
)
def test_trainer_restores_what_from_pretrained_restores(tmp_path, caplog, make, load, files):
    """From one file, and from shards; nothing that was restored is named in a warning."""
    model_class, options = make(tmp_path)
    trained = moved(model_class.from_pretrained(tmp_path, **options))
    folder = tmp_path / "checkpoint"
    size = (tmp_path / WEIGHTS).stat().st_size
    trained.save_pretrained(folder, max_shard_size=int(size * 1.2 / files))
    assert len(list(folder.glob("*.safetensors"))) == files
    model = model_class.from_pretrained(tmp_path, **options)
    logging.getLogger("transformers").propagate = True
    try:
        load(trainer_of(model, tmp_path), folder)
    finally:
        logging.getLogger("transformers").propagate = False
    assert_restored(model, trained)
    assert_restored(model_class.from_pretrained(folder, **options), trained)
    assert "unexpected keys" not in caplog.text
    assert not re.search("layers|embed_vision", caplog.text)
    assert "load_state_dict" not in vars(model)


@SHOWS
@pytest.mark.parametrize("make", [own_names, unified])
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, make):
    """With the optimizer; the base has other weights than the checkpoint."""
    model_class, mapping = make(tmp_path)
    options = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2, "seed": 3}
    whole = moved(model_class.from_pretrained(tmp_path, **mapping))
    trainer_of(whole, tmp_path, **options).train()
    model = model_class.from_pretrained(tmp_path, **mapping)
    checkpoint = tmp_path / "out" / "checkpoint-1"
    trainer_of(model, tmp_path, **options).train(resume_from_checkpoint=str(checkpoint))
    assert_restored(model, whole)


def test_other_families_are_loaded_as_before(tmp_path, llama_dir):
    import transformers

    class Llama(transformers.LlamaForCausalLM):
        def load_state_dict(self, *args, **kwargs):
            loads.append("load_state_dict" in vars(self))
            return super().load_state_dict(*args, **kwargs)

    loads = []
    trained, model = (moved(Llama.from_pretrained(llama_dir), seed) for seed in (1, 2))
    trained.save_pretrained(tmp_path)
    resume(trainer_of(model, tmp_path), tmp_path)
    assert_restored(model, trained)
    assert loads == [False]


RENAMED = {"gemma4_unified": unified, "gemma3n_text": gemma3n_text}


def model_types():
    """Those of Gemma 4, its variants and Gemma 3n for which transformers renames weights."""
    from transformers import CONFIG_MAPPING
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping as mapping

    ours = [each for each in CONFIG_MAPPING if each.startswith(("gemma4", "gemma3n"))]
    return [each for each in ours if mapping(each)]


def test_every_renamed_model_is_tested():
    assert set(model_types()) <= set(RENAMED)


@pytest.mark.parametrize("make", RENAMED.values(), ids=RENAMED)
def test_saved_models_are_restored_whole_or_not_at_all(tmp_path, make):
    """By each loader, from the file of ``save_pretrained``; and an adapter on renamed modules."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model_class, _ = make(tmp_path)
    base = model_class.from_pretrained(tmp_path)
    moved(base).save_pretrained(tmp_path / "saved")
    for load, model in (
        (resume, model_class(base.config)),
        (best, moved(model_class.from_pretrained(tmp_path), seed=2)),
    ):
        load(trainer_of(model, tmp_path), tmp_path / "saved")
        assert_restored(model, base)

    tensors = load_file(tmp_path / "saved" / WEIGHTS)
    model = moved(model_class.from_pretrained(tmp_path), seed=2)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(tensors, strict=True)

    linear = [n for n, each in base.named_modules() if isinstance(each, torch.nn.Linear)]
    renamed = [n for n in linear if f"{n}.weight" not in tensors and n != "lm_head"]
    assert renamed
    trained = moved(get_peft_model(base, LoraConfig(target_modules=renamed)), seed=3)
    trained.save_pretrained(tmp_path / "adapter")
    fresh = PeftModel.from_pretrained(
        model_class.from_pretrained(tmp_path / "saved"), tmp_path / "adapter"
    )
    fresh.load_adapter(tmp_path / "adapter", "again")
    for adapter in ("default", "again"):
        found = {k.replace(f".{adapter}.", "."): v for k, v in fresh.state_dict().items()}
        expected = {k.replace(".default.", "."): v for k, v in trained.state_dict().items()}
        lora = [k for k in expected if "lora_" in k]
        assert len(lora) == 2 * len(renamed)
        assert not [k for k in lora if not torch.equal(found[k], expected[k])]
