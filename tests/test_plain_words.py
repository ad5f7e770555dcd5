"""Words of comments, texts, names and pages: none of those that were used as metaphors.

`test_plain_english.py` checks how docstrings open. Here whole files are searched, of all languages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PLACES = (
    "attn_export", "tests", "scripts", "docs", "action", "models", ".ci", ".github", "README.md",
    "CHANGELOG.md", "mkdocs.yml", "pyproject.toml",
)  # fmt: skip
SUFFIXES = {
    "", ".c", ".cpp", ".css", ".h", ".hpp", ".html", ".j2", ".js", ".md", ".mjs", ".py", ".toml",
    ".txt", ".yml",
}  # fmt: skip

BANNED = (
    "asked", "blame", "blamed", "house", "mend", "mended", "mending", "mends", "nobody", "noun",
    "nouns", "room", "rooms", "told", "voice", "voices", "whoever",
)  # fmt: skip
"""Words that were used as metaphors, or in riddles: `test_plain_english.py` has a part of them."""

WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(BANNED)})(?![a-z])")
"""Matches a banned word, also within a name in snake case."""

QUESTION = re.compile(
    r"^[ \t]*(?:#|//|/\*+|\*)[ \t]+(?:What|Which|Whether|Why|How|Where|Who|Whoever)\b.*", re.M
)
"""Matches a line of a comment that opens with a question word."""

TEST_NAME = re.compile(r"def (test_(?:what|which|whether|why|how|where|when|who)_\w+)")

ALLOWED = {
    "CHANGELOG.md": {"mended", "noun"},  # a key of a file, and the grammar of docstrings
    "tests/test_plain_english.py": set(BANNED),
    "tests/test_plain_words.py": set(BANNED),
}
"""Banned words that a file may have."""


def files() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every file that people write."""
    for place in PLACES:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in SUFFIXES and file.is_file() and "__pycache__" not in file.parts:
                yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8", errors="ignore")


def places_of(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every match."""
    for match in pattern.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[match.re.groups]


def banned_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line of every banned word, and the word in lower case."""
    lower = text.lower()
    # Most files have none of the words: this search is ten times as fast as the pattern.
    if any(word in lower for word in BANNED):
        yield from places_of(WORD, lower)


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Return the text of every file, by its path."""
    found = dict(files())
    suffixes = {Path(name).suffix for name in found}
    assert {".c", ".cpp", ".h", ".mjs", ".py", ".md", ".j2", ".css"} <= suffixes
    return found


def test_no_file_has_a_banned_word(texts: dict[str, str]):
    wrong = [
        f"{name}:{line}: {word}"
        for name, text in texts.items()
        for line, word in banned_words(text)
        if word not in ALLOWED.get(name, set())
    ]
    assert not wrong, "\n".join(wrong)


def test_no_comment_opens_with_a_question_word(texts: dict[str, str]):
    wrong = [
        f"{name}:{line}: {comment.strip()}"
        for name, text in texts.items()
        if not name.endswith(".md")  # headings open alike
        for line, comment in places_of(QUESTION, text)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_name_of_a_test_opens_with_a_question_word(texts: dict[str, str]):
    wrong = [
        f"{name}:{line}: {test}"
        for name, text in texts.items()
        for line, test in places_of(TEST_NAME, text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (WORD, "x = 1\n# No room.", [(2, "room")]),
        (WORD, "size_t room_left;", [(1, "room")]),
        (WORD, 'fail("nobody asked for it")', [(1, "nobody"), (1, "asked")]),
        (WORD, "mushroom roommate recommended warehouse", []),
        (QUESTION, "x = 1\n  // What it is.", [(2, "  // What it is.")]),
        (QUESTION, "/** Whether it is. */", [(1, "/** Whether it is. */")]),
        (QUESTION, "x = 1  # What it is.\n# It is what it is.", []),
        (TEST_NAME, "def " + "test_what_is(): ...", [(1, "test_what_is")]),
        (TEST_NAME, "def " + "test_whatever_is(): ...", []),
    ],
)
def test_the_search_finds_words(pattern: re.Pattern[str], text: str, found: list[tuple[int, str]]):
    assert list(places_of(pattern, text)) == found
