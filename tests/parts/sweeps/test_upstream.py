"""Files about defects of runtimes: their scripts, and the cells of the kept sweep behind them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

from attn_export.parts.sweeps.release import MARK, release_of, wheels
from attn_export.parts.sweeps.releases import plain_cause
from attn_export.parts.sweeps.store import Row
from attn_export.runtimes.catalogue import runtime

FOLDER = ROOT / "docs" / "upstream"
ABOUT = tomllib.loads((FOLDER / "cells.toml").read_text())
OF_SWEEP = {name: about for name, about in ABOUT.items() if "found_by" not in about}
KEPT = ROOT / "docs" / "results" / "releases.json"
RED = {"failed", "crashed", "error", "timed out"}
PACKAGES = {first: name for name, (first, *_) in wheels().items()}
MOST_LINES = 22


def blocks(name: str, kind: str) -> list[str]:
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, flags=re.M | re.S)


def releases(name: str) -> list[str]:
    """Return the releases that a file names, in its order."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    package, version = re.search(r"`pip install onnx (\S+?)==(\S+?)[ `]", text).groups()
    later = re.findall(r"^and with ([\d.]+)$", text, flags=re.M)
    return [f"{PACKAGES[package]}{MARK}{each}" for each in (version, *later)]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [Row(**cell) for cell in json.loads(KEPT.read_text())["cells"]]


def test_every_file_is_in_the_tables_and_every_entry_has_a_file():
    names = {path.stem for path in FOLDER.glob("*.md")}
    assert names == {*ABOUT}
    page = (ROOT / "docs" / "upstream.md").read_text()
    assert {*re.findall(r"\(upstream/([\w-]+)\.md\)", page)} == names


@pytest.mark.parametrize("name", ABOUT)
def test_a_file_has_one_short_script_without_this_package(name: str):
    (script,) = blocks(name, "python")
    assert len([line for line in script.splitlines() if line]) <= MOST_LINES
    assert "attn_export" not in script
    compile(script, name, "exec")


@pytest.mark.parametrize("name", ABOUT)
def test_a_script_prints_what_its_file_shows(name: str, need, tmp_path: Path):
    (script,) = blocks(name, "python")
    seen = blocks(name, "text")
    assert len(seen) == len(releases(name))
    for release in releases(name):
        need(release)
    for release, shown in zip(releases(name), seen, strict=True):
        command, environment = runtime(release).launch_command(["-c", script])
        done = subprocess.run(
            command, cwd=tmp_path, env=environment or os.environ, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        # Some engines print a log before.
        assert done.stdout.splitlines()[-len(shown.splitlines()) :] == shown.splitlines()


def red_cells_of_newest_releases(rows: list[Row]) -> list[Row]:
    """Return wrong cells that no newer release of their runtime computes right."""
    newest: dict[tuple[str, str, str], Row] = {}
    for row in sorted(rows, key=lambda row: release_of(row.runtime)):
        newest[release_of(row.runtime)[0], row.source, row.dialect] = row
    return [row for row in newest.values() if row.verdict in RED]


def file_about(row: Row) -> str:
    """Return the name of the file that a cell belongs to, or ""."""
    base, version = release_of(row.runtime)
    return next(
        (
            name for name, about in OF_SWEEP.items()
            if base in about["runtimes"] and row.dialect in about["dialects"]
            and release_of(f"x=={about['first']}")[1] <= version
            and version <= release_of(f"x=={about['last']}")[1]
            and re.search(about["cause"], plain_cause(row.cause))
            and re.search(about.get("spec", ""), row.spec)
        ),
        "",
    )  # fmt: skip


def test_every_wrong_cell_of_a_newest_release_has_a_file(rows: list[Row]):
    red = red_cells_of_newest_releases(rows)
    assert len(red) > 10
    missing = [
        f"{row.runtime} {row.dialect} {row.spec}: {plain_cause(row.cause)}"
        for row in red if not file_about(row)
    ]  # fmt: skip
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("name", OF_SWEEP)
def test_every_file_is_about_some_cell(name: str, rows: list[Row]):
    assert any(file_about(row) == name for row in rows if row.verdict in RED | {"refused"})


def test_masked_rows_of_onnx_runtime_are_found_blind(rows: list[Row]):
    """Find that releases up to 1.27 compute fully masked rows wrong, and newer ones right."""
    masked = [
        row for row in rows
        if row.runtime.startswith("ort-cpu==") and row.dialect == "standard" and "mask" in row.spec
        and "in-place" not in row.spec
    ]  # fmt: skip
    verdicts: dict[tuple[int, ...], set[str]] = {}
    for row in masked:
        verdicts.setdefault(release_of(row.runtime)[1][:2], set()).add(row.verdict)
    for release, found in verdicts.items():
        if (1, 23) <= release < (1, 28):
            assert found == {"failed"}
        elif release >= (1, 28):
            assert found == {"passed"}
    assert len(verdicts) >= 10
