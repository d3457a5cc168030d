"""Compares the engines for several processes with one process, with and without the patches.

``python tests/engines.py [--only PATTERN] [--print] STACK`` runs all cells and writes their
verdicts to ``tests/engines.json``, under the name STACK, and to ``docs/engines.md``.

A cell is an engine, a form of a tiny model, and an action.  Two processes with gloo play it on the
CPU, each with one row of a batch; one process plays it with both rows, on the same side.  All
compute in float32, except in "bf16".  The losses of all steps and the adapter are compared, and the
engine must be at work.

``--device cuda`` plays some of the cells on two GPUs with NCCL.  ``--jobs N`` gives each cell and
each reference processes of their own, N of them at a time.  ``--details PATH`` writes what was
found after each cell; cells that do not begin within ``--seconds`` are left out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fnmatch
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import gemma4_compat  # noqa: E402, F401

#: the engines of the references
ALONE, TRAINER_ALONE = "one process", "one process, Trainer"
#: the environment variables by side
SIDES = {"with": {"GEMMA4_COMPAT": "1"}, "without": {"GEMMA4_COMPAT": "0"}}

DATA, PAGE = ROOT / "tests" / "engines.json", ROOT / "docs" / "engines.md"
STEPS = 5
RANKS = 2
#: "cpu" or "cuda", from the command line
DEVICE = "cpu"
#: the cells of the tests of this run, from tests/conftest.py
asked: list[tuple[str, str, str]] = []
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
#: For losses and for tensors, of the largest value.  Processes add up in another order than one,
#: and a GPU chooses other kernels for one row than for two.
TOLERANCES = {"cpu": {"loss": 1e-5, "": 3e-5}, "cuda": {"loss": 1e-5, "": 1e-4}}
#: In bfloat16, whose values are 0.8 % apart, for the losses and for what the adapter has learnt.
#: FSDP2 rounds all weights that it gathers, autocast only those of matrix products.
TOLERANCES_IN_BF16 = {"loss": 0.01, "": 0.1}
#: For logits of models with experts: a change of 1.2e-5 in an adapter changes them by up to 8e-5.
TOLERANCE_WITH_EXPERTS = 1e-4
#: With larger steps, rounding soon decides which experts are chosen and which values are clipped.
RATE = 0.01
#: It shows a gradient of zeros where there should be none.
DECAY = 0.1
#: A cell takes two to ten seconds, and the end of a process that waits for one that failed none.
LIMIT, GRACE = 60, 5
#: A hang is a bug's symptom without the patches: then a process hangs that does nothing so long.
IDLE = 10 if os.environ.get("GEMMA4_COMPAT") == "0" else LIMIT
#: The time for the end of a launcher whose processes have reached the limit.
END = 20
#: The largest part of the weights that a process may hold where an engine shards them.
SHARDED = 0.55
SHARDING = ("fully_shard", "FSDP", "ZeRO-3")

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
LAUNCH = ("-m", "accelerate.commands.accelerate_cli", "launch", f"--num_processes={RANKS}")
ALL = ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0")
#: On the CPU with ACCELERATE_USE_CPU.  --cpu alone starts one process, or several with MPI only.
ACCELERATE = (*LAUNCH, *ALL, "--multi_gpu")
#: as in the README
FSDP = (
    *LAUNCH, *ALL, "--use_fsdp", "--fsdp_version=2", "--fsdp_cpu_ram_efficient_loading=false",
    "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
)  # fmt: skip
TRAIN = ("step", "checkpointing", "text and images", "tower trained", "tower unused", "save")
#: Trainer goes on from the checkpoint of this step.
RESUMED = 3
FURTHER = ("resume", "bf16")
#: One process gets an image, the other text.
IMAGES = ("text and images", "tower trained")
WHOLE, QUANTIZED, STORED = "float32", "4 bits", "4 bits in bfloat16 storage"
HOST, EXPERTS = "4 bits, PLE offloaded", "experts in 4 bits"
FORMS = (WHOLE, QUANTIZED, STORED, HOST, EXPERTS)
#: by form: the actions that are not played; the model with experts has no towers
LEFT_OUT = {
    EXPERTS: (*IMAGES, "tower unused", *FURTHER),
    STORED: (*TRAIN[1:], *FURTHER),
    HOST: FURTHER,
    WHOLE: FURTHER,
}
#: with Trainer and DeepSpeed
TRAINED = (WHOLE, QUANTIZED, EXPERTS)
WITH_TRAINER = ("step", "checkpointing", "text and images", "save", "resume")
#: by engine: the launcher, the forms and the actions
ENGINES = {
    "torchrun, Trainer, DDP": (TORCHRUN, FORMS, (*TRAIN, *FURTHER)),
    "accelerate launch, Accelerator, DDP": (ACCELERATE, FORMS, TRAIN),
    "torchrun, fully_shard": (TORCHRUN, FORMS, TRAIN),
    "accelerate launch, Accelerator, FSDP2": (FSDP, FORMS, (*TRAIN, "bf16")),
    "accelerate launch, Trainer, FSDP2": (FSDP, (QUANTIZED,), ("resume",)),
    "torchrun, DeepSpeed ZeRO-2": (TORCHRUN, FORMS, TRAIN),
    "torchrun, DeepSpeed ZeRO-3": (TORCHRUN, FORMS, TRAIN),
    "torchrun, Trainer, DeepSpeed ZeRO-2": (TORCHRUN, TRAINED, WITH_TRAINER),
    "torchrun, Trainer, DeepSpeed ZeRO-3": (TORCHRUN, TRAINED, WITH_TRAINER),
    "torchrun, tp_plan": (TORCHRUN, (WHOLE, QUANTIZED, EXPERTS), ("forward",)),
    "accelerate launch, split_between_processes": (ACCELERATE, FORMS, ("generate",)),
    "torchrun, Trainer, device_map auto": (TORCHRUN, (), ("step",)),
}
#: What is played on GPUs, in this order; "save" also compares what "step" does.
ON_GPUS = [
    (engine, form, action)
    for engine, forms, actions in (
        (
            "accelerate launch, Accelerator, FSDP2",
            (QUANTIZED, HOST, WHOLE),
            ("save", "checkpointing"),
        ),
        ("torchrun, fully_shard", (QUANTIZED, HOST, WHOLE), ("save", "checkpointing")),
        ("accelerate launch, Accelerator, DDP", (QUANTIZED, HOST, WHOLE), ("save",)),
        ("torchrun, Trainer, DDP", (QUANTIZED, HOST, WHOLE), ("step",)),
        ("accelerate launch, split_between_processes", (QUANTIZED, HOST), ("generate",)),
        ("torchrun, Trainer, device_map auto", (QUANTIZED,), ("step",)),
        ("accelerate launch, Accelerator, FSDP2", (QUANTIZED,), IMAGES),
    )
    for form in forms
    for action in actions
]
TITLES = {
    "newest": "The newest releases",
    "users": "The releases of users' reports",
    "gpus": "Two GPUs, over NCCL",
}
#: What the suite plays, all together, as most time goes by before.
SAMPLE = (
    ("torchrun, fully_shard", WHOLE, "tower trained"),
    ("accelerate launch, Accelerator, DDP", HOST, "step"),
    ("accelerate launch, Accelerator, DDP", QUANTIZED, "save"),
    ("accelerate launch, Accelerator, FSDP2", QUANTIZED, "step"),
    ("accelerate launch, Accelerator, FSDP2", QUANTIZED, "text and images"),
    ("accelerate launch, Accelerator, FSDP2", HOST, "step"),
    ("accelerate launch, Trainer, FSDP2", QUANTIZED, "resume"),
    ("torchrun, DeepSpeed ZeRO-2", QUANTIZED, "tower trained"),
    ("torchrun, DeepSpeed ZeRO-3", QUANTIZED, "text and images"),
    ("torchrun, Trainer, DDP", QUANTIZED, "tower trained"),
    ("torchrun, fully_shard", WHOLE, "tower unused"),
    ("accelerate launch, split_between_processes", HOST, "generate"),
    ("accelerate launch, Accelerator, FSDP2", EXPERTS, "save"),
    ("torchrun, Trainer, DeepSpeed ZeRO-3", QUANTIZED, "checkpointing"),
)
VERDICTS = {
    "=": "equal to one process",
    "decayed": "equal to one process, but the optimizer also decays what got no gradient",
    "replicated": "equal to one process, but each process holds all weights",
    "error": "an error of the libraries",
    "refused": "an error of this package that says what to do",
    "WRONG": "not equal to one process",
    "HANG": "the processes run different collectives: they wait for each other, or gloo aborts",
}


def cells():
    if DEVICE == "cuda":
        yield from ON_GPUS
        return
    for engine, (_, forms, actions) in ENGINES.items():
        for form in forms:
            left_out = LEFT_OUT.get(form, ())
            if "DeepSpeed" in engine and form == HOST:  # which it refuses
                left_out = actions[1:]
            yield from ((engine, form, each) for each in actions if each not in left_out)


# ---------------------------------------------------------------- models


def build(folder):
    from gemma4_compat import tiny
    from tests import support

    tiny.build_checkpoint(folder / "dense")
    sizes = {"num_hidden_layers": 3, "num_experts": 8}
    sizes["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    support.save_random("Gemma4 experts", folder / "experts", **sizes)
    for form in (WHOLE, EXPERTS):
        adapted(folder, form, "step").save_pretrained(adapter_of(folder, form))


def kind_of(form):
    return "experts" if form == EXPERTS else "dense"


def adapter_of(folder, form):
    """Where one process saved the adapter that all cells begin with."""
    return folder / f"{kind_of(form)} adapter"


def own_device():
    """The device of this process, or the number of its GPU."""
    return "cpu" if DEVICE == "cpu" else int(os.environ.get("LOCAL_RANK", 0))


def load(folder, form, **options):
    import torch
    import transformers

    cls = transformers.Gemma4ForConditionalGeneration
    if form == EXPERTS:
        cls = transformers.Gemma4ForCausalLM
    if form != WHOLE:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=torch.bfloat16 if form == STORED else torch.uint8,
            llm_int8_skip_modules=["lm_head", "router.proj", "model.audio_tower"],
        )  # fmt: skip
    table = "model.language_model.embed_tokens_per_layer"
    if "tp_plan" not in options:
        options.setdefault("device_map", {"": own_device()})
    if form == HOST and DEVICE == "cuda":
        options["device_map"] = {table: "cpu", "": own_device()}
        options["quantization_config"].llm_int8_enable_fp32_cpu_offload = True
    model = cls.from_pretrained(folder / kind_of(form), dtype=torch.float32, **options)
    if form == HOST and DEVICE == "cpu":
        from accelerate import dispatch_model

        model = dispatch_model(
            model, {"": "cpu", table: "disk"}, main_device="cpu", offload_dir=tempfile.mkdtemp(),
            skip_keys=model._skip_keys_device_placement,
        )  # fmt: skip
    return model


def adapted(folder, form, action, is_read=False, **options):
    """A model with LoRA on its attention and MLPs, and on the images' tower where it gets some.

    The LoRA is new, or what one process saved of a new one is read.
    """
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    from gemma4_compat.tiny import _generator

    targets = r"(?!.*tower).*layers\.\d+\.(self_attn\.[qo]_proj|mlp\.(up|down)_proj)"
    if action.startswith("tower"):
        targets += r"|.*vision_tower.*(q_proj|down_proj)\.linear"
    base = load(folder, form, **options)
    if is_read:
        read = PeftModel.from_pretrained(base, adapter_of(folder, form), is_trainable=True)
        return read.train()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                assert parameter.dtype == torch.float32
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=_generator(name)))
    if action == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def rows(action):
    """Rows of the same length, with the same number of targets: two for each step."""
    import torch

    from gemma4_compat import tiny

    config = tiny._config()
    for step in range(STEPS):
        for rank in range(RANKS):
            row = tiny.image_inputs(config)
            generator = torch.Generator().manual_seed(10 * step + rank)
            words = torch.randint(3, 120, row["input_ids"].shape, generator=generator)
            soft = row["mm_token_type_ids"].bool()
            if action in IMAGES and rank == 0:
                row["pixel_values"] = torch.rand(row["pixel_values"].shape, generator=generator)
                words = torch.where(row["input_ids"] >= 120, row["input_ids"], words)
            else:
                del row["pixel_values"], row["image_position_ids"]
                row["mm_token_type_ids"] = torch.zeros_like(words)
            row["input_ids"], row["labels"] = words, words.masked_fill(soft, -100)
            yield row


def collate(batch):
    import torch

    names = dict.fromkeys(name for row in batch for name in row)
    return {name: torch.cat([row[name] for row in batch if name in row]) for name in names}


def batches(form, action, size):
    device = own_device()
    each = [{name: tensor.to(device) for name, tensor in row.items()} for row in rows(action)]
    if form == EXPERTS:
        each = [{k: v for k, v in row.items() if k != "mm_token_type_ids"} for row in each]
    return [collate(each[start : start + size]) for start in range(0, len(each), size)]


# ---------------------------------------------------------------- engines
# Each takes a model, and returns what trains, what saves, and the function of a backward.


def one_process(model):
    return model, sgd(model), lambda loss: loss.backward()


def sgd(model, momentum=0.0):
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=RATE, weight_decay=DECAY, momentum=momentum)


def in_bf16(model):
    """As Trainer and Accelerator do it for one process."""
    import torch

    model.forward = torch.autocast(DEVICE, torch.bfloat16)(model.forward)
    return one_process(model)


def with_accelerate(model, optimizer=sgd):
    from accelerate import Accelerator
    from torch.nn.parallel import DistributedDataParallel

    accelerator = Accelerator(cpu=DEVICE == "cpu")
    model, optimizer = accelerator.prepare(model, optimizer(model))
    assert isinstance(model, DistributedDataParallel), "DDP is not at work"
    return model, optimizer, accelerator.backward


def with_fully_shard(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE, (RANKS,))
    offloaded = {parameter for parameter in model.parameters() if parameter.is_meta}
    options = {"mesh": mesh, "ignored_params": offloaded}
    # Not the layers of the towers: only processes with images would gather them.
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith("layers") and "_tower" not in name:
            fully_shard(module, **options)
    fully_shard(model, **options)
    take_means(model)
    return model, sgd(model), lambda loss: loss.backward()


def take_means(model):
    """PyTorch before 2.9 adds gradients up over gloo, where FSDP2 asks for their mean.

    https://github.com/pytorch/pytorch/issues/162338
    """
    for module in model.modules() if BACKENDS[DEVICE] == "gloo" else ():
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # of FSDPModule
            module.set_force_sum_reduction_for_comms(True)


def with_accelerate_fsdp(model, optimizer=sgd, **options):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=DEVICE == "cpu", **options)
    use_fsdp(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer(model))
    take_means(model)
    return model, optimizer, accelerator.backward


def use_fsdp(accelerator):
    """Accelerator sets FSDP up for GPUs only, so on the CPU this does what it does for those."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    if DEVICE == "cpu":
        # from the launcher's environment
        accelerator.state.fsdp_plugin = plugin = FullyShardedDataParallelPlugin()
        accelerator.state.distributed_type = DistributedType.FSDP
        if accelerator.mixed_precision == "bf16":
            plugin.set_mixed_precision("bf16")
    assert accelerator.distributed_type == DistributedType.FSDP
    assert accelerator.state.fsdp_plugin.fsdp_version == 2


class Stepping(NamedTuple):
    """The optimizer of a DeepSpeed engine, which also clears the gradients."""

    step: Callable[[], None]

    def zero_grad(self):
        pass


def zero_config(stage):
    """All weights are sharded, also small ones.  DeepSpeed clips gradients if this is left out."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {
        "zero_optimization": zero, "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0,
    }  # fmt: skip


def with_deepspeed(model, optimizer=sgd, *, config):
    deepspeed = import_deepspeed()
    prepared, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    return prepared, Stepping(prepared.step), prepared.backward


def use_deepspeed():
    """Before an Accelerator: on the CPU, accelerate leaves DeepSpeed out, or has one process."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    import_deepspeed()
    AcceleratorState._reset_state(reset_partial_state=True)
    if DEVICE == "cpu":
        os.environ.pop("ACCELERATE_USE_CPU", None)
        PartialState._prepare_backend = lambda *_: (BACKENDS[DEVICE], DistributedType.NO)


def import_deepspeed():
    """On the CPU it would compile a collective of its own, for a minute."""
    import deepspeed

    if DEVICE == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


PREPARE = {
    ALONE: one_process,
    "accelerate launch, Accelerator, DDP": with_accelerate,
    "torchrun, fully_shard": with_fully_shard,
    "accelerate launch, Accelerator, FSDP2": with_accelerate_fsdp,
    "torchrun, DeepSpeed ZeRO-2": functools.partial(with_deepspeed, config=zero_config(2)),
    "torchrun, DeepSpeed ZeRO-3": functools.partial(with_deepspeed, config=zero_config(3)),
}


def whole(tensor):
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().to("cpu", copy=True)
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().to("cpu", copy=True)


def part_held(model):
    """The part of the layers' weights that this process holds, by bytes."""
    held = total = 0
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if ".layers." in name and "lora_" not in name and len(shape) > 1:
            own = getattr(parameter, "ds_tensor", parameter)
            held += getattr(own, "_local_tensor", own).nbytes
            total += shape.numel() * parameter.itemsize
    return held / total


def train(folder, engine, form, action, rank):
    import torch

    options = {"device_map": "auto"} if engine.endswith("device_map auto") else {}
    arguments = None
    if "Trainer" in engine:
        out = [tempfile.mkdtemp()]
        if engine in ENGINES:
            torch.distributed.broadcast_object_list(out)
        # before the model: DeepSpeed then shards it while it is loaded, and takes no device map
        arguments = training_arguments(engine, action, *out)
        if engine.endswith("ZeRO-3"):
            options["device_map"] = None
    is_read = action == "save" and engine in ENGINES
    model = adapted(folder, form, action, is_read, **options)
    size = RANKS if engine == ALONE else 1
    data = batches(form, action, size)
    before = {n: whole(p) for n, p in model.named_parameters() if p.requires_grad}
    if arguments is not None:
        losses, model = trainer(model, data, engine, action, arguments)
        if action == "resume" and engine in ENGINES:
            learnt = [whole(p) for p in model.parameters() if p.requires_grad]
            begun = {"resume_from_checkpoint": f"{out[0]}/checkpoint-{RESUMED}"}
            arguments = training_arguments(engine, action, *out)
            again = adapted(folder, form, action, **options)
            losses[RESUMED:], model = trainer(again, data, engine, action, arguments, **begun)
            again = [whole(p) for p in model.parameters() if p.requires_grad]
            assert all(map(torch.equal, again, learnt)), "not as without an interruption"
    else:
        prepare = PREPARE[engine]
        if action == "bf16":
            prepare = functools.partial(prepare, mixed_precision="bf16")
            prepare = in_bf16 if engine == ALONE else prepare
        model, optimizer, backward = prepare(model)
        losses = []
        for batch in data[rank::RANKS] if size == 1 else data:
            loss = model(**batch).loss
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert len(losses) == STEPS
    losses = torch.stack(losses)
    if engine in ENGINES:
        torch.distributed.all_reduce(losses)
        losses /= RANKS
    found = {f"loss {i}": loss for i, loss in enumerate(losses.cpu())}
    module = getattr(model, "module", model)
    found |= {n: whole(p) for n, p in module.named_parameters() if p.requires_grad}
    if action == "bf16":
        found |= {n: found[n] - before[n] for n in before}
    part = part_held(module) if any(each in engine for each in SHARDING) else None
    if action == "save":
        found |= saved(folder, form, module, found, rank)
    return found, part


def training_arguments(engine, action, out):
    import transformers

    options = {"save_strategy": "no", "use_cpu": DEVICE == "cpu"}
    if action == "resume":
        options |= {"save_strategy": "steps", "save_steps": RESUMED}
    if "DeepSpeed" in engine:
        use_deepspeed()
        options |= {"deepspeed": zero_config(int(engine[-1])), "use_cpu": False}
    return transformers.TrainingArguments(
        output_dir=out, per_device_train_batch_size=RANKS if engine == TRAINER_ALONE else 1,
        max_steps=STEPS, dataloader_pin_memory=False, bf16=action == "bf16", report_to=[],
        disable_tqdm=True, max_grad_norm=0.0,
        learning_rate=RATE, lr_scheduler_type="constant", remove_unused_columns=False,
        gradient_checkpointing=action == "checkpointing",
        # TRL sets this for ZeRO-3.
        gradient_checkpointing_kwargs={"use_reentrant": engine.endswith("ZeRO-3")}, **options,
    )  # fmt: skip


def trainer(model, data, engine, action, arguments, **options):
    """The losses of this rank's steps, and what was trained; Trainer gives each rank its rows."""
    import torch
    import transformers
    from torch.nn.parallel import DistributedDataParallel

    losses = []

    def record(model, args, inputs, outputs):
        """What Trainer makes of the model's loss depends on the release."""
        logits, labels = outputs["logits"].detach()[:, :-1], inputs["labels"][:, 1:]
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    model.register_forward_hook(record, with_kwargs=True)

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return None

        def create_optimizer(self, *args):  # Trainer takes none beside FSDP
            self.optimizer = sgd(self.model, momentum=0.9 if action == "resume" else 0.0)
            return self.optimizer

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            if "FSDP2" in engine:
                use_fsdp(self.accelerator)
                self.is_fsdp_enabled = True

    made = InOrder(model, arguments, train_dataset=data, data_collator=collate)
    made.train(**options)
    is_ddp = isinstance(made.model_wrapped, DistributedDataParallel)
    assert is_ddp is engine.endswith((" DDP", "auto"))
    assert ("DeepSpeed" in engine) is (type(made.model_wrapped).__name__ == "DeepSpeedEngine")
    return losses, made.model_wrapped


def saved(folder, form, module, trained, rank):
    """What one process reads from the saved adapter, and its logits."""
    import torch
    from peft import PeftModel

    if "deepspeed" in sys.modules:  # else transformers shards what it loads
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
    state = {n: t for n, t in trained.items() if "lora_" in n}
    out = None
    if rank == 0:
        out = tempfile.mkdtemp(dir=folder)
        module.save_pretrained(out, state_dict=state)
        model = PeftModel.from_pretrained(load(folder, form), out).train()
        with torch.no_grad():
            logits = model(**batches(form, "save", RANKS)[0]).logits
        read = {f"read {n}": whole(p) for n, p in model.named_parameters() if "lora_" in n}
        return {"logits": whole(logits), **read}
    return {}


def forward(folder, engine, form, rank):
    import torch

    options = {"tp_plan": "auto"} if engine in ENGINES else {}
    model = load(folder, form, **options).eval()
    part = part_held(model) if options else None
    with torch.no_grad():
        return {"logits": whole(model(**batches(form, "step", RANKS)[0]).logits)}, part


def generate(folder, engine, form, rank):
    """Each process gets some of the prompts."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    model = load(folder, form).eval()
    prompts = batches(form, "step", 1)[:3]
    for prompt in prompts:
        del prompt["labels"]

    def tokens(own):
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        return [model.generate(**prompt, **options).tolist() for prompt in own]

    if engine not in ENGINES:
        found = tokens(prompts)
    else:
        state = PartialState(cpu=DEVICE == "cpu")
        assert state.num_processes == RANKS
        with state.split_between_processes(prompts) as own:
            assert 0 < len(own) < len(prompts)
            found = gather_object(tokens(own))
    import torch

    return {"tokens": torch.tensor(found).float()}, None


def play(folder, engine, form, action, rank):
    if action in (*TRAIN, *FURTHER):
        return train(folder, engine, form, action, rank)
    return {"forward": forward, "generate": generate}[action](folder, engine, form, rank)


# ---------------------------------------------------------------- processes

DIED = "the process died"


def worker(folder, out, wanted, limit, fresh=False):
    """One rank: plays each cell in a process of its own, because some of them die or hang.

    That is a fork, or a new Python: a fork cannot use CUDA after bitsandbytes is imported.
    """
    rank = int(os.environ["RANK"])
    for number, cell in enumerate(wanted):
        if cell[0] in ENGINES or rank == 0:
            paths = [out / f"{number}-{each}" for each in (rank, 1 - rank)]
            begin = functools.partial(
                os.execv, sys.executable, [sys.executable, *sys.argv, "--play"]
            )
            if not fresh:
                begin = functools.partial(played, folder, out, number, cell)
            stored(paths[0], limited(begin, *paths, limit))


def imports():
    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers

    transformers.utils.logging.set_verbosity_error()


def serve():
    """Import the libraries once, and play in the place of a rank whatever each line asks for.

    A fork does, with the environment that the launcher gave to the rank.
    """
    imports()
    import_what_forks_need(())
    gc.freeze()  # else each fork collects what was imported
    for line in sys.stdin:
        folder, out, limit, rank = json.loads(line)
        process = os.fork()
        if process == 0:
            try:
                play_as(rank, Path(folder), Path(out), limit)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(process, 0)
        stored(Path(out) / f"end-{rank}", None)


def play_as(rank, folder, out, limit):
    log = os.open(out / "log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(pickle.loads((out / f"environment-{rank}").read_bytes()))
    wanted = json.loads((out / "cells").read_text())
    import_what_forks_need(wanted)
    stored(out / f"begun-{rank}", None)
    end = time.monotonic() + LIMIT
    while not (out / f"begun-{1 - rank}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    worker(folder, out, wanted, limit)


def relay(out):
    """One rank, which a server plays."""
    rank = os.environ["RANK"]
    stored(out / f"environment-{rank}", dict(os.environ))
    while not (out / f"end-{rank}").exists():
        time.sleep(0.05)


@contextlib.contextmanager
def servers(variables):
    """Processes that play as the ranks."""
    environment = environment_of(variables)
    command = [sys.executable, __file__, "--serve", "--device", DEVICE]
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(RANKS):
            # Sets of strings have another order in each process, here always.  bitsandbytes would
            # import the compiler, for seconds; nothing is compiled.
            own = {**environment, "PYTHONHASHSEED": str(1 + rank), "TORCHDYNAMO_DISABLE": "1"}
            each = subprocess.Popen(command, env=own, cwd=ROOT, stdin=subprocess.PIPE, text=True)
            started.append(stack.enter_context(each))  # its end closes the pipe, and waits
        yield started


def environment_of(variables):
    # tools/matrix.py has other releases on this path.
    path = os.pathsep.join(filter(None, (os.getenv("PYTHONPATH"), str(ROOT))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
    if DEVICE == "cpu":
        environment |= {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
    return environment


def import_what_forks_need(cells):
    """Import now what each of them would import again."""
    names = ["transformers.models.gemma4.modeling_gemma4", "transformers.integrations.bitsandbytes"]
    if any("Trainer" in engine for engine, _, _ in cells):
        names.append("transformers.trainer")
    for name in (*names, "peft.tuners.lora.bnb"):
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # a newer module
        importlib.import_module(
            "transformers.conversion_mapping"
        ).get_checkpoint_conversion_mapping("gemma4")
    if any("DeepSpeed" in engine for engine, _, _ in cells):
        import_deepspeed()


def played(folder, out, number, cell):
    """Play a cell as one rank, store what was found or the error, and end the process."""
    rank = int(os.environ["RANK"])
    try:
        import torch

        tempfile.tempdir = str(folder)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if DEVICE == "cuda":
            torch.cuda.set_device(own_device())
        if cell[0] in ENGINES:
            store = f"file://{out}/store{number}"
            torch.distributed.init_process_group(
                BACKENDS[DEVICE], init_method=store, rank=rank, world_size=RANKS
            )
        else:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                os.environ.pop(name, None)
        found = play(folder, *cell, rank)
    except BaseException as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    stored(out / f"{number}-{rank}", found)
    sys.stderr.flush()
    os._exit(0)


def limited(begin, path, other, limit):
    """What a fork stored that begins with this: values and part held; or an error; or a hang."""
    process = os.fork()
    if process == 0:
        begin()
        os._exit(0)
    start, failed, spent, looked = time.monotonic(), False, 0.0, 0
    end = start + limit
    while time.monotonic() < end:
        if os.waitpid(process, os.WNOHANG) != (0, 0):
            return pickle.loads(path.read_bytes()) if path.exists() else DIED
        if not failed and other.exists() and isinstance(pickle.loads(other.read_bytes()), str):
            end, failed = time.monotonic() + GRACE, True
        if time.monotonic() > start + (looked + 1) * IDLE:
            before, spent, looked = spent, seconds_of(process), looked + 1
            if spent - before < IDLE / 20:
                break
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "HANG"


def seconds_of(process):
    """The time that a process has computed."""
    import psutil

    times = psutil.Process(process).cpu_times()
    return times.user + times.system


def stored(path, found):
    """Write the file in one step, because the other rank reads it."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(found))
    part.replace(path)


def is_installed(cell):
    return "DeepSpeed" not in cell[0] or importlib.util.find_spec("deepspeed") is not None


def alone(cell):
    """The reference of a cell.  Trainer may weight rows otherwise than a loop."""
    engine, form, action = cell
    return TRAINER_ALONE if "Trainer" in engine else ALONE, form, action


def launched(folder, launcher, wanted, variables, limit=LIMIT, served=()):
    """The results of all ranks by cell; without a launcher there is one process.

    Without servers, all processes are new.
    """
    out = Path(tempfile.mkdtemp(dir=folder))
    (out / "cells").write_text(json.dumps(wanted))
    environment = environment_of(variables)
    if not launcher:
        environment["RANK"] = "0"
    mode = ("--worker", str(folder), str(out), "--device", DEVICE, "--limit", str(limit))
    if served:
        mode = ("--relay", str(out))
    command = [sys.executable, *launcher, __file__, *mode]
    with (out / "log").open("a") as log:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
        for rank, each in enumerate(served):
            while process.poll() is None and not (out / f"environment-{rank}").exists():
                time.sleep(0.05)
            print(json.dumps([str(folder), str(out), limit, rank]), file=each.stdin, flush=True)
        try:
            process.wait(len(wanted) * limit + END)
        except subprocess.TimeoutExpired:
            process.terminate()  # and a launcher ends its processes
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END)
            process.kill()
    results = {}
    for number, cell in enumerate(wanted):
        paths = [out / f"{number}-{rank}" for rank in range(RANKS if cell[0] in ENGINES else 1)]
        if not all(path.exists() for path in paths):
            raise SystemExit((out / "log").read_text()[-3000:])
        results[cell] = [pickle.loads(path.read_bytes()) for path in paths]
        if not served and any(isinstance(each, str) for each in results[cell]):
            print(*cell, (out / "log").read_text()[-3000:], sep="\n", file=sys.stderr, flush=True)
    return results


def differences(found, expected):
    """The difference of each tensor, as a part of its largest value, with its name."""
    if missing := found.keys() - expected.keys():
        return [(float("inf"), f"{sorted(missing)[0]} is new")]
    sizes = [
        ((found[n] - expected[n]).abs().max().item() / expected[n].abs().max().item(), n)
        for n in found
    ]
    return [(size if size == size else float("inf"), name) for size, name in sizes]


def is_decayed(size, name):
    return "_tower" in name and abs(size - 1 + (1 - RATE * DECAY) ** STEPS) < 1e-4


def judge(results, reference, action="", form=""):
    """Verdict and detail of the results of all ranks."""
    failures = [each for each in results if isinstance(each, str)]
    if failures:
        # A process whose peer stopped says so; the peer says why.
        words = ("gloo", "NCCL")
        own = [
            each
            for each in failures
            if each not in ("HANG", DIED) and not any(word in each for word in words)
        ]
        if not own:
            return "HANG", failures[0]
        return "refused" if "gemma4_compat" in own[0] else "error", " ".join(own[0].split())
    if isinstance(reference, str):
        return "WRONG", f"one process: {reference}"
    if missing := reference[0].keys() - set().union(*(values for values, _ in results)):
        return "WRONG", f"{sorted(missing)[0]} is missing"
    sizes = [each for values, _ in results for each in differences(values, reference[0])]
    tolerances = TOLERANCES_IN_BF16 if action == "bf16" else TOLERANCES[DEVICE]
    decayed = [each for each in sizes if action == "tower unused" and is_decayed(*each)]
    sizes = [each for each in sizes if each not in decayed]
    for start, tolerance in tolerances.items():
        size, name = max((each for each in sizes if each[1].startswith(start)), default=(0, ""))
        if form == EXPERTS and name == "logits":
            tolerance = max(tolerance, TOLERANCE_WITH_EXPERTS)
        if size > tolerance:
            return "WRONG", f"{size:.2g} {name}"
    part = max(part or 0 for _, part in results)
    kind = "replicated" if part > SHARDED else "decayed" if decayed else "="
    return kind, f"{size:.1g}, part held {part:.2f}"


def run(wanted, sides):
    """``{cell: {side: (verdict, detail)}}``; a side is a name and its environment variables."""
    found = {side: {} for side in sides}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = {side: stack.enter_context(servers(sides[side])) for side in sides}
        build(folder)
        for launcher in (TORCHRUN, ACCELERATE, FSDP):
            own = [cell for cell in wanted if ENGINES[cell[0]][0] is launcher]
            for side, results in found.items() if own else ():
                references = [each for each in map(alone, own) if each not in results]
                both = [*own, *dict.fromkeys(references)]
                results |= launched(folder, launcher, both, sides[side], served=served[side])
    return {
        cell: {
            side: judge(results[cell], *results[alone(cell)], cell[2], cell[1])
            for side, results in found.items()
        }
        for cell in wanted
    }


def run_apart(wanted, sides, jobs, seconds, longest, report):
    """As ``run``, with a launcher for each cell; gives each verdict to ``report`` when it is known.

    The first side begins first.  What does not end in time is left out.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        build(folder)
        works = []
        for side in sides:
            references = dict.fromkeys(map(alone, wanted))
            works += [(side, each) for each in (*references, *wanted)]
        found = {}

        def played_alone(number, side, cell):
            limit = min(longest, end - time.monotonic())
            if limit < END:
                return
            launcher, variables = (), sides[side]
            if cell[0] in ENGINES:
                launcher = ENGINES[cell[0]][0]
            elif DEVICE == "cuda":
                # Trainer would use all that it sees.
                variables = {**variables, "CUDA_VISIBLE_DEVICES": str(number % RANKS)}
            try:
                results = launched(folder, launcher, [cell], variables, limit)[cell]
            except SystemExit as error:
                results = [f"no result: {error}"]
            found[side, cell] = results

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            started = [pool.submit(played_alone, i, *work) for i, work in enumerate(works)]
            told = set()
            for each in concurrent.futures.as_completed(started):
                each.result()
                for side, cell in found.keys() - told:
                    if cell[0] in ENGINES and (side, alone(cell)) in found:
                        told.add((side, cell))
                        (reference,) = found[side, alone(cell)]
                        report(cell, side, *judge(found[side, cell], reference, cell[2], cell[1]))


@functools.cache
def all_verdicts():
    """The verdicts of all cells of the tests of this run, with the patches that are on here."""
    return run(list(filter(is_installed, dict.fromkeys(asked))), {"now": {}})


def check(cell):
    """Assert that a cell equals one process."""
    import pytest

    if not is_installed(cell):
        pytest.skip("deepspeed is not installed")
    kind, detail = all_verdicts()[cell]["now"]
    assert kind == "=", f"{kind}: {detail}"


# ---------------------------------------------------------------- the data


def read():
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def write(stack, verdicts):
    """Keep the verdicts of other stacks, and of cells that did not run; a line for each form."""
    data = read()
    libraries = ["torch", "transformers", "accelerate", "peft", "bitsandbytes"]
    if importlib.util.find_spec("deepspeed") is not None:
        libraries.append("deepspeed")
    old = data.get(stack, {}).get("rows", {})
    table = {}
    order = list(ENGINES)
    for engine, form, action in sorted(cells(), key=lambda cell: order.index(cell[0])):
        sides = verdicts.get((engine, form, action))
        kinds = (
            old.get(engine, {}).get(form, {}).get(action)
            if sides is None
            else {side: kind for side, (kind, _) in sides.items()}
        )
        if kinds is not None:
            table.setdefault(engine, {}).setdefault(form, {})[action] = kinds
    versions = {each: importlib.metadata.version(each).partition("+")[0] for each in libraries}
    data[stack] = {"versions": versions, "rows": table}
    lines = [
        f'"{stack}": {{"versions": {json.dumps(entry["versions"])}, "rows": {{\n'
        + ",\n".join(
            f"  {json.dumps(engine)}: {{\n"
            + ",\n".join(f"    {json.dumps(form)}: {json.dumps(forms[form])}" for form in forms)
            + "}"
            for engine, forms in entry["rows"].items()
        )
        + "}}"
        for stack, entry in sorted(data.items())
    ]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    PAGE.write_text(page())


def page():
    """The data as a page: what is above its first table stays."""
    text = re.split(rf"\n## ({'|'.join(TITLES.values())})\n", PAGE.read_text())[0]
    for stack, entry in read().items():
        versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
        text += f"\n## {TITLES[stack]}\n\n{versions}.\n"
        for engine, (_, _, actions) in ENGINES.items():
            if engine not in entry["rows"]:
                continue
            text += f"\n**{engine}**\n\n| model | {' | '.join(actions)} |\n"
            text += "|---" * (len(actions) + 1) + "|\n"
            for form, found in entry["rows"][engine].items():
                shown = [cell_of(found[each]) if each in found else "" for each in actions]
                text += f"| {form} | {' | '.join(shown)} |\n"
    return text


def cell_of(sides):
    now = sides["with"]
    before = sides.get("without", now)
    return now if now == before else f"**{now}** (without: {before})"


def main():
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stack", nargs="?", default="newest")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of engine | form | action")
    parser.add_argument("--print", action="store_true", help="write no data")
    parser.add_argument("--device", choices=BACKENDS, default="cpu")
    parser.add_argument("--jobs", type=int, help="cells at a time, in processes of their own")
    parser.add_argument("--seconds", type=float, default=3600, help="of all cells, with --jobs")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of each cell")
    parser.add_argument("--details", type=Path, metavar="PATH", help="write them here")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--relay", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    DEVICE = options.device
    if options.serve:
        return serve()
    if options.relay:
        return relay(options.relay)
    if options.worker:
        if "PYTHONHASHSEED" not in os.environ:
            # Sets of strings have another order in each process, here always.
            os.environ["PYTHONHASHSEED"] = str(1 + int(os.environ["RANK"]))
            os.execv(sys.executable, [sys.executable, *sys.argv])
        folder, out = map(Path, options.worker)
        wanted = json.loads((out / "cells").read_text())
        if options.play:
            imports()
            played(folder, out, 0, wanted[0])
        return worker(folder, out, wanted, options.limit, fresh=True)
    begin = time.monotonic()
    wanted = [cell for cell in cells() if fnmatch.fnmatch(" | ".join(cell), options.only)]
    wanted = list(filter(is_installed, wanted))
    verdicts, lines = {cell: {} for cell in wanted}, []

    def report(cell, side, kind, detail):
        verdicts[cell][side] = kind, detail
        lines.append([round(time.monotonic() - begin), *cell, side, kind, detail])
        print(" | ".join(cell), f"| {side}: {kind} | {detail[:300]}", flush=True)
        if options.details:
            stored_as = options.details.with_suffix(".part")
            stored_as.write_text("[" + ",\n".join(map(json.dumps, lines)) + "]\n")
            stored_as.replace(options.details)

    if options.jobs:
        run_apart(wanted, SIDES, options.jobs, options.seconds, options.limit, report)
    else:
        for cell, sides in run(wanted, SIDES).items():
            for side, found in sides.items():
                report(cell, side, *found)
    if not options.print:
        write(options.stack, {cell: sides for cell, sides in verdicts.items() if sides})


if __name__ == "__main__":
    main()
