"""README and ``docs/``: their Python runs on the tiny model; commands and links are valid."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from gemma4_compat import versions
from gemma4_compat.patches import LEGACY, load
from tests.support import run_process
from tools import cards, gpu
from tools.measured import DATA, Measured
from tools.plot import drawing, figures

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "docs/recipes.md",
    "docs/commands.md",
    "docs/how-it-works.md",
    "docs/wrong-gradients.md",
    "docs/engines.md",
    "docs/write-a-shim.md",
]

#: a program of its own, which tests/test_speech.py runs
SPEECH = "## Fine-tune on speech\n"

#: What differs in the tests: the only device is the CPU.  With this flag, and everything on the
#: CPU, transformers quantizes nothing.
ON_CPU = {
    '"": 0}': '"": "cpu"}',
    '"": 0,\n': '"": "cpu",\n',
    " llm_int8_enable_fp32_cpu_offload=True,": "",
}


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page, language, text=None):
    """The code blocks of a page, or of its text, without their indentation in a list."""
    found = re.findall(
        rf"^( *)```{language}\n(.*?)^ *```$", text or text_of(page), re.DOTALL | re.MULTILINE
    )
    return [re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, code in found]


def anchors(page):
    """The anchors of a page: those of its headings are as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    ids = re.findall(r'<a id="(\w+)"></a>', text_of(page))
    return {*ids} | {
        re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles
    }


# -- Python ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder in which google/gemma-4-E4B-it is the tiny model, with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from gemma4_compat.tiny import build_adapter, build_checkpoint

    folder = tmp_path_factory.mktemp("hub")
    model = folder / "google" / "gemma-4-E4B-it"
    model.mkdir(parents=True)
    build_checkpoint(model)
    build_adapter(folder / "my-lora", model)
    special = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    words = Tokenizer(
        models.WordLevel(special | {f"w{i}": i for i in range(4, 500)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    tokenizer.chat_template = (
        "{{ bos_token }} {% for message in messages %}{{ message['content'] }} {% endfor %}"
    )
    tokenizer.save_pretrained(model)
    return folder


@pytest.fixture
def names(hub, monkeypatch, tmp_path, pristine):
    """The names that the blocks of a page define, after all of them ran in order."""
    import torch

    monkeypatch.chdir(tmp_path)
    (tmp_path / "google").symlink_to(hub / "google")
    (tmp_path / "my-lora").symlink_to(hub / "my-lora")
    threads = torch.get_num_threads()

    def run(page, changes=()):
        defined = {}
        text = text_of(page).partition(SPEECH)[0]
        for number, code in enumerate(blocks(page, "python", text), 1):
            for text, changed in {**ON_CPU, **dict(changes)}.items():
                code = code.replace(text, changed)
            exec(compile(code, f"<block {number} of {page}>", "exec"), defined)
        return defined

    yield run
    torch.set_num_threads(threads)


def is_4bit(model):
    return any(type(module).__name__ == "Linear4bit" for module in model.modules())


def new_tokens(defined):
    return defined["output"].shape[1] - defined["inputs"]["input_ids"].shape[1]


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_python_of_the_readme(names, capsys):
    pytest.importorskip("bitsandbytes")
    # QLoRA starts from a base without an adapter.
    defined = names("README.md", {"get_peft_model(base,": "get_peft_model(model.unload(),"})
    assert is_4bit(defined["base"])
    assert new_tokens(defined) > 0
    assert re.search(r"w\d+", capsys.readouterr().out)  # the answer
    assert trained(defined["model"])
    assert all(".language_model.layers." in name for name in trained(defined["model"]))
    assert all("lora_" in name for name in trained(defined["model"]))


def test_python_of_the_recipes(names, tmp_path):
    pytest.importorskip("bitsandbytes")
    defined = names("docs/recipes.md")
    assert all(is_4bit(defined[name]) for name in ("base", "model", "streamed", "merged"))
    assert defined["loss"].isfinite()
    assert new_tokens(defined) > 0
    assert (tmp_path / "out-adapter" / "adapter_model.safetensors").exists()
    assert (tmp_path / "out-model" / "model.safetensors").exists()


def test_python_of_the_other_pages(names, capsys):
    import gemma4_compat

    names("docs/how-it-works.md")
    assert "peft_redispatch" in capsys.readouterr().out
    assert gemma4_compat.status().ok
    defined = names("docs/commands.md")
    assert defined["planned"].ok
    assert "device_map" in defined["planned"].code
    shim = names("docs/write-a-shim.md")["shim"]
    from packaging import utils

    assert utils.canonicalize_name("My Project") == "my-project"
    shim.retire()
    assert utils.canonicalize_name("My Project") == "my project"


# -- commands -------------------------------------------------------------------------------------


def commands():
    lines = [
        (page, line)
        for page in PAGES
        for block in blocks(page, "console")
        for line in block.splitlines()
    ]
    return [pytest.param(line.removeprefix("$ "), id=f"{page}: {line}") for page, line in lines]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folders and files that the commands name, as far as their arguments are checked."""
    folder = tmp_path_factory.mktemp("files")
    for model in ("gemma-4-E4B-it", "google/gemma-4-E4B-it"):
        (folder / model).mkdir(parents=True)
        (folder / model / "config.json").write_text('{"model_type": "gemma4"}')
    (folder / "my-lora").mkdir()
    (folder / "my-lora" / "adapter_config.json").write_text("{}")
    (folder / "my-lora" / "adapter_model.safetensors").touch()
    (folder / "my-map.json").write_text('{"": 0}')
    return folder


@pytest.mark.parametrize("line", commands())
def test_commands_are_valid(line, files, monkeypatch):
    """They parse; what they would do is tested elsewhere."""
    import argparse

    from gemma4_compat import cli
    from gemma4_compat.cli import run

    monkeypatch.chdir(files)
    program, *arguments = shlex.split(line)
    known = {"pip": ("install", "uninstall"), "git": ("clone",)}
    if program in known:
        assert arguments[0] in known[program]
        return
    if program == "python3":  # from a bare clone
        assert arguments[:2] == ["noxfile.py", "-s"]
        assert f"\ndef {arguments[2]}(" in text_of("noxfile.py")
        return
    assert program == "gemma4-compat"
    arguments, started = run.split_program(arguments)
    options = cli._parser().parse_args(arguments, argparse.Namespace(program=started))
    assert options.command == arguments[0]
    assert bool(started) == (options.command == "run")


def is_newest():
    """Whether the installed libraries are those of the printed output."""
    wanted = {"torch": versions.TORCH, **versions.NEWEST}
    try:
        return all(version(name).partition("+")[0] == each for name, each in wanted.items())
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not is_newest(), reason="the documents show the newest libraries")
@pytest.mark.skipif(sys.platform != "linux", reason="the documents show the output on Linux")
def test_what_the_commands_print():
    """All in one process of their own: a status depends on what else a process has done."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
    command = [sys.executable, ROOT / "tools" / "blocks.py", "--check", *pages]
    found = run_process(command, [str(ROOT)])
    assert found.returncode == 0, f"run: nox -s docs\n{found.stdout}{found.stderr}"


def test_output_replaces_what_a_block_shows(monkeypatch, tmp_path):
    """Only blocks whose command is known, and which no comment leaves alone, are written."""
    from tools import blocks

    monkeypatch.setattr(blocks, "output", lambda commands, folder: f"new {commands}")
    run, old = "```console\n$ a\n```\n", "```text\nold 1\n```\n"
    new = old.replace("old 1", "new $ a")
    assert blocks.page(f"{run}\n{old}", tmp_path) == f"{run}\n{new}"
    for mark, shown in (("run", new), ("not run", old)):
        between = f"\nMore.\n\n<!-- {mark}: why -->\n"
        assert blocks.page(run + between + old, tmp_path) == run + between + shown
    for unmarked in (old, f"{run}\nMore.\n\n{old}", f"{run}\n  ```text\n  old\n  ```\n"):
        with pytest.raises(SystemExit, match=r"line \d+: nothing says which commands"):
            blocks.page(unmarked, tmp_path)
    monkeypatch.setattr(blocks, "output", lambda commands, folder: "old 2\n")
    marked = f"{run}\n<!-- run: why -->\n{old}"
    assert blocks.page(marked, tmp_path, check=True) == marked
    assert blocks.page(f"{run}\n{old}", tmp_path, check=True) != f"{run}\n{old}"


@pytest.mark.parametrize(
    ("build", "note"),
    [
        (
            "+cpu",
            "torch 2.13.0+cpu is a CPU-only build and uses no GPU; for an NVIDIA GPU: pip\nx\n\n",
        ),
        ("+cu130", "torch 2.13.0+cu130 is built for CUDA 13.0 and sees no GPU: nvidia-smi\nx\n\n"),
        ("", ""),
    ],
)
def test_output_does_not_depend_on_the_build_of_torch(monkeypatch, tmp_path, build, note):
    from tools import blocks

    def status(arguments):
        print(f"torch         2.13.0{build}\npeft          0.21.2\n\n{note}hint in {tmp_path}/x")
        return len(arguments) - 1

    monkeypatch.setattr(blocks.cli, "main", status)
    due = "torch         2.13.0\npeft          0.21.2\n\nhint in .../x\n"
    assert blocks.output("$ gemma4-compat status\n", tmp_path) == due
    with pytest.raises(SystemExit, match="exit code 2"):
        blocks.output("$ gemma4-compat a b c\n", tmp_path)


# -- text -----------------------------------------------------------------------------------------


def test_every_page_is_checked():
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")}
    generated = {"docs/errors.md", "docs/libraries-tests.md", "docs/private-names.md"}
    assert pages == {*PAGES, *generated} - {"README.md"}
    languages = {
        language for page in PAGES for language in re.findall(r"^ *```(\w+)$", text_of(page), re.M)
    }
    assert languages == {"console", "diff", "python", "text", "toml"}
    assert len(text_of("README.md").splitlines()) <= 220


def test_the_speeds_of_the_recipes_are_those_of_the_benchmarks():
    """Both figures of each row are in one row of a table there."""
    measured = [
        set(re.findall(r"[\d.]+", line))
        for page in ("DECODING", "STREAMING")
        for line in text_of(f"benchmarks/{page}.md").splitlines()
        if line.startswith("|")
    ]
    table = text_of("docs/recipes.md").partition('| `"static"` |')[2].partition("\n\n")[0]
    rows = re.findall(r"^\| .+ \| ([\d.]+) \| ([\d.]+) \| \*\*([\d.]+)\*\* \|$", table, re.M)
    assert len(rows) == table.count("\n") - 1
    assert all(any({*row} <= figures for figures in measured) for row in rows)


@pytest.mark.parametrize("page", [*PAGES, "docs/errors.md"])
def test_links(page):
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    assert links
    for link in links:
        target, _, anchor = link.partition("#")
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file), link


def test_the_readme_finds_the_commonest_errors():
    """No error that is left out has more threads than one of the table."""
    part = text_of("README.md").partition("<!-- errors -->")[2].partition("<!-- /errors -->")[0]
    rows = re.findall(
        r"\(docs/patches/(\w+)\.md\) \| (\d+) \| (yes|no: fixed in .*) \|$", part, re.M
    )
    threads = {p.name: len({*p.links}) for p in load() if p.name not in LEGACY}
    counts = [threads.pop(name) for name, _, _ in rows]
    assert [int(count) for _, count, _ in rows] == counts
    assert len(rows) == 12
    assert min(counts) >= max(threads.values())
    newest = Measured.read(DATA)
    fixed = {name for name, _, needed in rows if needed != "yes"}
    assert fixed == {name for name, _, _ in rows if newest.on_newest(name) == "fixed"}


def test_how_much_faster_a_static_cache_is():
    """The README's plot and its claim are those of the measured table."""
    measured = text_of("benchmarks/DECODING.md")
    assert text_of("benchmarks/plot.svg") == drawing(measured), "run: python tools/plot.py"
    rounded = []
    for column in (2, 3):  # after an import alone, and with fast kernels
        ratios = [round(row[column] / row[1]) for row in figures(measured) if row[1]]
        rounded.append(" to ".join(map(str, sorted({min(ratios), max(ratios)}))))
    readme = " ".join(text_of("README.md").split())
    *_, (_, _, exact, fast) = figures(measured)
    claim = (
        r"decodes (\d+(?: to \d+)?) times .* alone, and (\d+(?: to \d+)?) times with `fast`. "
        r"After a long context, `fast` gains (\d+) times"
    )
    assert re.findall(claim, readme) == [(*rounded, str(round(fast / exact)))]


@pytest.mark.parametrize(("page", "table"), [(cards.PAGE, cards.page), (cards.README, cards.short)])
def test_the_tables_of_cards(page, table):
    text = page.read_text(encoding="utf-8")
    assert cards.with_table(text, table(cards.read(cards.DATA))) == text, "run: tools/cards.py"


def test_what_the_readme_says_of_26b():
    found = cards.read(cards.DATA)["26b", "12GB", "QLoRA"]
    figures = f"took {found['reserved GiB']:.1f} GiB and {found['s a step']:.1f} s a step"
    assert figures in " ".join(text_of("README.md").split())


def test_the_gpu_that_ran_the_tests():
    """The README names the card and the date of each run in tests/gpu.json, and of no other."""
    if not gpu.FILE.exists():
        pytest.skip("no run of the CUDA tests is recorded yet: nox -s gpu")
    named = re.findall(
        r"passed(?:, \d+ failed)? on an (.+?) with .+? \((\d{4}-\d\d-\d\d)\)", text_of("README.md")
    )
    assert named == [(each["card"], each["date"]) for each in gpu.read()]


def test_a_new_table_replaces_the_old_one():
    found = cards.with_table("a\n<!-- cards -->\nold\n<!-- /cards -->\nb\n", "new \\1")
    assert found == "a\n<!-- cards -->\nnew \\1\n<!-- /cards -->\nb\n"
