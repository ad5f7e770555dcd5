"""The code in the READMEs of kits."""

from __future__ import annotations

import re
from pathlib import Path

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kit: Path, language: str) -> list[str]:
    """Return the blocks of code in a language; the page must be well-formed Markdown."""
    text = (kit / "README.md").read_text()
    found = BLOCK.findall(text)
    assert all(name for name, _ in found), "each block names its language"
    prose = BLOCK.sub("", text)
    headings = re.findall(r"^#+ .+$", prose, re.MULTILINE)
    assert all(f"\n\n{heading}\n\n" in f"\n\n{prose}" for heading in headings), headings
    return [code for name, code in found if name == language]


def commands(kit: Path) -> list[str]:
    """Return the commands of the first block for a shell, without their comments."""
    return [line.partition("#")[0].strip() for line in blocks(kit, "sh")[0].splitlines()]


def shapes(kit: Path) -> set[tuple[str, tuple[str, ...]]]:
    """Return each name with each shape that the page gives it, in a table, a comment or a text."""
    text = (kit / "README.md").read_text()
    rows = re.findall(r"^\| \w+ \| `(\w+)` \| \w+ \| `([\w, ]+)` \|$", text, re.MULTILINE)
    comments = re.findall(r"^ +\"?(\w+)\"?: .*(?://|#) \[(.*)\]$", text, re.MULTILINE)
    said = re.findall(r"`(\w+)` of `([\w, ]+)`", text)
    return {
        (name, tuple(axes.replace('"', "").split(", "))) for name, axes in (*rows, *comments, *said)
    }


def states_the_meaning_of_true(kit: Path) -> bool:
    text = (kit / "README.md").read_text()
    return "means that the query may attend to the key" in text and "has the inverse" in text
