"""Compares what users override with and without the patches.

``python tests/overrides_table.py [--only PATTERN] [--print] STACK`` runs the rows of
``tests/overrides.py`` and writes their verdicts to ``tests/overrides.json``, under the name STACK.

A row is an override.  A column is a form of a tiny model and an action.  Each cell runs in two
processes, with and without the patches, from the same seed, in float32 on the CPU.  Everything that
the action returns is compared: logits, tokens, the loss, all trained tensors after a step, files.
Where both differ, or where only the patched one works, there are references, also computed without
the patches.  A split model must equal the whole model.  A 4-bit model must equal the model with the
dequantized weights, and the same adapter.  A step over four micro batches may weight them by their
numbers of tokens, unless the loss is the user's own.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import importlib
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.overrides import ACTIONS, KINDS, ROWS, TRAINING  # noqa: E402
from tests.peft_table import differences, forked  # noqa: E402

#: as in tests/support.py, which imports torch
NOT_PACKED = ["lm_head", "router.proj"]

DATA = Path(__file__).with_suffix(".json").with_name("overrides.json")
FORMS = ("whole", "split", "4-bit", "adapter")
#: by form: others, whose results without the patches are the same
REFERENCES = {
    "whole": ("whole",),
    "split": ("whole",),
    "4-bit": ("dequantized",),
    "adapter": ("4-bit, adapter", "dequantized, adapter"),
}
#: the end of the name of a form with the row's own reference
REFERENCE = "reference"
#: bitsandbytes multiplies one token with 4-bit weights in another order
TOLERANCE = 2e-5
VERDICTS = {
    "=": "equal with and without the patches, bit for bit",
    "near": "equal within the tolerance: a cache keeps other positions, which changes sums",
    "mended": "wrong or an error without the patches; with them, equal to the reference",
    "weighted": "the micro batches of a step are weighted by their numbers of tokens",
    "error": "an error with and without the patches",
    "not reached": "the override does not run, without the patches neither: accelerate keeps the "
    "forward that a module has when the model is split",
    "WRONG": "not what it is without the patches, and not equal to a reference",
    "REFUSED": "an error with the patches only",
    "UNKNOWN": "works with the patches only, and there is no reference",
    "UNREACHED": "the override runs only without the patches",
    "CRASH": "the process died",
}
BAD = ("WRONG", "REFUSED", "UNKNOWN", "UNREACHED", "CRASH")


# ---------------------------------------------------------------- models


def build(folder):
    """Save the checkpoints: dense and with experts, as they are and dequantized."""
    import torch
    import transformers

    from gemma4_compat import tiny
    from tests import support

    text = tiny._config().text_config.to_dict()
    config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Gemma4ForConditionalGeneration(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / "dense")
    sizes = {"num_hidden_layers": 3, "num_experts": 8}
    sizes["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    support.save_random("Gemma4 experts", folder / "experts", **sizes)
    for family in ("dense", "experts"):
        model = load(folder, family, "4-bit")
        model.dequantize()
        state = {n: t.float() for n, t in model.state_dict().items()}
        plain = load(folder, family, "whole")
        plain.load_state_dict(state)
        plain.save_pretrained(folder / f"{family}-dequantized")


def load(folder, family, form, subclass=None):
    """A model on one device; ``subclass`` makes a subclass of its class."""
    import torch
    import transformers

    dense = family == "dense"
    cls = transformers.Gemma4ForConditionalGeneration if dense else transformers.Gemma4ForCausalLM
    if subclass is not None:
        base, cls = cls, subclass(cls)
        cls.__name__ = cls.__qualname__ = base.__name__
    options = {"dtype": torch.float32}
    if form in ("4-bit", "adapter", "4-bit, adapter"):
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=NOT_PACKED,
        )  # fmt: skip
    name = f"{family}-dequantized" if form.startswith("dequantized") else family
    return cls.from_pretrained(folder / name, device_map={"": "cpu"}, **options).eval()


def seeded(name, shape):
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.05 * torch.randn(shape, generator=generator)


class Case:
    """One row in one form: what the override changes, and the model."""

    def __init__(self, folder, function, form):
        from transformers import Trainer, TrainingArguments

        self.folder, self.form = folder, form
        self.family = "experts" if getattr(function, "kind", None) == "experts" else "dense"
        self.reached = 0
        #: what the row changes
        self.subclass = self.wrapper = None
        self.prepare, self.trained = [], []
        self.trainer, self.arguments, self.trainer_options = Trainer, {}, {"optimizers": None}
        self.arguments_class = TrainingArguments
        self.generate_options = dict
        self.save_arguments = lambda: ((), {})
        self.context = contextlib.nullcontext
        self.run = lambda function: function()
        self.gradients = False
        #: values that the override has seen
        self.seen = {}
        function(self)
        self.model = self.base = None

    def reach(self):
        self.reached += 1

    def same(self, results):
        """Several results that must be equal."""
        assert all(differences(each, results[0]) is None for each in results), "results differ"

    def make(self, action):
        """Load, split, adapt, and then let the row change the model."""
        import torch

        self.base = self.model = load(self.folder, self.family, self.form, self.subclass)
        language = self.language_model()
        if self.form in ("split", "adapter"):
            self.dispatch()
        if "adapter" in self.form or (
            self.form in ("4-bit", "dequantized") and action in (*TRAINING, "weighted")
        ):
            self.adapt()
        else:
            for parameter in self.base.parameters():
                parameter.requires_grad_(False)
            for parameter in language.layers[0].parameters():
                if parameter.is_floating_point() and not self.is_packed(parameter):
                    parameter.requires_grad_()
        torch.manual_seed(1)
        for prepare in self.prepare:
            prepare()

    @staticmethod
    def is_packed(parameter):
        return hasattr(parameter, "quant_state")

    def dispatch(self):
        """Offload a layer to disk, and the per-layer embeddings."""
        from accelerate import dispatch_model

        prefix = "model.language_model" if self.family == "dense" else "model"
        device_map = {"": "cpu", f"{prefix}.layers.1": "disk"}
        if self.family == "dense":
            device_map[f"{prefix}.embed_tokens_per_layer"] = "disk"
        dispatch_model(
            self.base,
            device_map,
            main_device="cpu",
            offload_dir=tempfile.mkdtemp(dir=self.folder),
            skip_keys=self.base._skip_keys_device_placement,
        )

    def adapt(self):
        import torch
        from peft import LoraConfig, get_peft_model

        targets = r".*layers\.\d+\.(self_attn\.[qo]_proj|mlp\.(up|down)_proj)"
        self.model = get_peft_model(self.base, LoraConfig(r=4, target_modules=targets)).eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(seeded(name, parameter.shape))

    def language_model(self):
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return base.model.language_model if self.family == "dense" else base.model

    def another(self):
        """A whole model of the same family."""
        return load(self.folder, self.family, "whole")

    def inputs(self, rows=2, width=10):
        import torch

        ids = torch.randint(3, 120, (rows, width), generator=torch.Generator().manual_seed(rows))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.family == "dense":
            inputs["mm_token_type_ids"] = torch.zeros_like(ids)
        return inputs


# ---------------------------------------------------------------- actions
# Each takes a Case and returns the values to compare, by name.


def forward(case):
    import torch

    def run():
        with torch.set_grad_enabled(case.gradients), case.context():
            return [case.model(**case.inputs()).logits.detach().float() for _ in range(2)]

    first, again = case.run(run)
    return {"logits": first, "again": again}


def micro_batches(case, number):
    """Rows with the same number of tokens, of which few or many are targets."""
    batch = case.inputs(number, 14)
    batch["labels"] = batch["input_ids"].clone()
    for row in range(number):
        batch["labels"][row, 6 + 2 * row :] = -100
    return [{name: value[row] for name, value in batch.items()} for row in range(number)]


def make_trainer(case, number):
    import torch

    trained = [p for p in case.model.parameters() if p.requires_grad]
    options = dict(case.trainer_options)
    if "optimizers" in options:
        options["optimizers"] = (torch.optim.SGD(trained, lr=0.1), None)
    model = case.model if case.wrapper is None else case.wrapper(case.model)
    arguments = case.arguments_class(
        output_dir=tempfile.mkdtemp(dir=case.folder), per_device_train_batch_size=1, max_steps=1,
        gradient_accumulation_steps=number, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=True, max_grad_norm=0.0, lr_scheduler_type="constant", learning_rate=0.1, seed=0,
        remove_unused_columns=False, **case.arguments,
    )  # fmt: skip
    trainer = case.trainer(
        model=model, args=arguments, train_dataset=micro_batches(case, number), **options
    )
    for change in case.trained:
        change(trainer)
    return trainer


def step(case, number):
    def run():
        trainer = make_trainer(case, number)
        # The order of the rows matters for the rounding of sums.
        trainer._get_train_sampler = lambda *args: None
        with case.context():
            loss = trainer.train().training_loss
        return {"loss": loss, **trained(case)}

    return as_tensors(case.run(run))


def trained(case):
    named = case.model.named_parameters()
    return {n: p.detach().clone() for n, p in named if p.requires_grad and not p.is_meta}


def weighted_step(case):
    """The reference of a step: each micro batch counts by its number of targets."""
    import torch
    from transformers import default_data_collator

    trainer = make_trainer(case, 4)
    batches = [default_data_collator([row]) for row in micro_batches(case, 4)]
    counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches]
    parameters = [p for p in case.model.parameters() if p.requires_grad]
    case.model.train()
    optimizer = trainer.create_optimizer() or trainer.optimizer
    total = 0.0
    for batch, count in zip(batches, counts, strict=True):
        with trainer.compute_loss_context_manager(), case.context():
            # The Trainer gives the user's function no number of a step: the loss is a mean.
            loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
        loss = loss * count / sum(counts)
        loss.backward()
        total += loss.item()
    for callback in trainer.callback_handler.callbacks:
        callback.on_pre_optimizer_step(None, None, None, model=case.model)
    assert any(p.grad is not None for p in parameters)
    optimizer.step()
    return as_tensors({"loss": torch.tensor(total), **trained(case)})


def generate(case, **options):
    import torch

    def run():
        with torch.no_grad(), case.context():
            outputs = case.model.generate(
                **case.inputs(1, 9),
                **{
                    "max_new_tokens": 7,
                    "do_sample": False,
                    "eos_token_id": None,
                    "return_dict_in_generate": True,
                    "output_logits": True,
                    **options,
                    **case.generate_options(),
                },
            )
        if isinstance(outputs, torch.Tensor):
            return {"tokens": outputs}
        found = {"tokens": outputs.sequences}
        if outputs.logits is not None:
            found["logits"] = torch.stack(outputs.logits).float()
        for layer, states in enumerate((getattr(outputs, "hidden_states", None) or [()])[-1]):
            found[f"hidden {layer}"] = states.float()
        return found

    torch.manual_seed(2)
    return case.run(run)


#: names of values that need not equal a reference: its tensors may be in other files
FILE = "file: "


def save(case):
    """The saved tensors and the files' names; a model is saved before any forward."""
    from safetensors.torch import load_file

    def run():
        folder = Path(tempfile.mkdtemp(dir=case.folder))
        positional, options = case.save_arguments()
        case.model.save_pretrained(str(folder), *positional, **options)
        files = sorted(folder.rglob("*.safetensors"))
        found = {n: t for f in files for n, t in load_file(f).items()}
        names = [f"{f.name}: {n}" for f in files for n in load_file(f)]
        names += [f.name for f in folder.rglob("*.json")]
        return as_tensors({**found, **{f"{FILE}{name}": 1 for name in names}})

    return case.run(run)


def as_tensors(values):
    import torch

    return {name: torch.as_tensor(value) for name, value in values.items()}


RUN = {
    "forward": forward,
    "step 1": lambda case: step(case, 1),
    "step 4": lambda case: step(case, 4),
    "weighted": weighted_step,
    "generate": generate,
    "static": lambda case: generate(case, cache_implementation="static"),
    "save": save,
}


# ---------------------------------------------------------------- one side


def perform(folder, name, form, action):
    """Run one cell in this process: its values or its error, and whether the override ran."""
    import torch

    torch.manual_seed(0)
    reached = 0
    try:
        function = ROWS[name]
        if form.endswith(f", {REFERENCE}"):
            function, form = function.reference, form.removesuffix(f", {REFERENCE}")
        case = Case(folder, function, form)
        case.make(action)
        values = RUN[action](case)
        reached = case.reached
        values |= as_tensors({f"seen {n}": v for n, v in case.seen.items()})
        return values, None, reached
    except Exception as error:
        if os.environ.get("OVERRIDES_TRACE"):
            traceback.print_exc()
        reached = getattr(locals().get("case"), "reached", 0)
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:200], reached


def cells_of(name):
    """The forms and actions of a row."""
    function = ROWS[name]
    return [(f, a) for f in function.forms or FORMS for a in ACTIONS if a in function.actions]


def references_of(name, form, action):
    """The cells without the patches that are right if this one is, the most likely one first."""
    mark = "" if ROWS[name].reference is ROWS[name] else f", {REFERENCE}"
    forms = [each + mark for each in REFERENCES[form]]
    if action == "save":  # what is saved is not dequantized
        forms = [each for each in forms if not each.startswith("dequantized")]
    cells = [(each, action) for each in forms if (each, action) != (form, action)]
    if action == "static":  # which fails without the patches on some releases
        cells += [(each, "generate") for each in forms]
    if action == "step 4" and not ROWS[name].own_loss:
        forms = dict.fromkeys((form, *forms))
        cells = [*((each, "weighted") for each in forms), *cells]
    return cells


def prepare():
    """Do now what each of the forked processes would do again."""
    for name in ("trainer_seq2seq", "integrations.bitsandbytes", "models.gemma4.modeling_gemma4"):
        importlib.import_module(f"transformers.{name}")
    importlib.import_module("peft.tuners.lora.bnb")
    with contextlib.suppress(ImportError):  # a newer module
        importlib.import_module(
            "transformers.conversion_mapping"
        ).get_checkpoint_conversion_mapping("gemma4")


def work(folder, side):
    """Run cells in this process, which has the patches or not.

    The side with the patches builds the checkpoints first.  Each line of stdin is pairs of a row
    and its cells.  After each work, a line of stdout names the file of results.
    """
    import logging
    import warnings

    import gemma4_compat  # noqa: F401  first: before any of the libraries that it patches

    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stderr
    import peft  # noqa: F401
    import torch
    import transformers
    from bitsandbytes.nn import modules

    # The same arithmetic on all CPUs, and that of the dequantized weights.
    modules.has_avx512bf16 = lambda: False
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    if side == "with":
        if not forked(lambda: build(folder) or "built"):
            raise SystemExit("the checkpoints could not be made")
        print("built", file=out, flush=True)
    prepare()
    file = folder / f"{os.getpid()}.cell"
    for line in sys.stdin:
        results = {}
        for name, cells in json.loads(line):
            for form, action in cells:

                def run(form=form, action=action, name=name):
                    file.write_bytes(pickle.dumps(perform(folder, name, form, action)))

                file.unlink(missing_ok=True)
                forked(run)
                alive = file.exists()
                results[name, form, action] = pickle.loads(file.read_bytes()) if alive else None
            print(side, name, len(cells), file=sys.stderr, flush=True)
            gc.collect()
        found = file.with_suffix(f".{side}")
        found.write_bytes(pickle.dumps(results))
        print(found, file=out, flush=True)


class Side:
    """A process with the patches or without them, which imports the libraries once."""

    def __init__(self, folder, name):
        environment = {**os.environ, "GEMMA4_COMPAT": "0" if name == "without" else "1"}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--side", name, "--folder", str(folder)]
        self.name = name
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def begin(self, rows):
        print(json.dumps(rows), file=self.process.stdin, flush=True)

    def said(self):
        """The next line that the process prints."""
        if line := self.process.stdout.readline():
            return line.strip()
        raise SystemExit(f"the side {self.name!r} ended with {self.process.wait()}")

    def results(self):
        return pickle.loads(Path(self.said()).read_bytes())

    def end(self):
        self.process.communicate()


# ---------------------------------------------------------------- verdicts


def near(found, expected):
    """Whether all values are within the tolerance, relative to the largest value of a tensor."""
    if found is None or expected is None:
        return False
    found, expected = (
        {name: value for name, value in values.items() if not name.startswith(FILE)}
        for values in (found, expected)
    )
    if found.keys() != expected.keys():
        return False
    for name, value in expected.items():
        own = found[name]
        if own.shape != value.shape:
            return False
        own, value = own.double(), value.double()
        size = max(1.0, value.abs().nan_to_num().max().item()) if value.numel() else 1.0
        if not (own - value).abs().nan_to_num(0.0).le(TOLERANCE * size).all():
            return False
        if not own.isnan().equal(value.isnan()):
            return False
    return True


def judge(name, form, action, with_, without):
    """``(verdict, detail)`` of a cell; ``with_`` and ``without`` are the results of the sides."""
    if with_[name, form, action] is None:
        return "CRASH", ""
    found, refusal, reached = with_[name, form, action]
    nothing = (None, "the process died", 0)
    expected, failure, alone = without.get((name, form, action)) or nothing
    values = {
        cell: (without.get((name, *cell)) or nothing)[0]
        for cell in references_of(name, form, action)
    }
    right = [each for (_, a), each in values.items() if a != "weighted" and each is not None]
    weighted = [each for (_, a), each in values.items() if a == "weighted" and each is not None]
    if refusal is not None:
        if failure is not None:
            return "error", refusal
        if right and not any(near(expected, each) for each in right):
            return "error", f"{refusal}; wrong without the patches"
        return "REFUSED", refusal
    if not reached:
        return ("UNREACHED" if alone else "not reached"), ""
    if failure is None and differences(found, expected) is None:
        return "=", ""
    if failure is None and action in ("generate", "static") and near(found, expected):
        return "near", ""
    if any(near(found, each) for each in weighted):
        return "weighted", ""
    if any(near(found, each) for each in right):
        return "mended", failure or "wrong without the patches"
    if failure is not None and not right:
        return "UNKNOWN", failure
    size, where = differences(found, expected if failure is None else right[0])
    return "WRONG", f"{size:.3g} {where}" + (f"; without: {failure}" if failure else "")


def run(names, jobs=2):
    """``{row: {form: {action: [verdict, detail]}}}``; ``jobs`` processes compute the references."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        sides = [Side(Path(folder), name) for name in ("with", *["without"] * jobs)]
        for side in sides:
            stack.callback(side.end)
        assert sides[0].said() == "built"
        cells = [(name, cells_of(name)) for name in names]
        for side in sides[:2]:
            side.begin(cells)
        with_, without = (side.results() for side in sides[:2])
        # References take most of the time, so each cell gets them one by one, until one is equal.
        while wanted := dict.fromkeys(missing(with_, without)):
            rows = {name: [] for name, *_ in wanted}
            for name, *cell in wanted:
                rows[name].append(cell)
            for number, side in enumerate(sides[1:]):
                side.begin(list(rows.items())[number::jobs])
            for side in sides[1:]:
                without |= side.results()
    found = {}
    for name, form, action in with_:
        verdict = judge(name, form, action, with_, without)
        found.setdefault(name, {}).setdefault(form, {})[action] = verdict
    return found


def missing(with_, without):
    """The next reference of each cell that is not right so far."""
    for cell in with_:
        if judge(*cell, with_, without)[0] in ("WRONG", "REFUSED", "UNKNOWN"):
            references = ((cell[0], *each) for each in references_of(*cell))
            yield from [each for each in references if each not in without][:1]


# ---------------------------------------------------------------- the data


def read():
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def write(stack, rows):
    """Keep the verdicts of other stacks, and of rows that did not run; one line for each row."""
    data = read()
    libraries = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
    old = data.get(stack, {}).get("rows", {})
    new = {row: verdicts(forms) for row, forms in rows.items()}
    rows = {row: new.get(row, old.get(row)) for row in ROWS if row in new or row in old}
    versions = {each: importlib.metadata.version(each).partition("+")[0] for each in libraries}
    data[stack] = {"versions": versions, "rows": rows}
    lines = []
    for stack, entry in sorted(data.items()):
        each = [f"  {json.dumps(row)}: {json.dumps(f)}" for row, f in entry["rows"].items()]
        lines.append(
            f'{json.dumps(stack)}: {{"versions": {json.dumps(entry["versions"])}, "rows": {{\n'
            + ",\n".join(each)
            + "\n}}"
        )
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def verdicts(forms):
    return {
        form: {action: kind for action, (kind, _) in actions.items()}
        for form, actions in forms.items()
    }


def table(stack):
    """The data of one stack as a markdown table."""
    entry = read()[stack]
    yield ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    yield ""
    yield f"| override | {' | '.join(FORMS)} |"
    yield "|---" * (len(FORMS) + 1) + "|"
    for row, forms in entry["rows"].items():
        texts = [", ".join(f"{a} {k}" for a, k in forms.get(f, {}).items()) for f in FORMS]
        yield f"| {row} | {' | '.join(texts)} |"
    counts = Counter(
        kind
        for forms in entry["rows"].values()
        for each in forms.values()
        for kind in each.values()
    )
    yield ""
    for kind, number in counts.most_common():
        yield f"{kind}: {number} ({VERDICTS[kind]})"
    for kind, (actions, why) in KINDS.items():
        if why:
            yield f"{kind}: {', '.join(actions)}; {why}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stack", nargs="?", help="the name of the installed stack in the data")
    parser.add_argument("--only", default="*", help="rows whose name matches")
    parser.add_argument("--print", action="store_true", help="print the data as a table")
    for hidden in ("--side", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        work(Path(options.folder), options.side)
        return
    if options.print:
        print("\n".join(table(options.stack)))
        return
    rows = run([name for name in ROWS if fnmatch.fnmatch(name, options.only)])
    for row, forms in rows.items():
        for form, actions in forms.items():
            for action, (kind, detail) in actions.items():
                if kind in BAD or (kind != "=" and detail):
                    print(f"{kind:10} {row} [{form}, {action}]: {detail}")
    if options.stack:
        write(options.stack, rows)


if __name__ == "__main__":
    main()
