"""TRL's trainers on Gemma 4: losses and gradients are those that a few lines of PyTorch compute.

These lines compute each row alone, without padding, and apply the final soft cap by hand.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import transformers
from packaging.version import Version

from gemma4_compat.tiny import LANGUAGE_TARGETS, _config, image_inputs
from tests.patches.test_gradient_accumulation import KeepsGradients, assert_equal, gemma4
from tests.sound import tiny_tokenizer

datasets = pytest.importorskip("datasets", reason="TRL needs datasets")
trl = pytest.importorskip("trl", reason="trl is not installed")

VERSION = Version(trl.__version__)
CAP = 3.0  # so low that a loss without the cap is far away
LENGTHS = (3, 5, 9, 14)
#: Before, Trainer counts the first token of each row, too, which no loss has.
COUNTS_TARGETS = Version("5.15") <= Version(transformers.__version__)
TEMPLATE = (
    "{% for message in messages %}{{ 'w6 ' if message['role'] == 'user' else 'w5 ' }}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '<|image|> ' if part['type'] == 'image' else part['text'] + ' ' }}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w5 {% endif %}"
)


def model(model_dir):
    made = gemma4(model_dir)
    made.config.text_config.final_logit_softcapping = CAP
    return made


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=LANGUAGE_TARGETS)


def train_b(model):
    """Give the adapter another value than that of an untrained one."""
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=draw)


def arguments(kind, folder, micro_batches, **options):
    return kind(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=len(LENGTHS) // micro_batches,
        gradient_accumulation_steps=micro_batches,
        gradient_checkpointing=False,
        max_grad_norm=0,
        learning_rate=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        **options,
    )


def trained(trainer):
    """The logged loss of one step, and its gradients by the names of the parameters."""
    keeper = KeepsGradients()
    trainer.add_callback(keeper)
    trainer.train()
    return trainer.state.log_history[0]["loss"], keeper.gradients


def log_probs(model, ids, image=None):
    """The log probability of each token of a row [length] after the first."""
    ids = torch.tensor(ids)
    inputs = {} if image is None else pixels([image])
    inputs["mm_token_type_ids"] = (ids == model.config.image_token_id)[None].long()
    states = model.get_base_model().model(input_ids=ids[None], **inputs).last_hidden_state
    logits = states[0, :-1] @ model.get_output_embeddings().weight.T
    logits = CAP * torch.tanh(logits / CAP)
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def check(found, model, loss):
    """The loss and gradients of a step are those of the loss by hand on the trainer's model."""
    model.zero_grad()
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_equal(found[1], expected)
    assert found[0] == pytest.approx(loss.item(), abs=1e-4)  # TRL 1.3 rounds it


def pixels(images):
    """Pixel values of Gemma 4's shapes for images that are numbers."""
    inputs = image_inputs(_config(), batch=max(images) + 1)
    return {name: inputs[name][images] for name in ("pixel_values", "image_position_ids")}


def processor():
    """Stand in for Gemma 4's processor, which needs Pillow: an image is a number here."""
    from transformers import BatchFeature
    from transformers.processing_utils import ProcessorMixin

    class Processor(ProcessorMixin):
        image_token, image_token_id = "<|image|>", _config().image_token_id

        def __init__(self, tokenizer):
            super().__init__(tokenizer, chat_template=TEMPLATE)

        @classmethod
        def get_attributes(cls):
            return ["tokenizer"]

        def __call__(self, images=None, text=None, return_tensors=None, **options):
            options.pop("return_mm_token_type_ids", None)
            options.setdefault("padding", True)  # as Gemma 4's does
            soft = f"<|image> {' '.join(4 * [self.image_token])} <image|>"
            text = [text] if isinstance(text, str) else text
            text = [each.replace(self.image_token, soft) for each in text]
            batch = dict(self.tokenizer(text, **options))
            soft = [[int(i == self.image_token_id) for i in ids] for ids in batch["input_ids"]]
            batch["mm_token_type_ids"] = soft
            if images:
                batch |= pixels([image for row in images for image in row])
            return BatchFeature(batch, tensor_type=return_tensors)

    return Processor(tiny_tokenizer())


def sentences():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(10, 480, (length,), generator=draw).tolist() for length in LENGTHS]


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_sft(loss_type, micro_batches, model_dir, tmp_path):
    trainer = trl.SFTTrainer(
        model=model(model_dir),
        args=arguments(trl.SFTConfig, tmp_path, micro_batches, loss_type=loss_type),
        train_dataset=datasets.Dataset.from_dict({"input_ids": sentences()}),
        processing_class=tiny_tokenizer(),
        peft_config=lora(),
    )
    train_b(trainer.model)
    found = trained(trainer)
    each = -torch.cat([log_probs(trainer.model, ids) for ids in sentences()])
    loss = (each * each.neg().detach().exp() if loss_type == "dft" else each).mean()
    if loss_type == "dft" and not COUNTS_TARGETS:
        loss *= (sum(LENGTHS) - len(LENGTHS)) / sum(LENGTHS)
    check(found, trainer.model, loss)


def spoken(role, ids):
    return [{"role": role, "content": " ".join(f"w{i}" for i in ids)}]


def preferences(images):
    rows = sentences()
    columns = {
        "prompt": [spoken("user", ids) for ids in rows],
        "chosen": [spoken("assistant", ids[1:]) for ids in reversed(rows)],
        "rejected": [spoken("assistant", ids[:2]) for ids in rows],
    }
    return columns | ({"images": [[i] for i in range(len(rows))]} if images else {})


def ids_of(text, image):
    """The token ids of a message's words, with an image before them."""
    soft = [500, 501, 501, 501, 501, 502] if image is not None else []
    return soft + [int(word[1:]) for word in text.split()]


def processing_class(images):
    words = tiny_tokenizer()
    words.chat_template = TEMPLATE
    return processor() if images else words


@pytest.mark.parametrize(
    ("images", "learnt", "micro_batches"),
    [(True, False, 1), (True, True, 4), (False, True, 2)],
    ids=["untrained", "images", "text"],
)
def test_dpo(images, learnt, micro_batches, model_dir, tmp_path):
    data = preferences(images)
    trainer = trl.DPOTrainer(
        model=model(model_dir),
        args=arguments(trl.DPOConfig, tmp_path, micro_batches, beta=0.5),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=processing_class(images),
        peft_config=lora(),
    )
    if learnt:
        train_b(trainer.model)
    found = trained(trainer)

    def log_prob(prompt, answer, image):
        prompt = [6, *ids_of(prompt[0]["content"], image), 5]
        answer = ids_of(answer[0]["content"], None)
        return log_probs(trainer.model, prompt + answer, image)[len(prompt) - 1 :].sum()

    losses = []
    for row in range(len(LENGTHS)):
        prompt, image = data["prompt"][row], row if images else None
        pair = [log_prob(prompt, data[name][row], image) for name in ("chosen", "rejected")]
        with torch.no_grad(), trainer.model.disable_adapter():
            base = [log_prob(prompt, data[name][row], image) for name in ("chosen", "rejected")]
        score = pair[0] - base[0] - pair[1] + base[1]
        losses.append(-torch.nn.functional.logsigmoid(0.5 * score))
    loss = torch.stack(losses).mean()
    if not learnt:
        assert loss.item() == pytest.approx(0.6931472)
    check(found, trainer.model, loss)


@pytest.mark.parametrize(
    ("images", "micro_batches"), [(True, 2), (False, 4)], ids=["images", "text"]
)
def test_grpo(images, micro_batches, model_dir, tmp_path):
    """Two completions of each of two prompts; the reward depends on their tokens."""
    prompts = sentences()[2:]
    data = {"prompt": [spoken("user", ids) for ids in prompts], "row": [0, 1]}
    completions = []

    def reward(completion_ids, row, **_):
        completions.extend(zip(row, completion_ids, strict=True))
        return [float(sum(ids)) for ids in completion_ids]

    trainer = trl.GRPOTrainer(
        model=model(model_dir),
        reward_funcs=reward,
        args=arguments(
            trl.GRPOConfig,
            tmp_path,
            micro_batches,
            num_generations=2,
            max_completion_length=5,
            # Gemma 4's processor pads prompts by default, and GRPO attends to this padding.
            chat_template_kwargs={"padding": False},
        ),
        train_dataset=datasets.Dataset.from_dict(data | ({"images": [[0], [1]]} if images else {})),
        processing_class=processing_class(images),
        peft_config=lora(),
    )
    train_b(trainer.model)
    found = trained(trainer)
    assert len(completions) == 4
    terms = []
    for row in (0, 1):
        image = row if images else None
        prompt = [6, *ids_of(data["prompt"][row][0]["content"], image), 5]
        group = [ids for own, ids in completions if own == row]
        rewards = torch.tensor([float(sum(ids)) for ids in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for ids, advantage in zip(group, advantages, strict=True):
            logs = log_probs(trainer.model, prompt + ids, image)[len(prompt) - 1 :]
            terms.append(-advantage * (logs - logs.detach()).exp())
    check(found, trainer.model, torch.cat(terms).mean())


def test_kto(model_dir, tmp_path):
    """The loss without the mean over mismatched pairs, which depends on the micro batch."""
    kto = import_module("trl" if Version("1.16") <= VERSION else "trl.experimental.kto")
    data = {
        "prompt": [spoken("user", ids) for ids in sentences()],
        "completion": [spoken("assistant", ids[1:]) for ids in reversed(sentences())],
        "label": [True, False, True, False],
    }
    trainer = kto.KTOTrainer(
        model=model(model_dir),
        args=arguments(kto.KTOConfig, tmp_path, 4, loss_type="apo_zero_unpaired", beta=0.5),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=processing_class(images=False),
        peft_config=lora(),
    )
    train_b(trainer.model)
    found = trained(trainer)
    losses = []
    for row in trainer.train_dataset:
        ids, first = row["prompt_ids"] + row["completion_ids"], len(row["prompt_ids"]) - 1
        score = log_probs(trainer.model, ids)[first:].sum()
        with torch.no_grad(), trainer.model.disable_adapter():
            base = log_probs(trainer.model, ids)[first:].sum()
        score = 0.5 * (score - base)
        losses.append((-score if row["label"] else score).sigmoid())
    check(found, trainer.model, torch.stack(losses).mean())
