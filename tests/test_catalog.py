"""The generated documentation is up to date with the patches."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers

from gemma4_compat.model.meta import bnb_config
from gemma4_compat.patches import load
from tools.catalog import (
    _NO_BUGS,
    not_patched,
    pages,
    render,
    render_errors,
    titles,
    with_errors,
    with_releases,
)
from tools.measured import DATA, Measured

ROOT = Path(__file__).parent.parent


MEASURED = Measured.read(DATA)


def test_the_readme_counts_the_patches():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    kinds = Counter(patch.kind.value for patch in load())
    assert f"| {kinds.total()} patches, by [kind]" in readme
    assert re.findall(r"`(\w+)`: [^|]+ \| (\d+) \|", readme) == [
        (kind, str(kinds[kind])) for kind in ("fix", "warning", "memory", "exact", "fast")
    ]


@pytest.mark.parametrize("file", ["patches.md", "docs/errors.md", "README.md"])
def test_documentation_is_up_to_date(file):
    pytest.importorskip("tomllib")
    stored = (ROOT / file).read_text(encoding="utf-8")
    due = {
        "patches.md": render(load(), MEASURED),
        "docs/errors.md": render_errors(),
        "README.md": with_errors(with_releases(stored, MEASURED), MEASURED),
    }
    assert stored == due[file], "run: nox -s docs"


def test_pages_of_patches_are_up_to_date():
    folder = ROOT / "docs" / "patches"
    stored = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    assert stored == pages(MEASURED), "run: nox -s docs"


def test_the_index_has_each_patch_once():
    """Where links that were printed earlier lead, with the name as the anchor."""
    text = (ROOT / "patches.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r'<a id="(\w+)"></a>', text)) == sorted(p.name for p in load())
    assert len(text.splitlines()) <= 450


def test_the_page_of_errors_lists_every_patch_once_under_its_topic():
    listed = {}
    for line in (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            names = listed.setdefault(line[3:], [])
        elif row := re.match(r"\|.*\| \[`(\w+)`\]\(patches/\1\.md\) \|$", line):
            names.append(row[1])
    assert listed.pop("Errors that are no bugs") == []
    assert listed == titles()


SPLIT = {"model.vision_tower": "disk", "": "cpu"}


@pytest.mark.parametrize("quant", ["nf4", "int8"])
@pytest.mark.parametrize(
    ("mistake", "cure"),
    [
        ({"device_map": SPLIT}, {"device_map": SPLIT, "offload": True}),
        pytest.param(
            {"device_map": {"": 0}}, {"device_map": {"": "cpu"}},
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU 0"),
        ),
    ],
)  # fmt: skip
def test_errors_that_are_no_bugs(quant, mistake, cure, model_dir, tmp_path):
    """The page has one row with the text of the error, and what it says loads the model."""
    pytest.importorskip("bitsandbytes")

    def load(device_map, **options):
        return transformers.Gemma4ForConditionalGeneration.from_pretrained(
            model_dir, dtype="bfloat16", device_map=device_map, offload_folder=tmp_path,
            quantization_config=bnb_config(quant, **options),
        )  # fmt: skip

    with pytest.raises((ValueError, RuntimeError)) as raised:
        load(**mistake)
    found = [
        cure
        for errors, cure in _NO_BUGS.items()
        if any(error in str(raised.value) for error in errors.split(", or "))
    ]
    assert len(found) == 1
    assert "`llm_int8_enable_fp32_cpu_offload" in found[0]
    layer = load(**cure).model.language_model.layers[0].mlp.up_proj
    unquantized = cure["device_map"] == SPLIT  # no module is on a GPU
    assert (type(layer).__name__ == "Linear") == unquantized


def test_not_patched():
    """Each entry says what, why and where upstream, in one line of a table."""
    pytest.importorskip("tomllib")
    entries = not_patched()
    assert entries
    for entry in entries:
        assert list(entry) == ["what", "why", "link"]
        assert all(text.strip() and "\n" not in text and "|" not in text for text in entry.values())
        assert entry["link"] == "none known" or re.fullmatch(r"https://\S+", entry["link"])
    assert len({entry["what"] for entry in entries}) == len(entries)


def test_names_of_patches_are_unique():
    names = [patch.name for patch in load()]
    assert len(names) == len(set(names))
