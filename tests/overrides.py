"""What users override, for ``tests/overrides_table.py``: one function for each override.

A function gets a ``Case`` before the model is made.  It changes the case, or registers functions
with ``case.prepare`` that change the loaded model.  Each override calls ``case.reach()`` when it
runs.
"""

from __future__ import annotations

import functools
import inspect
from concurrent.futures import ThreadPoolExecutor

ROWS = {}
#: by kind: the actions that reach the overrides, and why the others do not
TRAINING = ("step 1", "step 4")
DECODING = ("generate", "static")
ACTIONS = ("forward", *TRAINING, *DECODING, "save")
KINDS = {
    "trainer": (TRAINING, "only training uses a Trainer"),
    "forward": (("forward", *TRAINING, *DECODING), "saving calls no forward"),
    "training": (TRAINING, "only training calls it"),
    "generate": (DECODING, "only generate() calls it"),
    "save": (("save",), "only save_pretrained() calls it"),
    "experts": (("forward", *TRAINING, *DECODING), "saving calls no forward"),
    "load": (ACTIONS, ""),
}


def row(kind, name, *, own_loss=False, forms=None, actions=None, reference=None):
    """Register a row.

    ``own_loss``: the loss is the user's own, and must stay as it is.  ``forms`` and ``actions``:
    those that the override reaches, if they are fewer than its kind's.  ``reference``: a function
    like the row's, for the references.
    """

    def register(function):
        function.kind, function.own_loss, function.forms = kind, own_loss, forms
        function.actions = actions or KINDS[kind][0]
        function.reference = reference or function
        ROWS[f"{kind}: {name}"] = function
        return function

    return register


def counted(case, function):
    """``function``, which counts its calls."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        case.reach()
        return function(*args, **kwargs)

    return wrapper


def trainer_row(name, **options):
    """A row whose function makes the body of a Trainer's subclass: methods by name."""

    def register(function):
        @row("trainer", name, **options)
        def subclass(case):
            case.trainer = type("Own", (case.trainer,), function(case))

        return function

    return register


def model_row(name, kind="forward", **options):
    """A row whose function makes a subclass of the model's class."""

    def register(function):
        @row(kind, name, **options)
        def subclass(case):
            case.subclass = functools.partial(function, case)

        return function

    return register


def prepared_row(kind, name, **options):
    """A row whose function changes the loaded model: it gets the case and the language model."""

    def register(function):
        @row(kind, name, **options)
        def prepared(case):
            case.prepare.append(lambda: function(case, case.language_model()))

        return function

    return register


# ---------------------------------------------------------------- Trainer: compute_loss


@trainer_row("compute_loss with all parameters, super()")
def _(case):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        case.reach()
        return super(case.trainer, self).compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss(**kwargs), super()")
def _(case):
    def compute_loss(self, model, inputs, **kwargs):
        case.reach()
        return super(case.trainer, self).compute_loss(model, inputs, **kwargs)

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss(*args, **kwargs), super()")
def _(case):
    def compute_loss(self, *args, **kwargs):
        case.reach()
        return super(case.trainer, self).compute_loss(*args, **kwargs)

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss without num_items_in_batch")
def _(case):
    def compute_loss(self, model, inputs, return_outputs=False):
        case.reach()
        return super(case.trainer, self).compute_loss(model, inputs, return_outputs)

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss drops num_items_in_batch, super()")
def _(case):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        case.reach()
        return super(case.trainer, self).compute_loss(model, inputs, return_outputs)

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss logs num_items_in_batch, the model's loss", own_loss=True)
def _(case):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        case.reach()
        self.seen = num_items_in_batch if num_items_in_batch is None else +num_items_in_batch
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss returns the model's loss", own_loss=True)
def _(case):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        case.reach()
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss gives num_items_in_batch to the model", own_loss=True)
def _(case):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        case.reach()
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    return {"compute_loss": compute_loss}


def cross_entropy(logits, labels, reduction="mean"):
    import torch

    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction=reduction
    )


def own_loss_row(name, loss):
    @trainer_row(f"compute_loss: {name}", own_loss=True)
    def methods(case):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            case.reach()
            outputs = model(**inputs)
            value = loss(outputs, inputs["labels"], num_items_in_batch)
            return (value, outputs) if return_outputs else value

        return {"compute_loss": compute_loss}


def by_row(outputs, labels, number):
    rows = zip(outputs.logits, labels, strict=True)
    return sum(cross_entropy(a[None], b[None]) for a, b in rows) / len(labels)


def focal(outputs, labels, number):
    each = cross_entropy(outputs.logits, labels, "none")
    return (each * (1 - (-each).exp())).mean()


own_loss_row("own mean", lambda out, labels, number: cross_entropy(out.logits, labels))
own_loss_row(
    "own sum / num_items_in_batch",
    lambda out, labels, number: cross_entropy(out.logits, labels, "sum") / (number or 1),
)
own_loss_row("a mean of each row", by_row)
own_loss_row("focal", focal)
own_loss_row("detached, to log, and the model's", lambda out, labels, number: +out.loss)


def changed_loss_row(name, change):
    @trainer_row(f"compute_loss: {name}", own_loss=True)
    def methods(case):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            case.reach()
            loss, outputs = super(case.trainer, self).compute_loss(
                model, inputs, True, num_items_in_batch
            )
            loss = change(loss, outputs, model)
            return (loss, outputs) if return_outputs else loss

        return {"compute_loss": compute_loss}


changed_loss_row("twice super()'s", lambda loss, outputs, model: 2 * loss)
changed_loss_row(
    "super()'s and a penalty",
    lambda loss, outputs, model: loss + 1e-3 * outputs.logits.float().square().mean(),
)
changed_loss_row("super()'s, clamped", lambda loss, outputs, model: loss.clamp(max=3.0))
changed_loss_row("super()'s, in place", lambda loss, outputs, model: loss.mul_(2))


@trainer_row("compute_loss returns super()'s of return_outputs=True")
def _(case):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        case.reach()
        loss, outputs = super(case.trainer, self).compute_loss(model, inputs, True, **kwargs)
        return (loss, outputs) if return_outputs else loss

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss calls super() twice, returns the second loss")
def _(case):
    def compute_loss(self, *args, **kwargs):
        case.reach()
        super(case.trainer, self).compute_loss(*args, **kwargs)
        return super(case.trainer, self).compute_loss(*args, **kwargs)

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss evaluates after super()")
def _(case):
    def compute_loss(self, model, inputs, *args, **kwargs):
        result = super(case.trainer, self).compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            case.reach()
            self.evaluate([{name: value[0] for name, value in inputs.items()}])
            model.train()
        return result

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss with a changed copy of the inputs, super()")
def _(case):
    def compute_loss(self, model, inputs, *args, **kwargs):
        case.reach()
        labels = inputs["labels"].clone()
        labels[:, :4] = -100
        return super(case.trainer, self).compute_loss(
            model, {**inputs, "labels": labels}, *args, **kwargs
        )

    return {"compute_loss": compute_loss}


@trainer_row("compute_loss, wrapped by a decorator")
def _(case):
    def compute_loss(self, *args, **kwargs):
        return super(case.trainer, self).compute_loss(*args, **kwargs)

    return {"compute_loss": counted(case, compute_loss)}


@trainer_row("compute_loss set in __init__ after super()")
def _(case):
    def __init__(self, *args, **kwargs):
        super(case.trainer, self).__init__(*args, **kwargs)
        self.compute_loss = counted(case, self.compute_loss)

    return {"__init__": __init__}


@trainer_row("compute_loss set in __init__: own mean", own_loss=True)
def _(case):
    def __init__(self, *args, **kwargs):
        super(case.trainer, self).__init__(*args, **kwargs)

        def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
            case.reach()
            outputs = model(**inputs)
            loss = cross_entropy(outputs.logits, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

        self.compute_loss = compute_loss

    return {"__init__": __init__}


@row("trainer", "compute_loss replaced on the class Trainer")
def _(case):
    from transformers import Trainer

    original = Trainer.compute_loss
    Trainer.compute_loss = counted(case, original)


@row("trainer", "compute_loss is a partial, on the instance")
def _(case):
    def trained(trainer):
        trainer.compute_loss = functools.partial(counted(case, type(trainer).compute_loss), trainer)

    case.trained.append(trained)


@row("trainer", "compute_loss of a mixin, before Trainer")
def _(case):
    class Mixin:
        def compute_loss(self, *args, **kwargs):
            case.reach()
            return super().compute_loss(*args, **kwargs)

    case.trainer = type("Own", (Mixin, case.trainer), {})


@row("trainer", "compute_loss_func=", own_loss=True)
def _(case):
    def function(outputs, labels, num_items_in_batch=None):
        case.reach()
        total = cross_entropy(outputs.logits, labels, "sum")
        return total / (labels[:, 1:] != -100).sum()

    case.trainer_options["compute_loss_func"] = function


@row("trainer", "label_smoothing_factor=")
def _(case):
    case.arguments["label_smoothing_factor"] = 0.1
    case.reach()


# ---------------------------------------------------------------- Trainer: the rest


@trainer_row("training_step, super()")
def _(case):
    def training_step(self, *args, **kwargs):
        case.reach()
        return super(case.trainer, self).training_step(*args, **kwargs)

    return {"training_step": training_step}


@trainer_row("training_step with copied inputs, super()")
def _(case):
    def training_step(self, model, inputs, *args, **kwargs):
        case.reach()
        copies = {name: value.clone() for name, value in inputs.items()}
        return super(case.trainer, self).training_step(model, copies, *args, **kwargs)

    return {"training_step": training_step}


@trainer_row("training_step with its own backward", own_loss=True)
def _(case):
    def training_step(self, model, inputs, num_items_in_batch=None):
        case.reach()
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    return {"training_step": training_step}


@trainer_row("training_step, super(), and half of the gradient", actions=("step 1",))
def _(case):
    def training_step(self, model, inputs, *args, **kwargs):
        case.reach()
        loss = super(case.trainer, self).training_step(model, inputs, *args, **kwargs)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return loss

    return {"training_step": training_step}


@trainer_row("get_batch_samples, super()")
def _(case):
    def get_batch_samples(self, *args, **kwargs):
        case.reach()
        return super(case.trainer, self).get_batch_samples(*args, **kwargs)

    return {"get_batch_samples": get_batch_samples}


@trainer_row("get_batch_samples returns no number")
def _(case):
    def get_batch_samples(self, *args, **kwargs):
        case.reach()
        batches, _ = super(case.trainer, self).get_batch_samples(*args, **kwargs)
        return batches, None

    return {"get_batch_samples": get_batch_samples}


@trainer_row("get_batch_samples without super()")
def _(case):
    def get_batch_samples(self, epoch_iterator, num_batches, device=None):
        case.reach()
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        return batches, sum((batch["labels"] != -100).sum() for batch in batches)

    return {"get_batch_samples": get_batch_samples}


@trainer_row("_prepare_inputs copies")
def _(case):
    def _prepare_inputs(self, inputs):
        case.reach()
        inputs = super(case.trainer, self)._prepare_inputs(inputs)
        return {name: value.clone() for name, value in inputs.items()}

    return {"_prepare_inputs": _prepare_inputs}


@trainer_row("model_accepts_loss_kwargs = True in __init__", own_loss=True)
def _(case):
    def __init__(self, *args, **kwargs):
        super(case.trainer, self).__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True
        case.reach()

    return {"__init__": __init__}


@trainer_row("model_accepts_loss_kwargs = False in __init__")
def _(case):
    def __init__(self, *args, **kwargs):
        super(case.trainer, self).__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False
        case.reach()

    return {"__init__": __init__}


@trainer_row("create_optimizer")
def _(case):
    def create_optimizer(self, *args, **kwargs):
        import torch

        case.reach()
        if self.optimizer is None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.5)
        return self.optimizer

    case.trainer_options.pop("optimizers")
    return {"create_optimizer": create_optimizer}


@row("trainer", "a callback that halves gradients")
def _(case):
    from transformers import TrainerCallback

    class Halves(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            case.reach()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    case.trainer_options["callbacks"] = [Halves()]


@row("trainer", "data_collator=")
def _(case):
    from transformers import default_data_collator

    case.trainer_options["data_collator"] = counted(case, default_data_collator)


@trainer_row("get_train_dataloader")
def _(case):
    def get_train_dataloader(self):
        from torch.utils.data import DataLoader

        case.reach()
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=self.data_collator)

    return {"get_train_dataloader": get_train_dataloader}


@trainer_row("autocast_smart_context_manager")
def _(case):
    def autocast_smart_context_manager(self, *args, **kwargs):
        import torch

        case.reach()
        return torch.autocast("cpu", torch.bfloat16)

    return {"autocast_smart_context_manager": autocast_smart_context_manager}


@row("trainer", "Seq2SeqTrainer")
def _(case):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    case.trainer, case.arguments_class = Seq2SeqTrainer, Seq2SeqTrainingArguments
    case.reach()


@row("trainer", "a wrapper module around the model", forms=("whole", "4-bit"))
def _(case):
    import torch

    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner = model

        def forward(self, **inputs):
            case.reach()
            return {"loss": self.inner(**inputs).loss}

    case.wrapper = Wrapper


@row("trainer", "the model's forward takes no **kwargs")
def _(case):
    def subclass(base):
        class Own(base):
            def forward(
                self,
                input_ids=None,
                attention_mask=None,
                mm_token_type_ids=None,
                inputs_embeds=None,
                position_ids=None,
                labels=None,
                return_dict=None,
            ):
                case.reach()
                return super().forward(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    mm_token_type_ids=mm_token_type_ids,
                    inputs_embeds=inputs_embeds,
                    position_ids=position_ids,
                    labels=labels,
                )

        return Own

    case.subclass = subclass


# ---------------------------------------------------------------- forward


@model_row("subclass, forward(*args, **kwargs)")
def _(case, base):
    class Own(base):
        def forward(self, *args, **kwargs):
            case.reach()
            return super().forward(*args, **kwargs)

    return Own


@model_row("subclass, wrapped forward")
def _(case, base):
    return type("Own", (base,), {"forward": counted(case, base.forward)})


@model_row("subclass, forward changes the logits")
def _(case, base):
    class Own(base):
        @functools.wraps(base.forward)
        def forward(self, *args, **kwargs):
            case.reach()
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits * 0.5
            return outputs

    return Own


@model_row("subclass, forward with its own loss", actions=TRAINING, own_loss=True)
def _(case, base):
    class Own(base):
        @functools.wraps(base.forward)
        def forward(self, *args, labels=None, **kwargs):
            case.reach()
            outputs = super().forward(*args, **kwargs)
            each = cross_entropy(outputs.logits, labels, "none")
            outputs.loss = each[each > 0].square().mean()
            return outputs

    return Own


@model_row("subclass, loss_function", actions=TRAINING, own_loss=True)
def _(case, base):
    def loss(logits, labels, vocab_size, **kwargs):
        case.reach()
        return cross_entropy(logits, labels).square()

    return type("Own", (base,), {"loss_function": property(lambda self: loss)})


@model_row("subclass, __call__")
def _(case, base):
    return type("Own", (base,), {"__call__": counted(case, base.__call__)})


@model_row("subclass, get_input_embeddings")
def _(case, base):
    return type("Own", (base,), {"get_input_embeddings": counted(case, base.get_input_embeddings)})


@prepared_row("forward", "forward on the instance")
def _(case, language):
    model = case.base
    model.forward = counted(case, model.forward)


@prepared_row("forward", "forward replaced on the model's class")
def _(case, language):
    cls = type(case.base)
    cls.forward = counted(case, cls.forward)


@prepared_row("forward", "forward replaced on the class of a layer")
def _(case, language):
    cls = type(language.layers[0])
    cls.forward = counted(case, cls.forward)


@prepared_row("forward", "forward replaced on the class of the norms")
def _(case, language):
    cls = type(language.norm)

    def forward(self, states):
        case.reach()
        variance = states.float().square().mean(-1, keepdim=True) + self.eps
        states = states.float() * variance.pow(-0.5)
        return (states * self.weight.float() if self.with_scale else states).to(states.dtype)

    cls.forward = forward


@prepared_row("forward", "forward of a layer, on the instance")
def _(case, language):
    language.layers[0].forward = counted(case, language.layers[0].forward)


@prepared_row("forward", "forward of an offloaded layer, on the instance")
def _(case, language):
    language.layers[1].forward = counted(case, language.layers[1].forward)


@prepared_row(
    "forward",
    "forward of a layer's MLP, scaled",
)
def _(case, language):
    mlp = language.layers[2].mlp
    forward = mlp.forward

    def scaled(states):
        case.reach()
        return 0.5 * forward(states)

    mlp.forward = scaled


def own_activation(case):
    import torch

    class Own(torch.nn.SiLU):
        def forward(self, gates):
            case.reach()
            return super().forward(gates)

    return Own()


@prepared_row("forward", "act_fn replaced")
def _(case, language):
    for layer in language.layers:
        layer.mlp.act_fn = own_activation(case)


@prepared_row("forward", "a norm replaced by a module")
def _(case, language):
    import torch

    class Norm(torch.nn.LayerNorm):
        def forward(self, states):
            case.reach()
            return super().forward(states)

    language.norm = Norm(language.config.hidden_size).eval()


@prepared_row(
    "forward",
    "a linear layer replaced by a module that uses its weight",
    forms=("whole", "split"),
)
def _(case, language):
    import torch

    class Own(torch.nn.Linear):
        def forward(self, states):
            case.reach()
            return super().forward(states) * 1.5

    old = language.layers[0].mlp.down_proj
    new = Own(old.in_features, old.out_features, bias=False, device="meta")
    new.weight = old.weight
    language.layers[0].mlp.down_proj = new


@prepared_row("forward", "a layer's __class__")
def _(case, language):
    layer = language.layers[2]
    base = type(layer)

    class Own(base):
        @functools.wraps(base.forward)
        def forward(self, *args, **kwargs):
            case.reach()
            return super().forward(*args, **kwargs)

    layer.__class__ = Own


@prepared_row("forward", "a registered attention function")
def _(case, language):
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    def attention(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
        import torch

        case.reach()
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        scores = query @ key.transpose(-1, -2) * scaling
        if mask is not None:
            scores = scores + mask[..., : key.shape[-2]]
        return (torch.softmax(scores, -1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("mine", attention)
    MASKS.register("mine", MASKS["eager"])
    case.base.set_attn_implementation("mine")


@prepared_row("forward", "the attention function 'sdpa' replaced")
def _(case, language):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["sdpa"] = counted(case, ALL_ATTENTION_FUNCTIONS["sdpa"])


@prepared_row("forward", "a registered mask function")
def _(case, language):
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["mine"] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionMaskInterface.register("mine", counted(case, MASKS["sdpa"]))
    case.base.set_attn_implementation("mine")


@prepared_row("forward", "the rotary embedding's forward")
def _(case, language):
    language.rotary_emb.forward = counted(case, language.rotary_emb.forward)


@prepared_row("forward", "the embedding's class")
def _(case, language):
    embedding = language.embed_tokens
    base = type(embedding)

    class Own(base):
        def forward(self, ids):
            case.reach()
            return super().forward(ids) * 1.25

    embedding.__class__ = Own


@prepared_row("forward", "parametrize", forms=("whole", "split"))
def _(case, language):
    import torch
    from torch.nn.utils.parametrize import register_parametrization

    class Twice(torch.nn.Module):
        def forward(self, weight):
            case.reach()
            return 2 * weight

    register_parametrization(language.layers[0].input_layernorm, "weight", Twice())


@prepared_row("forward", "a forward hook on the model that changes the logits")
def _(case, language):
    def hook(module, args, outputs):
        case.reach()
        outputs["logits"] = outputs["logits"] * 0.5

    case.base.register_forward_hook(hook)


@prepared_row("forward", "a forward pre-hook with kwargs")
def _(case, language):
    def hook(module, args, kwargs):
        case.reach()
        return args, kwargs

    case.base.register_forward_pre_hook(hook, with_kwargs=True)


@prepared_row("forward", "a forward hook on each layer that changes the output")
def _(case, language):
    def hook(module, args, outputs):
        case.reach()
        if isinstance(outputs, tuple):
            return (outputs[0] * 0.9, *outputs[1:])
        return outputs * 0.9

    for layer in language.layers:
        layer.register_forward_hook(hook)


@prepared_row("forward", "a forward hook that reads the weight of the layer")
def _(case, language):
    def hook(module, args, outputs):
        case.reach()
        weight = next(p for n, p in module.named_parameters() if n.endswith("weight"))
        if not weight.is_meta:
            case.seen["weight"] = weight.detach().float().sum()

    language.layers[0].input_layernorm.register_forward_hook(hook)


@prepared_row("forward", "a global forward hook")
def _(case, language):
    from torch.nn.modules.module import register_module_forward_hook

    register_module_forward_hook(lambda module, args, outputs: case.reach())


@prepared_row("training", "a full backward hook on each layer")
def _(case, language):
    def hook(module, gradients_in, gradients_out):
        case.reach()
        return tuple(None if g is None else 0.5 * g for g in gradients_in)

    for layer in language.layers:
        layer.register_full_backward_hook(hook)


@prepared_row("training", "a hook on a trained tensor")
def _(case, language):
    trained = next(p for p in case.model.parameters() if p.requires_grad)

    def hook(gradient):
        case.reach()
        return 0.5 * gradient

    trained.register_hook(hook)


@prepared_row("training", "an own checkpointing function")
def _(case, language):
    from torch.utils.checkpoint import checkpoint

    function = functools.partial(counted(case, checkpoint), use_reentrant=False)
    case.model.gradient_checkpointing_enable()
    for module in case.base.modules():
        if getattr(module, "_gradient_checkpointing_func", None) is not None:
            module._gradient_checkpointing_func = function


def without_checkpointing(case):
    case.reach()


# Upstream, reentrant checkpointing loses gradients of the keys and values that layers share.
@prepared_row("training", "reentrant checkpointing", reference=without_checkpointing)
def _(case, language):
    case.model.gradient_checkpointing_enable({"use_reentrant": True})
    case.model.enable_input_require_grads()
    language.layers[0].register_forward_hook(lambda *args: case.reach())


@row("forward", "saved_tensors_hooks around it", actions=("forward", *TRAINING))
def _(case):
    def context():
        import torch

        def pack(tensor):
            case.reach()
            return tensor.detach().clone()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    case.context, case.gradients = context, True


@row("forward", "a TorchFunctionMode around it")
def _(case):
    def context():
        from torch.overrides import TorchFunctionMode

        class Mode(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                case.reach()
                return function(*args, **(kwargs or {}))

        return Mode()

    case.context = context


@row("forward", "a TorchDispatchMode around it")
def _(case):
    def context():
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                case.reach()
                return function(*args, **(kwargs or {}))

        return Mode()

    case.context = context


@row("forward", "autocast around it")
def _(case):
    def context():
        import torch

        case.reach()
        return torch.autocast("cpu", torch.bfloat16)

    case.context = context


@row("forward", "in a thread")
def _(case):
    def run(function):
        with ThreadPoolExecutor(1) as pool:
            case.reach()
            return pool.submit(function).result()

    case.run = run


# ---------------------------------------------------------------- generate


def method_row(name, attribute, **options):
    @model_row(f"subclass, {name}", kind="generate", **options)
    def subclass(case, base):
        original = getattr(base, attribute)
        return type("Own", (base,), {attribute: counted(case, original)})


method_row("prepare_inputs_for_generation", "prepare_inputs_for_generation")
method_row("_update_model_kwargs_for_generation", "_update_model_kwargs_for_generation")
method_row("_prepare_cache_for_generation", "_prepare_cache_for_generation")
method_row("_sample", "_sample")
method_row("generate", "generate")
method_row("_get_logits_processor", "_get_logits_processor")


@model_row("subclass, prepare_inputs_for_generation(*args, **kwargs)", kind="generate")
def _(case, base):
    class Own(base):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            case.reach()
            return {**super().prepare_inputs_for_generation(*args, **kwargs)}

    return Own


@prepared_row("generate", "prepare_inputs_for_generation on the instance")
def _(case, language):
    model = case.base
    model.prepare_inputs_for_generation = counted(case, model.prepare_inputs_for_generation)


@row("generate", "a DynamicCache of a subclass", actions=("generate",))
def _(case):
    def options():
        from transformers import DynamicCache

        class Own(DynamicCache):
            def update(self, *args, **kwargs):
                case.reach()
                return super().update(*args, **kwargs)

        return {"past_key_values": Own(config=case.base.config.get_text_config())}

    case.generate_options = options


@row("generate", "a StaticCache of a subclass", actions=("generate",))
def _(case):
    def options():
        from transformers import StaticCache

        class Own(StaticCache):
            def update(self, *args, **kwargs):
                case.reach()
                return super().update(*args, **kwargs)

        config = case.base.config.get_text_config()
        return {"past_key_values": Own(config=config, max_cache_len=64)}

    case.generate_options = options


def option_row(name, **settings):
    def register(function):
        @row("generate", name, **settings)
        def options(case):
            case.generate_options = lambda: function(case)

        return function

    return register


@option_row("a logits processor")
def _(case):
    def processor(ids, scores):
        case.reach()
        return scores.roll(1, -1)

    return {"logits_processor": [processor]}


@option_row("a logits processor that calls the model")
def _(case):
    def processor(ids, scores):
        case.reach()
        return scores + 0.1 * case.model(input_ids=ids).logits[:, -1].float()

    return {"logits_processor": [processor]}


@option_row("a stopping criterion")
def _(case):
    import torch

    def stop(ids, scores, **kwargs):
        case.reach()
        return torch.full((len(ids),), ids.shape[1] >= 13)

    return {"stopping_criteria": [stop]}


@option_row("a streamer")
def _(case):
    class Streamer:
        def put(self, value):
            case.reach()

        def end(self):
            pass

    return {"streamer": Streamer()}


@option_row("prefix_allowed_tokens_fn")
def _(case):
    def allowed(batch, ids):
        case.reach()
        return list(range(100, 140))

    return {"prefix_allowed_tokens_fn": allowed}


@option_row("beams")
def _(case):
    case.reach()
    return {"num_beams": 3}


@option_row("sampling with a seed")
def _(case):
    case.reach()
    return {"do_sample": True, "temperature": 1.5, "top_k": 20}


@option_row("prefill_chunk_size=")
def _(case):
    case.reach()
    return {"prefill_chunk_size": 4}


@option_row("hidden states and attentions")
def _(case):
    case.reach()
    return {"output_hidden_states": True, "output_scores": True}


@option_row("an assistant model", actions=("generate",))
def _(case):
    assistant = case.another()
    assistant.forward = counted(case, assistant.forward)
    return {"assistant_model": assistant}


@option_row("custom_generate= of the user")
def _(case):
    import torch

    def custom(model, input_ids, logits_processor=None, stopping_criteria=None,
               generation_config=None, **kwargs):  # fmt: skip
        case.reach()
        name = "cache" if "cache" in kwargs else "past_key_values"
        steps = []
        current = input_ids
        for _ in range(4):
            outputs = model(input_ids=current, use_cache=True, **{name: kwargs[name]})
            steps.append(outputs.logits[:, -1].float())
            current = steps[-1].argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, current], -1)
        case.seen["logits"] = torch.stack(steps)
        return input_ids

    return {"custom_generate": custom}


@prepared_row("generate", "an own GenerationConfig")
def _(case, language):
    from transformers import GenerationConfig

    class Own(GenerationConfig):
        pass

    case.base.generation_config = Own(**case.base.generation_config.to_dict())
    case.base.generation_config.max_new_tokens = 5
    case.reach()


@prepared_row("generate", "a forward hook that reads past_key_values")
def _(case, language):
    def hook(module, args, kwargs, outputs):
        case.reach()
        case.seen[f"length {len(case.seen)}"] = outputs["past_key_values"].get_seq_length()

    case.base.register_forward_hook(hook, with_kwargs=True)


# ---------------------------------------------------------------- save


def save_row(name, **settings):
    """A row whose function gives the arguments of ``save_pretrained`` after the folder."""

    def register(function):
        @row("save", name, **settings)
        def arguments(case):
            case.save_arguments = lambda: function(case)

        return function

    return register


@save_row("state_dict= of the model")
def _(case):
    case.reach()
    return (), {"state_dict": case.model.state_dict()}


@save_row("state_dict= positional")
def _(case):
    case.reach()
    parameters = list(inspect.signature(type(case.model).save_pretrained).parameters)
    if parameters[2] != "is_main_process":  # PeftModel
        return (), {}
    return (True, case.model.state_dict()), {}


@save_row("state_dict= with changed tensors", forms=("whole", "4-bit"))
def _(case):
    case.reach()
    changed = case.model.state_dict()
    name = next(name for name in changed if name.endswith("layers.0.input_layernorm.weight"))
    return (), {"state_dict": {**changed, name: changed[name] + 7}}


@save_row("state_dict= with some tensors", forms=("whole", "split"))
def _(case):
    case.reach()
    some = {n: t for n, t in case.model.state_dict().items() if "layers.0." in n}
    return (), {"state_dict": some}


@save_row("max_shard_size=")
def _(case):
    case.reach()
    return (), {"max_shard_size": "300KB"}


@save_row("is_main_process=False")
def _(case):
    case.reach()
    return (), {"is_main_process": False}


@save_row("variant=", forms=("whole", "split", "4-bit"))
def _(case):
    case.reach()
    return (), {"variant": "mine"}


@save_row("save_function=", forms=("whole", "split", "4-bit"))
def _(case):
    from safetensors.torch import save_file

    case.reach()
    return (), {"save_function": counted(case, save_file)}


def saving_row(name, attribute):
    @model_row(f"subclass, {name}", kind="save", forms=("whole", "split", "4-bit"))
    def subclass(case, base):
        return type("Own", (base,), {attribute: counted(case, getattr(base, attribute))})


saving_row("save_pretrained", "save_pretrained")
saving_row("state_dict", "state_dict")


@model_row("subclass, state_dict adds a tensor", kind="save", forms=("whole", "split", "4-bit"))
def _(case, base):
    class Own(base):
        def state_dict(self, *args, **kwargs):
            import torch

            case.reach()
            return super().state_dict(*args, **kwargs) | {"mine": torch.ones(3)}

    return Own


@model_row("subclass, _keys_to_ignore_on_save", kind="save", forms=("whole", "split", "4-bit"))
def _(case, base):
    class Own(base):
        _keys_to_ignore_on_save = ("model.language_model.norm.weight",)

    case.reach()
    return Own


@prepared_row("save", "a state_dict hook", forms=("whole", "split", "4-bit"))
def _(case, language):
    def hook(module, state, prefix, metadata):
        case.reach()
        name = f"{prefix}layers.0.input_layernorm.weight"
        state[name] = state[name] + 3

    language.register_state_dict_post_hook(hook)


@prepared_row("save", "a state_dict pre-hook", forms=("whole", "split", "4-bit"))
def _(case, language):
    language.register_state_dict_pre_hook(lambda *args: case.reach())


@prepared_row("save", "_save_to_state_dict of a layer's norm", forms=("whole", "split", "4-bit"))
def _(case, language):
    norm = language.layers[0].input_layernorm
    original = norm._save_to_state_dict

    def save(destination, prefix, keep):
        case.reach()
        original(destination, prefix, keep)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"] * 2

    norm._save_to_state_dict = save


@row("save", "from four threads at once")
def _(case):
    from huggingface_hub.utils import is_jinja_available

    # This is for a model card.  The first call says "no" to other threads while it looks.
    is_jinja_available()

    def run(function):
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(function) for _ in range(4)]
            results = [future.result() for future in futures]
        case.reach()
        case.same(results)
        return results[0]

    case.run = run


@row("save", "of a deep copy with a changed norm")
def _(case):
    def changed():
        import copy

        import torch

        case.model = copy.deepcopy(case.model)
        case.reach()
        with torch.no_grad():
            case.language_model().layers[0].input_layernorm.weight.fill_(7.0)

    case.prepare.append(changed)


# ---------------------------------------------------------------- load


@model_row("subclass, _no_split_modules", kind="load")
def _(case, base):
    case.reach()
    return type("Own", (base,), {"_no_split_modules": ["Gemma4TextMLP"]})


@model_row("subclass, _init_weights", kind="load")
def _(case, base):
    class Own(base):
        def _init_weights(self, module):
            super()._init_weights(module)

    case.reach()
    return Own


@model_row("subclass with a head of its own", kind="load")
def _(case, base):
    class Own(base):
        def __init__(self, config):
            import torch

            super().__init__(config)
            self.mine = torch.nn.Linear(4, 2)
            case.reach()

        def _init_weights(self, module):
            import torch

            super()._init_weights(module)
            if module is getattr(self, "mine", None):
                torch.nn.init.ones_(module.weight)

    return Own


@model_row("subclass, tie_weights", kind="load")
def _(case, base):
    return type("Own", (base,), {"tie_weights": counted(case, base.tie_weights)})


# ---------------------------------------------------------------- experts


def gate(experts, gates):
    first, second = gates.chunk(2, dim=-1)
    return experts.act_fn(first) * second


def by_expert(experts, states, chosen, weights, gate_up, down):
    """The plain loop; ``gate_up`` and ``down`` multiply with the weight of an expert."""
    import torch

    result = torch.zeros_like(states)
    for expert in range(experts.num_experts):
        tokens, place = torch.where(chosen == expert)
        if len(tokens):
            out = down(expert, gate(experts, gate_up(expert, states[tokens])))
            result = result.index_add(0, tokens, out * weights[tokens, place, None].to(out.dtype))
    return result


def experts_row(name):
    def register(function):
        @prepared_row("experts", f"registered: {name}")
        def registered(case, language):
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            @functools.wraps(function)
            def mine(self, *inputs):
                case.reach()
                return function(self, *inputs)

            ALL_EXPERTS_FUNCTIONS.register("mine", mine)
            case.base.config._experts_implementation = "mine"

        return function

    return register


@experts_row("a weight of each expert")
def _(self, states, chosen, weights):
    from torch.nn.functional import linear

    return by_expert(
        self, states, chosen, weights,
        lambda expert, x: linear(x, self.gate_up_proj[expert]),
        lambda expert, x: linear(x, self.down_proj[expert]),
    )  # fmt: skip


@experts_row("unbound weights")
def _(self, states, chosen, weights):
    gate_up, down = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)
    return by_expert(
        self, states, chosen, weights,
        lambda expert, x: x @ gate_up[expert].T,
        lambda expert, x: x @ down[expert].T,
    )  # fmt: skip


@experts_row("halves, transposed")
def _(self, states, chosen, weights):
    import torch

    def gate_up(expert, x):
        first, second = self.gate_up_proj[expert].chunk(2)
        return torch.cat([x @ first.T, x @ second.T], -1)

    return by_expert(
        self, states, chosen, weights, gate_up, lambda e, x: torch.mm(x, self.down_proj[e].t())
    )


@experts_row("all experts at once")
def _(self, states, chosen, weights):
    import torch

    gates = torch.einsum("th,eoh->teo", states, self.gate_up_proj)
    out = torch.einsum("teo,eho->teh", gate(self, gates), self.down_proj)
    dense = torch.zeros_like(out[..., 0]).scatter(1, chosen, weights.to(out.dtype))
    return torch.einsum("teh,te->th", out, dense)


@prepared_row("experts", "_apply_gate of the class")
def _(case, language):
    cls = type(language.layers[0].experts)

    def apply_gate(self, gates):
        import torch

        case.reach()
        first, second = gates.chunk(2, dim=-1)
        return torch.nn.functional.silu(first) * second

    cls._apply_gate = apply_gate


@prepared_row("experts", "act_fn of each layer")
def _(case, language):
    for layer in language.layers:
        layer.experts.act_fn = own_activation(case)


@prepared_row("experts", "forward on the instance")
def _(case, language):
    for layer in language.layers:
        layer.experts.forward = counted(case, layer.experts.forward)


@prepared_row("experts", "forward replaced on the class")
def _(case, language):
    cls = type(language.layers[0].experts)
    cls.forward = counted(case, cls.forward)


@prepared_row("experts", "a forward hook that changes the output")
def _(case, language):
    def hook(module, args, output):
        case.reach()
        return output * 0.5

    for layer in language.layers:
        layer.experts.register_forward_hook(hook)


@prepared_row("experts", "the router's forward")
def _(case, language):
    for layer in language.layers:
        layer.router.forward = counted(case, layer.router.forward)


@prepared_row("experts", "a backward hook", actions=TRAINING)
def _(case, language):
    def hook(module, gradients_in, gradients_out):
        case.reach()
        is_float = [g is not None and g.is_floating_point() for g in gradients_in]
        return tuple(0.5 * g if f else g for g, f in zip(gradients_in, is_float, strict=True))

    for layer in language.layers:
        layer.experts.register_full_backward_hook(hook)
