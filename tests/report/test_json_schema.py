"""report.json keeps to the schema that is shipped with the package."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_schema import SCHEMA, validator
from reports import clean, mixed

from attn_export.quality import Loss, Quality
from attn_export.report.data import FORMAT, to_json


def test_the_schema_is_one_and_of_the_version_that_is_written():
    assert validator()
    assert SCHEMA["properties"]["format"]["const"] == FORMAT


@pytest.mark.parametrize("report", [mixed(), clean()], ids=["mixed", "clean"])
def test_a_report_is_valid(report):
    validator().validate(json.loads(to_json(report)))


def test_losses_of_a_quantised_model_are_written_and_shown():
    losses = (Loss("lm_head", 20.0, 0.5), Loss("<layers.0>", math.inf, 1.0))
    quality = Quality((), (), causes=losses[:1], layers=losses, projections=losses)
    report = dataclasses.replace(clean(), quality=quality)
    content = json.loads(to_json(report))
    validator().validate(content)
    assert [each["sqnr"] for each in content["quality"]["layers"]] == [20, None]
    page = report.to_html()
    assert page.count("&lt;layers.0&gt;") == 2
    assert page.index("By cause") < page.index("By layer, rounded alone") < page.index("By proj")


def test_the_report_of_a_bundle_is_valid(bundle: Path):
    validator().validate(json.loads((bundle / "report.json").read_text()))


def _set(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return change


WRONG: dict[str, Callable[[Any], None]] = {
    "another format": _set("format", to="attn-export-report/2"),
    "passed with an exit code": _set("exit_code", to=6),
    "no runs": lambda content: content.pop("runs"),
    "an outcome that there is not": _set("runs", 0, "outcome", to="fine"),
    "not run without a reason": _set("runs", 0, "outcome", to="not run"),
    "an error that is text": _set("verdicts", 0, "worst", to="0.1"),
    "an error below 0": _set("verdicts", 0, "worst", to=-0.1),
    "a map without an index": lambda content: content["runs"][0]["maps"][0].pop("index"),
    "a cell that is text": _set("runs", 0, "maps", 0, "truth", 0, 0, to="0.1"),
    "a norm that there is not": _set("runs", 0, "maps", 0, "relative_to", to="column"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_report_is_refused(name: str):
    content = copy.deepcopy(json.loads(to_json(clean())))
    WRONG[name](content)
    assert not validator().is_valid(content)


def test_a_row_of_cells_is_a_line():
    values = clean().runs[0].maps[0].truth
    lines = {line.strip() for line in to_json(clean()).splitlines()}
    for row in values:
        text = ", ".join("null" if value is None else repr(value) for value in row)
        assert lines & {f"[ {text} ]", f"[ {text} ],"}, text
