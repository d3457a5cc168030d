"""QLoRA with the real trainers: a split model learns the same as the model on one device."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch

from gemma4_compat.model.meta import checkpointing
from gemma4_compat.tiny import BROAD_TARGETS, TOWERS
from tests.support import (
    adapter_parameters,
    assert_same,
    load_model,
    offloaded,
    on_one_gpu,
    quantization,
    split,
)

STEPS = 10
CHECKPOINTING = pytest.mark.parametrize(
    "checkpointing", [{}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}],
    ids=["default", "reentrant"],
)  # fmt: skip


def sentences():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 16, (2 * STEPS,), generator=generator).tolist()
    return [
        " ".join(f"w{i}" for i in torch.randint(4, 500, (length,), generator=generator).tolist())
        for length in lengths
    ]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    vocabulary = {**special, **{f"w{i}": i for i in range(4, 500)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def lora(**options):
    from peft import LoraConfig

    return LoraConfig(
        r=4, lora_alpha=8, target_modules=BROAD_TARGETS, task_type="CAUSAL_LM", **options
    )


def arguments(kind, output_dir, device, options):
    return kind(
        output_dir=str(output_dir),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        warmup_steps=0,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=device == "cpu",
        **options,
    )


def recording(trainer_class):
    """The trainer class with a record of each step's exact loss; the log may round it."""

    class Recording(trainer_class):
        losses = ()

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses = (*self.losses, loss.item())
            return loss

    return Recording


def transformers_trainer(model, output_dir, device, options):
    """The users' code: prepare the model, add the adapter, train."""
    from peft import get_peft_model, prepare_model_for_kbit_training
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    words = tokenizer()
    prepare = {"use_gradient_checkpointing": options["gradient_checkpointing"]}
    prepare |= {key: value for key, value in options.items() if key.endswith("kwargs")}
    torch.manual_seed(0)
    return recording(Trainer)(
        model=get_peft_model(prepare_model_for_kbit_training(model, **prepare), lora()),
        args=arguments(TrainingArguments, output_dir, device, options),
        train_dataset=[words(sentence) for sentence in sentences()],
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )


def sft_trainer(model, output_dir, device, options):
    datasets = pytest.importorskip("datasets", reason="SFTTrainer needs datasets")
    trl = pytest.importorskip("trl", reason="trl is not installed")
    torch.manual_seed(0)
    return recording(trl.SFTTrainer)(
        model=model,
        args=arguments(trl.SFTConfig, output_dir, device, options),
        train_dataset=datasets.Dataset.from_dict({"text": sentences()}),
        processing_class=tokenizer(),
        peft_config=lora(),
    )


NAMES = ["Trainer", "SFTTrainer"]
TRAINERS = pytest.mark.parametrize("make", [transformers_trainer, sft_trainer], ids=NAMES)


def train(make, model, output_dir, device="cpu", **options):
    """The loss of each step, and the adapter's tensors by name before and after."""
    options.setdefault("gradient_checkpointing", True)
    trainer = make(model, output_dir, device, options)
    before = {n: p.detach().clone() for n, p in adapter_parameters(trainer.model).items()}
    assert {parameter.device.type for parameter in before.values()} == {device}
    trainer.train()
    assert len(trainer.losses) == STEPS
    assert trainer.model.is_gradient_checkpointing is options["gradient_checkpointing"]
    return trainer.losses, before, adapter_parameters(trainer.model)


def check(found, expected):
    losses, before, after = found
    assert losses == expected[0]
    assert after.keys() == expected[2].keys()
    assert not [name for name in after if not torch.equal(after[name], expected[2][name])]
    learnt = {name for name in after if not torch.equal(after[name], before[name])}
    # The data are text: the adapters of the language model learn, those of the towers do not.
    assert learnt == {name for name in after if ".language_model." in name}
    for layer in range(6):
        assert any(f".layers.{layer}.self_attn.q_proj." in name for name in learnt)
    for layer in range(3):
        assert any(f".layers.{layer}.self_attn.k_proj." in name for name in learnt)
    assert any("_tower." in name for name in after)


@pytest.fixture(scope="module", params=[transformers_trainer, sft_trainer], ids=NAMES)
def trained_on_one_device(request, model_dir, tmp_path_factory):
    """The function that makes the trainer, and its results for a model on one device."""
    model = load_model(model_dir, "nf4-nested")
    folder = tmp_path_factory.mktemp("one-device")
    return request.param, train(request.param, model, folder, gradient_checkpointing=False)


@CHECKPOINTING
def test_towers_on_disk(trained_on_one_device, checkpointing, model_dir, tmp_path):
    make, expected = trained_on_one_device
    model = split(load_model(model_dir, "nf4-nested"), tmp_path / "offloaded")
    at_rest = offloaded(model)
    assert at_rest
    check(train(make, model, tmp_path, **checkpointing), expected)
    assert {name.replace(".base_layer", "") for name in offloaded(model)} == at_rest


@TRAINERS
@CHECKPOINTING
@pytest.mark.cuda
def test_towers_on_the_cpu(make, checkpointing, model_dir, tmp_path):
    device_map = {**dict.fromkeys(TOWERS, "cpu"), "": 0}
    model = load_model(model_dir, "nf4-nested", device_map, llm_int8_enable_fp32_cpu_offload=True)
    one = on_one_gpu(model_dir, "nf4-nested", model)
    expected = train(make, one, tmp_path, "cuda", gradient_checkpointing=False)
    check(train(make, model, tmp_path, "cuda", **checkpointing), expected)


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_activations_in_other_memory(kind, moe_dir):
    """Experts, and torch's offloading of activations: equal gradients, no step keeps tensors."""
    from peft import get_peft_model
    from transformers import Gemma4ForCausalLM

    model = Gemma4ForCausalLM.from_pretrained(
        moe_dir, device_map={"": "cpu"}, quantization_config=quantization(kind)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(model, lora(init_lora_weights=False)).train()
    model.enable_input_require_grads()
    getattr(model, checkpointing())({"use_reentrant": False})
    ids = torch.arange(4, 20).reshape(2, 8)
    gradients, kept = [], []
    for offloading in (nullcontext, *[torch.autograd.graph.save_on_cpu] * 4):
        with offloading():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in adapter_parameters(model).items()})
        model.zero_grad()
        del loss
        gc.collect()
        live = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
        kept.append(live - sum(map(len, gradients)))
    assert all(each.any() for each in gradients[0].values())
    for found in gradients[1:]:
        assert_same(found, gradients[0])
    assert len({*kept}) == 1, kept
