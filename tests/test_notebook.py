"""What a notebook shows of each result."""

from __future__ import annotations

import shutil
from html.parser import HTMLParser
from pathlib import Path

from gemma4_compat import PatchStatus, State, Status, inspect_adapter, inspect_model, plan
from gemma4_compat.inspection import check_device_map, scan_targets
from gemma4_compat.inspection.report import build_report
from gemma4_compat.merging.result import MergeResult, Parity

#: a folder's name that must not become a part of the page
NAME = "<script>&amp;x"


class Page(HTMLParser):
    """Balanced HTML: its text, the cells of its tables by row, the code, and its first element."""

    def __init__(self, result):
        super().__init__()
        self.open, self.texts, self.tables, self.first = [], [], [], None
        self.feed(result._repr_html_())
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag in ("p", "b", "pre", "table", "tr", "td", "th")  # none from a file's name
        self.open.append((tag, dict(attributes).get("style", "")))
        if tag in ("table", "tr"):
            (self.tables if tag == "table" else self.tables[-1]).append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.texts += [data]
        if self.open and self.open[-1][0] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        self.first = self.first or (data, self.open[-1][1])


def results(e2b_dir, model_dir, adapter_dir, parent):
    """A result of each kind, whether all is well, and the number of its tables."""
    from transformers import Gemma4ForConditionalGeneration

    folder = shutil.copytree(e2b_dir, parent / NAME)
    adapter = shutil.copytree(adapter_dir, parent / f"{NAME}-lora")
    good, bad = (Parity("<script>", 24, 0.7, share, 0.07, 2, 2) for share in (0.03, 0.3))
    patch = PatchStatus("a_patch", State.FAILED, "<script>", "a symptom", {}, ())
    libraries, problem = {"torch": "2.13.0", "peft": None}, "peft is older than <9999, " * 5
    yield plan(folder, "8GiB"), True, 2
    yield plan(folder, "1GiB"), False, 1
    yield check_device_map(folder, {"model.vision_tower": "cpu", "": 0}), True, 1
    yield check_device_map(folder, {"": 0, "<script>": "cpu"}), False, 1
    yield scan_targets(folder, ["q_proj"]), True, 1
    yield scan_targets(folder, ["<script>"]), False, 0
    yield inspect_adapter(adapter), True, 1  # without a verdict
    yield inspect_adapter(adapter, model_dir), True, 2
    yield inspect_adapter(adapter, folder), False, 2
    yield MergeResult("base", "lora", parent / NAME, (good,), ("<script>",)), True, 1
    yield MergeResult("base", "lora", Path(NAME), (good, bad), ()), False, 1
    yield Status([], libraries), True, 1
    yield Status([patch], libraries, advice=("pip install <script>",)), False, 2
    yield Status([patch], libraries, (problem,)), False, 2
    model = Gemma4ForConditionalGeneration.from_pretrained(model_dir)
    yield inspect_model(model), True, 1
    yield build_report(e2b_dir), True, 0  # it is Markdown to copy


def test_results(e2b_dir, model_dir, adapter_dir, tmp_path):
    colors = {True: set(), False: set()}
    for result, ok, tables in results(e2b_dir, model_dir, adapter_dir, tmp_path):
        page = Page(result)
        assert (result.ok, len(page.tables)) == (ok, tables)
        words = sorted(" ".join(page.texts).split())  # the verdict has another place
        assert words == sorted(str(result).split())
        if result.verdict:
            assert page.first[0] == result.verdict
            colors[ok].add(page.first[1])
        assert all(cell in str(result) for [row, *_] in page.tables for cell in row)
        code = getattr(result, "code", "")
        assert not ok or not code or code in page.texts
    assert [len(each) for each in colors.values()] == [1, 1]
    assert colors[True] != colors[False]
