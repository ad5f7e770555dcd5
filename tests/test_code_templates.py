"""Tests that any value in a generated program or document is exactly one literal."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from attn_export.code_templates import (
    c_string,
    identifier,
    markdown,
    markdown_code,
    number,
    python,
    python_comment,
    render,
    to_json,
)
from attn_export.explain.reproduce import TEMPLATE

HOSTILE = [
    "plain", "", " ", "a'b", 'my "best" layer', '"""', "'''", "\\", "a\\", "\\n", "line\nbreak",
    "\r", "\u2028", "*/ int x; /*", "// x", "??/", "{{7*7}}", "{% raw %}",
    "<script>alert(1)</script>",
    "</code>", "$(touch x)", "`touch x`", "```", "~~~", "größe", "漢字", "😀", "..", "../../x",
    "n" * 5000, "\x1b[31mred", "\x00", "\x7f", "\u202e", "\ud800", "coding: utf_7", "+AGEA-", "|",
    "# head", "- item", "1. item", "[a](http://x)", "&amp;", "*a* _b_ **c**", "%s%n", "]]>",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_is_one_literal_of_each_language(text: str):
    assert ast.literal_eval(python(text)) == text
    assert json.loads(to_json(text)) == text
    literal = c_string(text)
    assert re.fullmatch(r'"(?:[ !#->@-\[\]-~]|\\[0-7]{3})*"', literal)
    decoded = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), literal[1:-1])
    assert decoded.encode("latin-1") == text.encode("utf-8", "replace")
    for written in (python(text), to_json(text), literal, python_comment(text), identifier(text)):
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


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -1.5,
        1e-30,
        [1, "a"],
        (1.0, 2.0),
        (),
        {"a": (1, 2)},
        {'"': ["\\"]},
        [],
        ("a, )",),
    ],
)
def test_a_value_of_python_is_read_as_it_was(value: object):
    assert ast.literal_eval(python(value)) == value


def test_a_value_without_a_literal_is_refused():
    assert python(float("inf")) == 'float("inf")'
    for value in (object(), {1, 2}, b"bytes", Path("x")):
        with pytest.raises(ValueError, match="has no literal in Python"):
            python(value)
    for value in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="is not a finite number"):
            number(value)


@pytest.mark.parametrize(
    "written", ["{{ name }}", "{{ name | upper }}", '{{ "a" ~ name }}', "{{ x }}"]
)
def test_a_template_that_writes_a_value_without_an_escape_is_an_error(written: str, tmp_path: Path):
    template = tmp_path / "program.c.j2"
    template.write_text(f"int a; {written}\n")
    with pytest.raises(TypeError, match=r"program\.c\.j2 writes .* without an escape"):
        render(template, {"name": "a", "x": 1.5})
    template.write_text("{{ name | c_string }} {{ count }}\n")
    assert render(template, {"name": "a", "count": 2}) == '"a" 2\n'


def shape_of(source: str) -> str:
    """Return a program without the values of its literals."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.value = ...
    return ast.dump(tree)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "onnx", "c"])
@pytest.mark.parametrize("text", HOSTILE)
def test_no_name_changes_what_the_script_of_an_explanation_does(text: str, engine: str):
    def script(name: str, level: str) -> str:
        return render(TEMPLATE, {
            "sentence": name, "engine": engine, "allowed": {name: (1e-6, float("inf"))},
            "threads": 1, "options": {"graph_optimization_level": level, name + "1": name},
            "providers": ["CPUExecutionProvider"], "graph": name, "outputs": {name: "float32"},
        })  # fmt: skip

    found = script(text, text)
    assert shape_of(found) == shape_of(script("plain", "plain"))
    assert found.encode("ascii")  # no other encoding can give it another meaning
    assert f"HERE / {text!a}" in found
