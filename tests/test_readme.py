"""Tests of the README: its length, its parts, and that its figures are the measured ones."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from conftest import ROOT

from attn_export.commands.main import cli as commands

README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
SHELL, LISTED = (
    [
        line
        for block in re.findall(r"```sh\n(.*?)```", text, flags=re.S)
        for line in block.splitlines()
    ]
    for text in (README, EXAMPLES)
)
PROVEN = re.findall(r"\| ([^|\n]*\d[^|\n]*) \(\[[^]]+\]\(([^)#]+)[^)]*\)\)(?= \|)", README)
"""Figures of the table, also of what falls short, and the page of each."""
SCRIPTS = sorted(path for path in (ROOT / "scripts").glob("[a-z]*[!k]") if path.is_file())


def test_the_first_two_commands_are_the_main_job_and_the_tests():
    assert SHELL[:2] == ["scripts/attn-export build --variant mqa", "scripts/test"]


def test_it_is_short():
    assert README.count("\n") <= 110


# A worker needs a scheduler.
@pytest.mark.parametrize("name", sorted({*commands.list_commands(None)} - {"worker"}))
def test_every_command_is_on_its_page_with_a_comment(name: str):
    line, _ = next(
        (at, text)
        for at, text in enumerate(LISTED)
        if text.startswith(f"scripts/attn-export {name}")
    )
    assert LISTED[line - 1].startswith("# ")


def test_the_number_of_cases_is_that_of_the_output_below():
    (count,) = re.findall(r"Runtime in (\d+) cases", README)
    assert f" {count}/{count} " in README


@pytest.mark.parametrize(("measured", "page"), PROVEN, ids=[page for _, page in PROVEN])
def test_figures_are_in_the_page_that_is_named(measured: str, page: str):
    text = (ROOT / page).read_text(encoding="utf-8").replace(",", "")
    for figure in re.findall(r"\d[\d.,]*\d|\d", measured):
        assert re.search(rf"(?<![\d.]){re.escape(figure.replace(',', ''))}(?![\d.]*\d)", text), (
            f"{figure} is not in {page}"
        )


def test_most_rows_of_what_is_proven_have_figures():
    assert len(PROVEN) >= 5


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").iterdir()), ids=str)
def test_a_picture_is_a_png_of_at_most_200_kb(picture: Path):
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) <= 200_000
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) >= (800, 600)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_script_says_what_it_is_for(script: Path):
    lines = script.read_text().splitlines()
    assert lines[0].startswith("#!/usr/bin/env ")
    assert re.match(r'# \w|"""\w', lines[1])
    assert script.stat().st_mode & 0o111
