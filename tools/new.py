"""Begins a patch: copies the templates of a patch and of its test under a new name.

    python tools/new.py NAME [TOPIC]

NAME is the name of the bug, a lower_snake_case slug.  TOPIC is a folder of
``gemma4_compat/patches/``.  The script needs no libraries.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PATCHES = Path("gemma4_compat", "patches")
_TESTS = Path("tests", "patches")
_PLACEHOLDER = "patch_name"


def begin(name: str, topic: str, source: Path = ROOT, target: Path = ROOT) -> list[Path]:
    """Write the patch and its test, and return their paths.

    Raises:
        ValueError: the name is not a slug or is taken, or no topic has that name.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ValueError(f"{name!r} is not a lower_snake_case name")
    topics = sorted(folder.parent.name for folder in (source / _PATCHES).glob("*/__init__.py"))
    topics.remove("legacy")
    if topic not in topics:
        raise ValueError(f"no topic is named {topic!r}; the topics are {', '.join(topics)}")
    if taken := [*(target / _PATCHES).glob(f"*/{name}.py")]:
        raise ValueError(f"a patch has that name already: {taken[0]}")
    files = {
        _PATCHES / "offloading" / "_template.py": target / _PATCHES / topic / f"{name}.py",
        _TESTS / "_template.py": target / _TESTS / f"test_{name}.py",
    }
    for template, file in files.items():
        text = (source / template).read_text(encoding="utf-8")
        text = re.sub(r"\A(#.*\n)+", "", text)  # the lines about the template itself
        file.write_text(text.replace(_PLACEHOLDER, name), encoding="utf-8", newline="\n")
    return list(files.values())


def main(arguments: list[str]) -> None:
    if len(arguments) not in (1, 2):
        sys.exit("usage: nox -s new -- NAME [TOPIC]")
    name, topic = (*arguments, "offloading")[:2]
    try:
        files = begin(name, topic)
    except ValueError as error:
        sys.exit(str(error))
    for file in files:
        print("wrote", file.relative_to(ROOT).as_posix())
    print(f"""next: nox -s "tests(stack='newest')" -- {files[1].relative_to(ROOT).as_posix()}""")


if __name__ == "__main__":
    main(sys.argv[1:])
