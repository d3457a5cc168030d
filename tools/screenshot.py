"""Pictures of what a notebook shows of this package's results, light and dark.

    python tools/screenshot.py [FOLDER]

Puts the HTML of ``status()``, ``plan()``, ``check_device_map()`` and ``inspect_model()`` into a
notebook, exports it with JupyterLab's own style sheets, and photographs it with a browser that
opens no window.  Writes ``notebook-light.png`` and ``notebook-dark.png`` into the folder
(``docs/img``).  Needs nbconvert, and Chromium or Chrome; pngquant makes the files smaller.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gemma4_compat
from gemma4_compat import tiny
from gemma4_compat.inspection import check_device_map, inspect_model
from gemma4_compat.plan import plan

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH = 820
THEMES = ("light", "dark")


def browser() -> str:
    """The path of a browser, or an exit with what to install."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    sys.exit("no browser: install Chromium or Chrome (on Debian: apt-get install chromium)")


def cells(folder: Path) -> Iterator[tuple[str, Any]]:
    """The code of a cell, and its result."""
    from peft import PeftModel
    from transformers import Gemma4ForConditionalGeneration

    from tests import shapes

    os.chdir(folder)
    name = "gemma-4-E4B-it"
    shapes.write_config(Path(name), shapes.E4B_TEXT, shapes.VISION, shapes.AUDIO)
    checkpoint = tiny.build_checkpoint(Path("tiny"))
    base = Gemma4ForConditionalGeneration.from_pretrained(checkpoint)
    model = PeftModel.from_pretrained(base, tiny.build_adapter(Path("lora"), checkpoint))
    yield "gemma4_compat.status()", gemma4_compat.status()
    yield 'plan("gemma-4-E4B-it", "12GB")', plan(name, "12GB")
    code = (
        'device_map = {"model.multi_modal_projector": "cpu", "": 0}\n'
        'check_device_map("gemma-4-E4B-it", device_map)'
    )
    yield code, check_device_map(name, {"model.multi_modal_projector": "cpu", "": 0})
    yield "inspect_model(model)", inspect_model(model)


def page(results: list[tuple[str, Any]], theme: str) -> str:
    """The notebook as JupyterLab shows it."""
    import nbconvert
    from nbformat import v4

    notebook = v4.new_notebook()
    for number, (code, result) in enumerate(results, 1):
        output = v4.new_output(
            "execute_result", {"text/html": result._repr_html_()}, execution_count=number
        )
        cell = v4.new_code_cell(code, outputs=[output], execution_count=number)
        notebook.cells.append(cell)
    shown, _ = nbconvert.HTMLExporter(theme=theme, embed_images=True).from_notebook_node(notebook)
    shown = re.sub(r"<script[^>]* src=.*?</script>", "", shown)  # nothing is fetched
    height = "<script>document.title = document.querySelector('main').offsetHeight</script>"
    return shown.replace("</body>", f"{height}</body>")


def picture(source: Path, target: Path) -> None:
    """Write a picture of the whole page."""
    options = [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options.append("--disable-lcd-text")  # grey letters: a smaller file
    dom = _output([*options, f"--window-size={WIDTH},200", "--dump-dom", source.as_uri()])
    height = re.search(r"<title>(\d+)</title>", dom)
    assert height, dom
    size = f"--window-size={WIDTH},{int(height[1]) + 16}"
    _output([*options, size, f"--screenshot={target}", source.as_uri()])
    if shutil.which("pngquant"):  # fewer colours: half the size
        _output(["pngquant", "--force", "--output", str(target), "64", str(target)])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout


def main(argv: list[str]) -> None:
    target = Path(argv[0]) if argv else ROOT / "docs" / "img"
    target.mkdir(parents=True, exist_ok=True)
    browser()
    if find_spec("nbconvert") is None:
        sys.exit("nbconvert is not installed: pip install nbconvert")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = list(cells(folder))
        for theme in THEMES:
            source = folder / f"{theme}.html"
            source.write_text(page(results, theme), encoding="utf-8")
            picture(source, (target / f"notebook-{theme}.png").resolve())


if __name__ == "__main__":
    main(sys.argv[1:])
