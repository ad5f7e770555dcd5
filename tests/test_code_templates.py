"""Tests that any value in a generated program or document is exactly one literal."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from attn_export.code_templates import python, python_comment, render
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
def test_a_text_is_one_literal_of_python(text: str):
    assert ast.literal_eval(python(text)) == text
    for written in (python(text), python_comment(text)):
        assert written.isascii()
        assert len(written.splitlines()) == (written != "")


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


@pytest.mark.parametrize(
    "written", ["{{ name }}", "{{ name | upper }}", '{{ "a" ~ name }}', "{{ x }}"]
)
def test_a_template_that_writes_a_value_without_an_escape_is_an_error(written: str, tmp_path: Path):
    template = tmp_path / "program.c.j2"
    template.write_text(f"int a; {written}\n")
    with pytest.raises(TypeError, match=r"program\.c\.j2 writes .* without an escape"):
        render(template, {"name": "a", "x": 1.5})
    template.write_text("{{ name | python }} {{ count }}\n")
    assert render(template, {"name": "a", "count": 2}) == "'a' 2\n"


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
            "sentence": name, "engine": engine, "tolerance": {name: (1e-6, float("inf"))},
            "threads": 1, "options": {"graph_optimization_level": level, name + "1": name},
            "providers": ["CPUExecutionProvider"], "graph": name, "outputs": {name: "float32"},
        })  # fmt: skip

    found = script(text, text)
    assert shape_of(found) == shape_of(script("plain", "plain"))
    assert found.encode("ascii")  # no other encoding can give it another meaning
    assert f"HERE / {text!a}" in found
