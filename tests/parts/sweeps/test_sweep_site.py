"""The page of a sweep: escaped, readable without scripts, filtered with one, in a real browser."""

from __future__ import annotations

import csv
import dataclasses
import html
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium_page import Page
from conftest import ROOT

from attn_export import AttentionSpec
from attn_export.commands.main import run
from attn_export.errors import OutputError, UsageError
from attn_export.parts.sweeps.site import site_files, to_csv, write_site
from attn_export.parts.sweeps.store import FILE, Row, Store

pytestmark = pytest.mark.xdist_group("test_page_in_chromium")  # one browser

CONTRAST = (ROOT / "tests" / "contrast.js").read_text()
CHECKS = (ROOT / "tests" / "report" / "page_checks.js").read_text()
EVIL = "</script><img src=x onerror=alert(1)>\"'&"


def row(heads: int, dialect: str, runtime: str, **fields: object) -> Row:
    spec = AttentionSpec(embed_dim=16, num_heads=4, num_kv_heads=heads)
    usual = {
        "id": f"{heads}/{dialect}/{runtime}", "source": f"s{heads}", "name": f"layer {heads}",
        "spec": json.dumps(spec.to_dict()), "dtype": "float32", "dialect": dialect,
        "runtime": runtime, "verdict": "passed", "worst": 0.2, "cases": 30, "version": "1.0",
    }  # fmt: skip
    return Row(**{**usual, **fields})


ROWS = [
    row(1, "standard", "ort-cpu"),
    row(1, "portable", "ort-cpu", worst=0.3),
    row(4, "standard", "ort-cpu"),
    row(1, "standard", "tract", verdict="failed", worst=900.0, wrong=3, cause=EVIL,
        smallest="shape_B1_P0_L1"),
    row(1, "portable", "tract"),
    row(4, "portable", "tract", worst=0.9),
    row(4, "standard", "openvino", worst=0.7),
    row(4, "portable", "openvino", verdict="not run", worst=None, cases=0, cause="no kernel"),
    row(1, "standard", "dry-run@sm_80", verdict="seen", worst=None, cases=0, cause="XQA"),
    dataclasses.replace(row(2, "standard", "ort-cpu"), spec=f"/mine/{EVIL}", name=EVIL),
]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "out"
    write_site(ROWS, folder, "Can I use attention", ["Written today."])
    return folder


def test_foreign_texts_are_escaped_and_every_cell_has_one_detail(site: Path):
    text = (site / "index.html").read_text()
    assert EVIL not in text
    assert html.escape(EVIL, quote=False).split("&quot;")[0].split('"')[0] in text
    assert text.count("<article ") == len(ROWS)
    assert text.count("<script") == 1
    anchors = re.findall(r'href="#(c-\w+)"', text)
    assert sorted(anchors) == sorted(re.findall(r'<article id="(c-\w+)"', text))
    assert len(set(anchors)) == len(ROWS)


def test_colours_say_what_came_of_each_cell(site: Path):
    text = (site / "index.html").read_text()
    body = text[text.index('<table class="site">') : text.index("<h2>Details</h2>")]
    assert [body.count(f'class="{colour}"') for colour in ("green", "yellow", "red", "grey")] == [
        6,
        1,
        1,
        2,
    ]
    assert "its error is 3.5 times that of the best runtime" in text
    assert "num_kv_heads 1" in body


def test_a_target_is_recommended_the_dialect_that_passes_most(site: Path):
    text = (site / "index.html").read_text()
    forms = text[text.index('id="forms"') : text.index("<h2>Every cell</h2>")]
    rows = [line for line in forms.splitlines() if 'scope="row"' in line]
    said = {line.split("<")[2].split(">")[1]: line for line in rows}
    assert '<td>portable</td><td class="number">2 of 2</td>' in said["tract"]
    assert '<td>standard</td><td class="number">3 of 3</td>' in said["ort-cpu"]
    assert "<td>none</td>" in said["dry-run@sm_80"]


def test_of_dialects_that_pass_alike_the_fastest_is_recommended_whatever_their_errors():
    rows = [
        row(1, dialect, runtime, worst=worst)
        for runtime in ("ort-cpu", "ort-cuda")
        for dialect, worst in (("standard", 0.2), ("ort", 0.20001), ("cuda", 0.21))
    ]
    text = site_files(rows, "t", [])["index.html"]
    forms = text[text.index('id="forms"') : text.index("<h2>Every cell</h2>")]
    assert re.findall(r"<td>(\w+)</td><td class=.number.>1 of 1", forms) == ["ort", "cuda"]


def test_a_reproduction_repeats_the_cell(site: Path, tmp_path: Path):
    text = html.unescape((site / "index.html").read_text())
    start = text.index("cat > layer.toml")
    toml = text[text.index("\n", start) + 1 : text.index("END\n", text.index("\n", start))]
    (tmp_path / "layer.toml").write_text(toml)
    assert len(toml.splitlines()) == 3
    assert AttentionSpec.from_toml(tmp_path / "layer.toml") == AttentionSpec(
        embed_dim=16, num_heads=4, num_kv_heads=1
    )


def test_commands_to_repeat_quote_names():
    rows = [
        dataclasses.replace(row(1, "standard; id", "ort-cpu"), runtime="dry-run@$(id)"),
        dataclasses.replace(row(2, "a'b", "ort-cpu"), runtime="x\nEND\u202e & id"),
    ]
    text = html.unescape(site_files(rows, "t", [])["index.html"])
    commands = re.findall(r"^attn-export (?:build|verify|dry-run) .*", text, re.M)
    assert [shlex.split(command) for command in commands] == [
        ["attn-export", "build", "layer.toml", "--dialect", "standard; id", "--output", "layer"],
        ["attn-export", "dry-run", "layer", "--arch", "$(id)"],
        ["attn-export", "build", "layer.toml", "--dialect", "a'b", "--output", "layer"],
        ["attn-export", "verify", "layer", "--runtime", "xEND & id"],
    ]


def test_json_and_csv_hold_all_cells_and_no_formulas():
    rows = [*ROWS, row(2, "standard", "tract", cause="=HYPERLINK(1)")]
    files = site_files(rows, "t", [])
    assert len(json.loads(files["cells.json"])) == len(rows)
    read = list(csv.DictReader(to_csv(rows).splitlines()))
    assert [each["cause"] for each in read][-1] == "'=HYPERLINK(1)"
    assert read[3]["cause"] == EVIL


def test_the_command_writes_a_site_and_replaces_only_its_own(tmp_path: Path, capsys):
    with Store.open(tmp_path / "store") as store:
        store.add(ROWS)
    for _ in range(2):
        assert run(["site", str(tmp_path / "store"), "--output", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert run(["site", str(tmp_path / "x"), "--output", str(tmp_path / "y")]) == 2
    assert f"has no {FILE}" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(OutputError):
        write_site(ROWS, tmp_path / "mine", "t", [])
    with pytest.raises(UsageError, match="has no cells"):
        write_site([], tmp_path / "empty", "t", [])


# -- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with Page() as opened:
        yield opened


in_browser = pytest.mark.usefixtures("_chromium")


@pytest.fixture
def _chromium(need) -> None:
    need("wasm")


@in_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_is_readable_and_asks_for_nothing(width: int, dark: bool, site: Path, page: Page):
    page.errors.clear()
    page.requests.clear()
    page.look(width, dark=dark)
    page.open((site / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(CHECKS) == []
    page.evaluate("document.querySelectorAll('.detail').forEach((x) => x.style.display = 'block')")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) == []
    assert page.errors == []
    assert page.requests == [(site / "index.html").as_uri()]


@in_browser
def test_filters_and_links_lead_to_a_cell(site: Path, page: Page):
    page.look(1280, dark=False)
    page.open((site / "index.html").as_uri())
    count = "[...document.querySelectorAll('.site tbody tr')].filter((row) => !row.hidden).length"
    every = page.evaluate(count)

    def choose(name: str, value: str) -> int:
        page.evaluate(
            f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)};"
            f"document.getElementById({json.dumps(name)}).dispatchEvent(new Event('input'))"
        )
        return page.evaluate(count)

    assert choose("verdict", "failed") == 1
    assert choose("verdict", "") == every
    assert choose("search", "num_kv_heads 4") == 2
    assert choose("search", "") == every
    choose("target", "tract")
    heads = "[...document.querySelectorAll('.site thead [data-runtime]')]"
    shown = f"{heads}.filter((cell) => !cell.hidden).map((cell) => cell.textContent)"
    assert page.evaluate(shown) == ["tract"]
    link = page.evaluate("document.querySelector('.site a.red').getAttribute('href')")
    seen = f"getComputedStyle(document.querySelector({json.dumps(link)})).display"
    assert page.evaluate(seen) == "none"
    page.evaluate(f"location.hash = {json.dumps(link)}")
    assert page.evaluate(seen) == "block"
