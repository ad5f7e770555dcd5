"""Errors of values that do not fit a schema: they name the field and its value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from shared import bundle_of

from attn_export.schema import CaseEntry, EndName, GoldenIndex, Manifest
from attn_export.untrusted_files import checked

SAYS: list[tuple[list[str | int], Any, str]] = [
    (["graphs", "model.onnx", "dialect"], 3, "`$.graphs['model.onnx'].dialect`, which is 3"),
    (["graphs", "model.onnx", "needs", "onnxruntime"], 5, ".needs.onnxruntime`, which is 5"),
    (["graphs", "model.onnx", "needs", "onnxruntime"], "1.x", ".onnxruntime`, which is '1.x'"),
    (["graphs", "model.onnx", "needs", "more"], 1, "Object contains unknown field `more`"),
    (["files", "../x"], "a" * 64, "such characters - at `$.files`, which is '../x'"),
    (["files", "x"], "a", "such characters - at `$.files['x']`, which is 'a'"),
    (["inputs", "past_key", "shape"], [1, 2, -3], "`$.inputs['past_key'].shape[2]`, which is -3"),
    (["inputs", "past_key", "shape"], [1] * 9, "`$.inputs['past_key'].shape`, which is an array"),
    (["inputs", "past_key", "shape"], {}, "`$.inputs['past_key'].shape`, which is an object of 0"),
    (["inputs", "past_key", "shape"], 10**400, "`$.inputs['past_key'].shape`, which is 1000"),
    (["inputs", "past_key", "dtype"], "x" * 10_000, "`$.inputs['past_key'].dtype`, which is 'xxx"),
    (["inputs", "past_key", "dtype"], "x - at `$.y[3]`", ".dtype`, which is 'x - at"),
    (["inputs", "a\x1b"], {}, "such characters - at `$.inputs`, which is 'a\\x1b'"),
    (["inputs", "x - at `$.y[3]`"], {}, "missing required field `dtype` - at `$.inputs['x - at"),
    (["graphs", "x - at `$.graphs[...]`"], {}, "`$.graphs`, which is 'x - at `$.graphs[...]`'"),
    (["extra"], 3, "Object contains unknown field `extra`"),
    (["inputs"], {}, "length >= 1 - at `$.inputs`, which is an object of 0"),
    (["inputs"], None, "got `null` - at `$.inputs`, which is None"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "says"), SAYS)
def test_the_field_and_its_value_are_named(path: list[str | int], value: object, says: str):
    manifest = json.loads((bundle_of("append") / "manifest.json").read_text())
    place = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    before = json.dumps(manifest)
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the text is compared below
        checked(manifest, Manifest)
    assert says in str(refused.value)
    assert len(str(refused.value)) <= 300
    assert json.dumps(manifest) == before


@pytest.mark.parametrize(
    ("value", "schema", "says"),
    [
        (3, Manifest, "Expected `object`, got `int`, which is 3"),
        ([], CaseEntry, "Expected `object`, got `array`, which is []"),
        ({}, GoldenIndex, "Object missing required field `inputs`"),
        ("a\x1b", EndName, "Expected `str` without such characters, which is 'a\\x1b'"),
    ],
)
def test_a_value_alone_is_named(value: object, schema: type[Any], says: str):
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the text is compared below
        checked(value, schema)
    assert str(refused.value) == says


def test_an_axis_of_an_output_may_have_no_name():
    """Read an axis without a name, as those of users' modules that two runs do not show."""
    manifest = json.loads((bundle_of("append") / "manifest.json").read_text())
    manifest["outputs"]["output"]["shape"][1] = ""
    assert checked(manifest, Manifest).outputs["output"].shape[1] == ""
