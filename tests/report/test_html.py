"""The report as a page: whole in one file, and whatever a name holds stays text."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import Cli
from reports import ENVIRONMENT, clean, error_map, mixed, run, verdict

from attn_export.report.html import to_html
from attn_export.report.pictures import SHOWN, figures
from attn_export.results import Report

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that elements are closed in order; keeps them and their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


@pytest.mark.parametrize("report", [mixed(), clean()], ids=["mixed", "clean"])
def test_it_needs_nothing_else_and_names_are_text(report):
    text = to_html(report)
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?:|@import|url\(", text)
    assert report.name in page.text


def test_verdict_failures_and_reasons_are_in_it():
    text = " ".join(Page(to_html(mixed())).text.split())
    assert text.index("✗ failed") < text.index("What failed") < text.index("Figures")
    assert "relative error 1e-2 over <the> whole | output" in text
    assert "ended with signal SIGSEGV: <core> & 100 %" in text
    assert "not run good, ort.decode: it has no TensorScatter" in text
    assert "a note with `code`" in text
    assert "✓ passed" in Page(to_html(clean())).text


def test_the_heat_map_is_a_table_that_can_be_heard():
    page = Page(to_html(mixed()))
    titles = [attrs["title"] for tag, attrs in page.elements if tag == "td" and "title" in attrs]
    # good, bad and dead, each with the three cases that there are.
    assert len(titles) == 9
    assert titles[:3] == ["B2_L3: passed, 0.25", "B1: not run", "far: not run"]
    assert titles[3] == "B2_L3: failed, 12.5"
    rows = [attrs for tag, attrs in page.elements if attrs.get("scope") == "row"]
    assert len(rows) == 3 + 3 + 4  # of the map, the figures, and the outputs
    for _, attrs in page.elements:
        if attrs.get("tabindex"):
            assert attrs["role"] == "region"
            assert attrs["aria-labelledby"]


def test_colours_follow_the_error():
    steps = re.findall(r'class="cell s(\w+)"', to_html(mixed()))
    assert steps == ["3", "none", "none", "failed", "failed", "failed", "4", "none", "none"]


def test_a_bundle_has_it_and_the_command_line_writes_it(bundle: Path, tmp_path: Path, cli: Cli):
    written = Page((bundle / "report.html").read_text()).text
    assert "small" in written
    done = cli("verify", bundle, "--runtime", "ort-cpu", "--html", "out.html", "--quiet")
    assert done.returncode == 0
    verified = Page((tmp_path / "out.html").read_text()).text
    assert "ort-cpu, standard" in verified
    for text in (written, verified):
        assert "worst at batch " in text


def test_without_a_map_nothing_is_said_of_it():
    report = clean()
    runs = tuple(dataclasses.replace(run, worst=None) for run in report.runs)
    text = Page(to_html(dataclasses.replace(report, runs=runs))).text
    assert "Where the worst error sits" not in text


def test_the_worst_comes_first_and_what_is_the_same_is_shown_once():
    names = ("good", "bad", "also good", "worse")
    shares = (0.25, 12.5, 0.25, None)
    verdicts = tuple(
        verdict(name, "passed" if share == 0.25 else "failed", share)
        for name, share in zip(names, shares, strict=True)
    )
    runs = tuple(run(name, worst=error_map()) for name in names)
    found = figures(Report("many", runs, verdicts, ENVIRONMENT, ()))
    assert [figure["name"] for figure in found] == [
        "worse, standard", "bad, standard", "good, standard; also good, standard",
    ]  # fmt: skip
    assert [figure["verdict"] for figure in found] == [
        "failed", "failed, 12.5 times the error allowed", "passed, 0.25 times the error allowed",
    ]  # fmt: skip


def test_a_picture_says_in_words_what_its_colours_say():
    (figure,) = figures(clean())
    assert figure["place"] == "worst at batch 1, query_len 2, element 7: actual nan, expected 0.25"
    rows, detail = figure["pictures"]
    assert rows["words"] == (
        "Error of output: 2 rows of batch by 3 columns of query_len. The worst is in row 2, "
        "column 3 of the picture. 1 cell cannot be measured."
    )
    assert (
        "3 rows of query_len by 100 columns of element, drawn as 3 by 34 cells" in detail["words"]
    )
    # Shares of the largest, 12.5: 0, 0.8 %, wrong in kind, 1.6 %, 4 % and all of it.
    assert rows["paths"] == {
        "0": "M0 0h1v1h-1zM1 0h1v1h-1z", "1": "M0 1h1v1h-1zM1 1h1v1h-1z", "4": "M2 1h1v1h-1z",
        "wrong": "M2 0h1v1h-1z",
    }  # fmt: skip
    # In a map of many cells, equal ones that follow each other are one rectangle.
    assert detail["paths"]["4"] == "M0 2h34v1h-34z"


def test_of_many_maps_a_page_shows_some():
    names = [f"runtime {i}" for i in range(SHOWN + 3)]
    runs = tuple(run(name, worst=error_map(index=(1, 2, i))) for i, name in enumerate(names))
    verdicts = tuple(verdict(name, "passed", 0.5) for name in names)
    page = Page(to_html(Report("many", runs, verdicts, ENVIRONMENT, ())))
    assert sum(tag == "figure" for tag, _ in page.elements) == SHOWN
    assert "And 3 more" in page.text
