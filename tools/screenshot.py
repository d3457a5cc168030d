"""Pictures of what a notebook shows of this package's results, light and dark.

    python tools/screenshot.py [FOLDER]

Writes ``notebook-light.png`` and ``notebook-dark.png`` into the folder (``docs/img``).  Needs
nbconvert, Chromium and pngquant.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import gemma4_compat  # noqa: E402
from gemma4_compat.inspection import check_device_map  # noqa: E402
from tests import shapes  # noqa: E402

BROWSER = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def cells() -> Iterator[tuple[str, Any]]:
    """The code of a cell, and its result; writes into the current folder."""
    shapes.write_config(Path("gemma-4-E4B-it"), shapes.E4B_TEXT, shapes.VISION, shapes.AUDIO)
    yield "gemma4_compat.status()", gemma4_compat.status()
    yield 'gemma4_compat.plan("gemma-4-E4B-it", "8GB")', gemma4_compat.plan("gemma-4-E4B-it", "8GB")
    places = {"model.multi_modal_projector": "cpu", "": 0}
    code = f"check_device_map('gemma-4-E4B-it', {places})".replace("'", '"')
    yield code, check_device_map("gemma-4-E4B-it", places)


def page(results: list[tuple[str, Any]], theme: str) -> str:
    """The notebook as JupyterLab shows it; its title is its height."""
    from nbconvert import HTMLExporter
    from nbformat import v4

    notebook = v4.new_notebook()
    for number, (code, result) in enumerate(results, 1):
        data = {"text/html": result._repr_html_()}
        output = v4.new_output("execute_result", data, execution_count=number)
        notebook.cells.append(v4.new_code_cell(code, outputs=[output], execution_count=number))
    shown, _ = HTMLExporter(theme=theme, embed_images=True).from_notebook_node(notebook)
    shown = re.sub(r"<script[^>]* src=.*?</script>", "", shown)  # fetch nothing
    height = "<script>document.title = document.querySelector('main').offsetHeight</script>"
    return str(shown.replace("</body>", f"{height}</body>"))


def browse(*options: str) -> str:
    command = [*BROWSER, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(argv: list[str]) -> None:
    target = Path(argv[0] if argv else ROOT / "docs" / "img").resolve()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        results = list(cells())
        for theme in ("light", "dark"):
            source, picture = Path(f"{theme}.html").resolve(), target / f"notebook-{theme}.png"
            source.write_text(page(results, theme), encoding="utf-8")
            dom = browse("--window-size=820,200", "--dump-dom", source.as_uri())
            height = int(re.findall(r"<title>(\d+)", dom)[0]) + 16
            browse(f"--window-size=820,{height}", f"--screenshot={picture}", source.as_uri())
            subprocess.run(["pngquant", "-f", "-o", picture, "64", picture], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
