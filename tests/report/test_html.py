"""The report as a page: whole in one file, and whatever a name holds stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import Cli
from reports import clean, mixed

from attn_export.report.html import to_html

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
    assert "small" in Page((bundle / "report.html").read_text()).text
    done = cli("verify", bundle, "--runtime", "ort-cpu", "--html", "out.html", "--quiet")
    assert done.returncode == 0
    assert "ort-cpu, standard" in Page((tmp_path / "out.html").read_text()).text
