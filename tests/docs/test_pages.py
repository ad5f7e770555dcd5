"""Commands and snippets of the pages, run as they are written, in the order of the page."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from conftest import ROOT
from pages import FIRST, PAGES, WRITTEN, after_the_first_command, blocks, run
from shared import extended, missing

from attn_export.commands.main import cli
from attn_export.errors import AttnExportError
from attn_export.spec import AttentionSpec

RUN = [page for page in PAGES if any(block.kind in {"sh", "python"} for block in blocks(page))]
OTHER_KINDS = {"", "text", "toml", "yaml", "cpp", "cmake"}
NOT_RUN = "console"
"""The language of blocks of commands that no test runs."""
ELSEWHERE = {FIRST, "scripts/test", "scripts/setup test"}  # ran before; is or made what runs here
SLOW = {
    "scripts/attn-export bench models/gqa --prefill 64 --decode 256 --rounds 1",
    "scripts/attn-export verify models/mqa --cpu neoverse-n1 --cpu haswell",
    "scripts/attn-export compare models/gqa/model.onnx models/gqa/model.portable.onnx",
    "scripts/attn-export sweep docs/sweeps/heads.toml --output heads.sweep",
    "scripts/attn-export bisect models/mqa --good 1.28.0 --bad 1.27.0 --install",
    "scripts/attn-export probe ort-cpu",
    "scripts/attn-export probe onnx-reference",
}
"""Commands that take long, which `--all` runs; other tests run them too, most for less."""
LONG = {
    "ci", "sweep", "performance", "bundle", "checkpoints", "spec", "your-module", "evidence",
    "low-precision", "dry-run", "other-cpus", "whole-models", "build-models",
    "judge-a-model", "ship-to-cpp", "parity-in-ci", "commands", "other-exporters", "runtimes",
    "value-ranges", "troubleshooting", "index", "gpu",
}  # fmt: skip
"""Pages that take long, or whose commands README has, too: `--all` runs them. By default their
commands are only read."""

FROM_CODE = runpy.run_path(str(ROOT / "scripts" / "update_docs"), run_name="not main")


NEEDS = {"cuda-dry-run": r" dry-run ", "cpp": r"layer-cpp/build|mine/build|setup_runtimes cpp"}
"""What `scripts/setup_runtimes` installs, and the commands that need it."""


def without(name: str, page: Path) -> set[str]:
    """Return the commands that need what is not installed."""
    lines = {line for block in blocks(page) for line in block.commands}
    return {line for line in lines if re.search(NEEDS[name], line)}


@pytest.mark.parametrize(
    "page", extended(RUN, lambda page: page.stem not in LONG), ids=lambda page: page.stem
)
def test_commands_and_snippets_work_in_the_order_of_the_page(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    left_out = ELSEWHERE if request.config.getoption("--all") else {*ELSEWHERE, *SLOW}
    for name in set(NEEDS) - set(request.config.getoption("--require")):
        if missing(name):
            left_out = left_out | without(name, page)
    folder = tmp_path / "clone"
    shutil.copytree(after_the_first_command(), folder, symlinks=True)
    for block in blocks(page):
        for line in block.commands:
            if line not in left_out:
                run(line, folder)
        if block.file:
            (folder / block.file).parent.mkdir(exist_ok=True)
            (folder / block.file).write_text(block.text)
        elif block.kind == "python":
            done = subprocess.run(
                [sys.executable, "-W", "error", "-c", block.text],
                cwd=folder, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_has_the_options_that_it_is_given(page: Path):
    with click.Context(cli) as parent:
        for line in {line for block in blocks(page) for line in block.commands} - ELSEWHERE:
            program, *words = shlex.split(line, comments=True)
            if program == "scripts/attn-export" and not {"--help", "--version"} & {*words}:
                command = cli.get_command(parent, words[0])
                assert command is not None, line
                command.make_context(words[0], words[1:], parent)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_hides_in_a_block_that_is_not_run(page: Path):
    for block in blocks(page):
        assert block.kind in {"sh", "python", NOT_RUN} | OTHER_KINDS
        if block.kind not in {"sh", "python", NOT_RUN}:
            assert not re.search(PROGRAMS, block.text, flags=re.M)


PROGRAMS = r"^\W*(scripts/|attn-export |\.venv/bin/|(pip|pytest|cmake|git|docker|export|eval) )"
"""Beginnings of lines that somebody may copy into a shell."""


def test_a_block_that_is_not_run_says_why_and_there_are_at_most_five():
    unrun = [block for page in PAGES for block in blocks(page) if block.kind == NOT_RUN]
    assert [b.text for b in unrun if not b.above.startswith("Not run by the tests, because ")] == []
    assert 1 <= len(unrun) <= 5


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_a_page_has_at_most_250_lines_and_says_at_once_what_it_is_about(page: Path):
    text = page.read_text(encoding="utf-8")
    title, first = text.split("\n\n", 2)[:2]
    assert title.startswith("# ")
    assert re.match(r"[A-Z`\[]|attn-export", first), "no sentence, but a table, a block or a list"
    assert not first.startswith("For those who")
    assert text.count("\n") <= 250


def test_the_pages_are_at_most_28_000_words():
    pages = [p for p in WRITTEN if p.parent.name != "notes" and p.stem != "upstream"]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in [*pages, PAGES[0]])
    assert words <= 28_000


def test_the_glossary_has_at_most_12_terms():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = text.partition("## Terms")[2].partition("\n## ")[0].count("\n| ") - 1
    assert 0 < terms <= 12


def test_every_slow_command_is_on_a_page():
    assert set().union(*(block.commands for page in RUN for block in blocks(page))) >= SLOW


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_output_shown_has_the_rows_of_the_first_command(name: str):
    rows = re.compile(r"^(ort-cpu +model\S+ +\d+/\d+) ", flags=re.M)
    printed = rows.findall((after_the_first_command() / "first.txt").read_text())
    assert len(printed) == 4
    assert rows.findall((ROOT / name).read_text()) == printed


def test_every_exit_code_is_in_the_table_with_its_error():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d) \|", text, flags=re.M)}
    codes = {error.exit_code for error in AttnExportError.__subclasses__()}
    assert listed == codes | {0, AttnExportError.exit_code}


def test_every_field_of_the_spec_is_described():
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "spec.md").read_text()))
    hidden = {"dropout"}  # training only
    assert set(AttentionSpec.__dataclass_fields__) - hidden <= documented


@pytest.mark.parametrize("file", FROM_CODE["TABLES"])
def test_tables_are_those_of_the_code(file: str):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert FROM_CODE["updated"](file, text) == text, "run .venv/bin/python scripts/update_docs"
