"""What a notebook shows of each result."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest

import gemma4_compat
from gemma4_compat import PatchStatus, State, Status, html, text
from gemma4_compat.cli.status import Overview
from gemma4_compat.inspection import check_device_map, inspect_adapter, scan_targets
from gemma4_compat.inspection.report import build_report
from gemma4_compat.merge import MergeResult, Parity
from gemma4_compat.plan import plan

#: a folder's name that must not become a part of the page
NAME = "<script>&amp;x"
GREEN, RED = "#2da44e", "#e5534b"


class Page(HTMLParser):
    """Balanced HTML: the cells of its tables by row, the words in colour, and all its text."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.tables, self.text, self.colours = [], set(), [], "", {}
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open.append((tag, dict(attributes)))
        self.tags.add(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
        if not self.open:
            return
        tag, attributes = self.open[-1]
        if tag in ("td", "th"):
            self.tables[-1][-1][-1] += data
        for colour in (GREEN, RED):
            if colour in attributes.get("style", ""):
                self.colours[colour] = data


def shown(result):
    """The page of a result, which contains no element from a file's name."""
    page = Page(result._repr_html_())
    assert "script" not in page.tags
    return page


def printed_cells(result, monkeypatch):
    """The cells of the tables on a wide terminal, where nothing is wrapped or shortened."""
    monkeypatch.setenv("COLUMNS", "1000")
    with text.recorded_tables() as tables:
        printed = str(result)
    assert all(table.printed in printed for table in tables)
    rows = [
        [[*map(str, row)] for row in (([table.head] if table.head else []) + list(table.rows))]
        for table in tables
    ]
    for table, cells in zip(tables, rows, strict=True):
        lines = table.printed.splitlines()
        assert len(lines) == len(cells)
        for line, row in zip(lines, cells, strict=True):
            assert line.split() == " ".join(row).split()
    return rows


def merged(ok):
    parity = Parity("<script>", 24, 0.7, 0.03 if ok else 0.3, 0.07, 2, 2)
    return MergeResult("base", "lora", Path(NAME), (parity,), ())


def an_overview(state):
    patch = PatchStatus("a_patch", state, "<script>", "a symptom", {}, ())
    return Overview(Status([patch]), {"torch": "2.13.0"}, (), every=True)


@pytest.fixture(scope="module")
def results(e2b_dir, model_dir, adapter_dir, tmp_path_factory):
    """A result of each kind, and whether all is well."""
    parent = tmp_path_factory.mktemp("notebook")
    folder = shutil.copytree(e2b_dir, parent / NAME)
    adapter = shutil.copytree(adapter_dir, parent / f"{NAME}-lora")
    device_map = {"model.vision_tower": "cpu", "": 0}
    return {
        "plan": (plan(folder, "8GiB"), True),
        "plan that does not fit": (plan(folder, "1GiB"), False),
        "map": (check_device_map(folder, device_map), True),
        "map with an unknown key": (check_device_map(folder, {"": 0, "<script>": "cpu"}), False),
        "scan": (scan_targets(folder, ["q_proj"]), True),
        "scan without a match": (scan_targets(folder, ["<script>"]), False),
        "adapter": (inspect_adapter(adapter, model_dir), True),
        "adapter for another model": (inspect_adapter(adapter, folder), False),
        "merge": (merged(True), True),
        "merge that disagrees": (merged(False), False),
        "status": (an_overview(State.APPLIED), True),
        "status of a failure": (an_overview(State.FAILED), False),
    }


def test_results(results, monkeypatch):
    for kind, (result, ok) in results.items():
        assert result.ok is ok, kind
        page = shown(result)
        html = result._repr_html_()  # JupyterLab's own font for <pre> is not monospaced
        assert html.count("<pre") == html.count("monospace"), kind
        assert page.colours == {GREEN if ok else RED: result.verdict}, kind
        assert page.tables == printed_cells(result, monkeypatch), kind
        monkeypatch.setenv("COLUMNS", "80")
        assert page.tables or "without a match" in kind
        code = getattr(result, "code", None)
        assert code is None or not ok or code in page.text
        assert "<!" not in page.text


def test_numbers_are_aligned_to_the_right(results):
    first = results["plan"][0]._repr_html_().partition("</table>")[0]
    heads = re.findall(r'<th style="text-align: (\w+);', first)
    assert heads == ["left", "right", "right"]
    assert first.count("text-align: right") == 2 * first.count("<tr>")


def test_a_table_above_may_have_the_words_of_the_verdict():
    table = text.Table("fine  1", [("fine", 1)], (), (1,))
    page = Page(html.page("a title\n\nfine  1\n\nfine", [table], "", "fine", True))
    assert page.tables == [[["fine", "1"]]]
    assert page.colours == {GREEN: "fine"}
    assert page.text.split() == ["a", "title", "fine1", "fine"]  # cells have no space between


def test_a_report_is_markdown_to_copy(e2b_dir):
    page = shown(report := build_report(e2b_dir))
    assert page.tags == {"pre"}
    assert page.text.split() == str(report).split()


def test_repr_is_one_line(results):
    for kind, (result, _) in results.items():
        assert repr(result) == f"<{type(result).__name__}: {result.verdict}>", kind
        assert "\n" not in repr(result)


def test_status_folds_the_patches():
    status = gemma4_compat.status()
    html = status._repr_html_()
    page = shown(status)
    (verdict,) = page.colours.values()
    assert verdict.startswith("all well: ")
    assert sum(int(count.split()[0]) for count in verdict[10:].split(", ")) == len(status)
    assert f"transformers {version('transformers')}" in page.text
    assert html.index("<table") > html.index("<details>")
    (rows,) = page.tables
    assert rows == [[each.name, each.state.value, each.reason] for each in status]


def test_the_verdict_of_status_is_in_plain_words():
    states = {State.UNAFFECTED: 2, State.FIXED: 1, State.ARMED: 1}
    entries = [
        PatchStatus(f"{state.name}{number}", state, "", "", {}, ())
        for state, count in states.items()
        for number in range(count)
    ]
    expected = "all well: 3 not needed here, 1 waiting for an import"
    assert shown(Status(entries)).colours == {GREEN: expected}
    with pytest.raises(KeyError, match=r"no patch is named 'ARMED' \(did you mean ARMED0"):
        Status(entries)["ARMED"]


def test_status_shows_failures_unfolded():
    good = PatchStatus("good", State.APPLIED, "", "", {}, ())
    bad = PatchStatus("bad", State.FAILED, "<script>", "", {}, ())
    page = shown(Status([good, bad]))
    assert page.colours == {RED: "NOT well: 1 applied, 1 failed"}
    assert page.tables[0] == [["bad", "failed", "<script>"]]
    assert len(page.tables[1]) == 2
