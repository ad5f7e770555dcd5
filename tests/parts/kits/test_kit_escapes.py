"""Tests that any value in a kit is exactly one literal of its language, or text in Markdown."""

from __future__ import annotations

import json
import re

import pytest
from markdown_it import MarkdownIt
from test_code_templates import HOSTILE

from attn_export.parts.kits.kit_escapes import (
    c_string,
    identifier,
    markdown,
    markdown_code,
    number,
    to_json,
)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_is_one_literal_of_each_language(text: str):
    assert json.loads(to_json(text)) == text
    literal = c_string(text)
    assert re.fullmatch(r'"(?:[ !#->@-\[\]-~]|\\[0-7]{3})*"', literal)
    decoded = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), literal[1:-1])
    assert decoded.encode("latin-1") == text.encode("utf-8", "replace")
    for written in (to_json(text), literal, identifier(text)):
        assert written.isascii()
        assert len(written.splitlines()) == (written != "")


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("where", ["# {} in C", "It is {}, so.", "| a |\n|---|\n| {} |"])
def test_a_text_is_nothing_but_text_in_markdown(text: str, where: str):
    html = MarkdownIt("commonmark").enable("table").render
    for write, plain in ((markdown, "plain"), (markdown_code, "`plain`")):
        # A plain word leaves the same of the page as the text.
        wanted = re.sub(r"<code>|</code>", "", html(where.format(plain))).split("plain")
        found = re.sub(r"</?code>", "", html(where.format(write(text))))
        assert found.startswith(wanted[0].rstrip())
        assert found.endswith(wanted[1].lstrip())
        middle = found.removeprefix(wanted[0].rstrip()).removesuffix(wanted[1].lstrip())
        assert "<" not in middle.replace("&lt;", "")
        assert all(c.isprintable() or c == "\n" for c in found)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_without_a_literal_is_refused(value: float):
    with pytest.raises(ValueError, match="is not a finite number"):
        number(value)
