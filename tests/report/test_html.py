"""The report as a page: whole in one file, and whatever a name holds stays text."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import Cli
from reports import ENVIRONMENT, clean, error_map, mixed, run, verdict

from attn_export.report.html import to_html
from attn_export.report.pictures import SHOWN, figures, margin_bar
from attn_export.results import Detail, Report

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
    report = dataclasses.replace(mixed(), explanations=("a cause",))
    text = " ".join(Page(to_html(report)).text.split())
    order = ("✗ failed", "Why", "What to do:", "What failed", "Figures", "Case by case")
    assert sorted(order, key=text.index) == [*order]
    assert "relative error 1e-2 over <the> whole | output" in text
    assert "not compared eager has NaN" in text
    assert "ended with signal SIGSEGV: <core> & 100 %" in text
    assert "not run good, ort.decode: it has no TensorScatter" in text
    assert "a note with `code`" in text
    assert "✓ passed" in Page(to_html(clean())).text


@pytest.mark.parametrize(
    ("cause", "advice"),
    [("the graph is wrong: its scale", "correct the export"), ("the graph is right, r", "another")],
)
def test_a_cause_comes_with_what_to_do(cause: str, advice: str):
    text = Page(to_html(dataclasses.replace(mixed(), explanations=(cause,)))).text
    assert advice in text.partition("What to do: ")[2].partition("\n")[0]


def test_a_report_that_passed_says_what_was_not_tried_before_its_details():
    notes = ("not compared: a row", Detail("greedy tokens: 3 positions"), "x" * 300)
    text = Page(to_html(dataclasses.replace(clean(), notes=notes))).text
    seen = text.partition("Case by case")[0]
    assert "not compared: a row" in seen
    assert "greedy" not in seen
    assert "x" * 159 not in seen
    assert "x" * 300 in text


def test_a_report_that_passed_has_its_details_folded():
    folded, unfolded = (
        [attrs for tag, attrs in Page(to_html(report)).elements if tag == "details"]
        for report in (clean(), mixed())
    )
    assert len(folded) >= 3
    assert not any("open" in attrs for attrs in folded)
    assert all("open" in attrs for attrs in unfolded)


def test_each_run_has_a_cell_for_each_case_of_which_the_first_failure_is_chosen():
    text = to_html(mixed())
    page = Page(text)
    cells = [attrs for tag, attrs in page.elements if tag == "input"]
    # good, bad and dead, each with the three cases that there are.
    groups = [group for group, _ in itertools.groupby(cells, lambda cell: cell["name"])]
    assert (len(cells), len(groups)) == (9, 3)
    says = re.findall(r'"says">(.*?)<', text)
    assert says[:4] == ["B2_L3: passed, 0.25", "B1: not run", "far: not run",
                        "B2_L3: failed, 12.5 (output)"]  # fmt: skip
    assert [i for i, cell in enumerate(cells) if "checked" in cell] == [0, 3, 6]
    rows = [attrs for tag, attrs in page.elements if attrs.get("scope") == "row"]
    assert len(rows) == 3 + 3 + 4  # of the failures, the figures and the outputs
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
    runs = tuple(dataclasses.replace(run, maps=()) for run in report.runs)
    text = Page(to_html(dataclasses.replace(report, runs=runs))).text
    assert "Where the worst error sits" not in text


def test_the_worst_comes_first_and_what_is_the_same_is_shown_once():
    names = ("good", "bad", "also good", "worse")
    shares = (0.25, 12.5, 0.25, None)
    verdicts = tuple(
        verdict(name, "passed" if share == 0.25 else "failed", share)
        for name, share in zip(names, shares, strict=True)
    )
    runs = tuple(run(name, maps=(error_map(),)) for name in names)
    found = figures(Report("many", runs, verdicts, ENVIRONMENT, ()))
    assert [figure["name"] for figure in found] == [
        "worse, standard", "bad, standard", "good, standard; also good, standard",
    ]  # fmt: skip
    assert [figure["verdict"] for figure in found] == [
        "B2_L3, output: failed", "B2_L3, output: failed, 12.5 times the tolerance",
        "B2_L3, output: passed, 0.25 times the tolerance",
    ]  # fmt: skip


def test_a_picture_says_in_words_what_its_colours_say():
    (figure,) = figures(clean())
    (drawn,) = figure["maps"]
    assert drawn["place"] == "worst at batch 1, query_len 2, element 7: actual nan, expected 0.25"
    assert drawn["axes"] == "↓ query_len, → element; at batch 1"
    reference, runtime, difference, by_batch, by_query = drawn["pictures"]
    assert reference.words == (
        "reference of output: 3 by 100 elements, drawn as 3 by 34 cells, up to 8 in magnitude. "
        "The worst error is in row 3, column 3 of the picture."
    )
    assert difference.title == "difference, up to 12.5"
    assert runtime.words.endswith("Not finite or wrong in kind: 1.")
    # Equal cells that follow each other are one rectangle. Reference and runtime share a scale.
    assert {name: path for name, path in reference.paths.items() if "mark" not in name} == {
        "e1": "M0 0h34v1h-34z", "n2": "M0 1h34v1h-34z", "e3": "M0 2h34v1h-34z",
    }  # fmt: skip
    assert runtime.paths["ewrong"] == "M2 2h1v1h-1z"
    assert "largest at bar 1 of 2, where it cannot be measured" in by_batch.words
    assert by_query.words.endswith(
        "Error ÷ tolerance along query_len (3): largest at bar 3 of 3, 1."
    )
    assert "ebad" not in by_query.paths
    assert by_batch.paths["ebad"].startswith("M1.1 ")


def test_a_margin_bar_meets_its_line_at_the_tolerance():
    at_limit = margin_bar(1.0, failed=False).paths
    assert (
        at_limit["e3"]
        == f"M0 0.2h{at_limit['limit'][1:].split()[0]}v0.6h-{at_limit['limit'][1:].split()[0]}z"
    )
    for worst in (math.nan, math.inf, None, 1e30):
        assert "h1v" in margin_bar(worst, failed=True).paths["ebad"]


def test_layers_of_a_whole_model_are_a_line_of_cells_for_each_phase():
    outputs = ["logits", *(f"present.{i}.{part}" for i in range(12) for part in ("key", "value"))]
    wrong = {
        ("past_7", "logits"), ("past_7", "present.11.key"), ("chunk_2_3", "present.10.value"),
    }  # fmt: skip
    verdicts = tuple(
        verdict("r", "failed" if (case, name) in wrong else "passed",
                9.0 if (case, name) in wrong else 0.1, case=case, output=name)
        for case in ("past_7", "past_9", "chunk_2_3") for name in outputs
    )  # fmt: skip
    report = Report("model", (run("r"),), verdicts, ENVIRONMENT, ())
    text = to_html(report)
    layers = text[text.index('id="layers"') : text.index('id="map"')]
    assert re.findall(r"<span aria-hidden=.true.>(\w+)</span>", layers) == ["past", "chunk"]
    assert re.findall(r"<b>(\w+)</b>", layers) == [*map(str, range(12)), "logits"]
    says = re.findall(r'"says">(.*?)<', layers)
    assert len(says) == 2 * 13
    assert says[10:14] == [
        "past, layer 10: passed, 0.1", "past, layer 11: failed, 9 (present.11.key)",
        "past, logits: failed, 9", "chunk, layer 0: passed, 0.1",
    ]  # fmt: skip
    chosen = [i for i, of in enumerate(re.findall("<input.*?>", layers)) if "checked" in of]
    assert [says[i] for i in chosen] == ["chunk, layer 10: failed, 9 (present.10.value)"]
    assert 'id="layers"' not in to_html(mixed())


def test_of_many_maps_a_page_shows_some():
    names = [f"runtime {i}" for i in range(SHOWN + 3)]
    runs = tuple(run(name, maps=(error_map(index=(1, 2, i)),)) for i, name in enumerate(names))
    verdicts = tuple(verdict(name, "passed", 0.5) for name in names)
    page = Page(to_html(Report("many", runs, verdicts, ENVIRONMENT, ())))
    assert sum(tag == "figure" for tag, _ in page.elements) == SHOWN
    assert "And 3 more" in page.text
