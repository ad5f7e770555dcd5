"""Commands of the README, run as they are written."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from attn_export.cli import cli as commands
from attn_export.errors import AttnExportError
from attn_export.spec import AttentionSpec

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.S)
SHELL = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines() if line]
PYTHON = [block for kind, block in BLOCKS if kind == "python"]


def as_here(line: str) -> list[str]:
    """Return a README command in this environment; scripts/test covers the set-up itself."""
    words = line.split()
    assert words[0] == "scripts/attn-export"
    return [sys.executable, "-m", "attn_export", *words[1:]]


def test_the_first_two_commands_are_the_main_job_and_the_tests():
    assert SHELL[:2] == ["scripts/attn-export build --variant mqa", "scripts/test"]


def test_every_command_works_in_the_order_of_the_readme(tmp_path: Path):
    (tmp_path / "models").mkdir()
    for spec in (ROOT / "models").glob("*.toml"):
        (tmp_path / "models" / spec.name).write_text(spec.read_text())
    for line in SHELL:
        if line == "scripts/test":
            continue
        done = subprocess.run(as_here(line), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        if line == SHELL[0]:
            assert "mqa: passed" in done.stdout
            (count,) = re.findall(r"Runtime in (\d+) cases", README)
            assert f" {count}/{count} " in done.stdout


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_every_python_example_runs(code: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_exit_code_is_in_the_table_with_its_error():
    listed = {int(code) for code in re.findall(r"^\| (\d) \|", README, flags=re.M)}
    codes = {error.exit_code for error in AttnExportError.__subclasses__()}
    assert listed == codes | {0, AttnExportError.exit_code}


@pytest.mark.parametrize("file", ["README.md", "docs/parity.md"])
def test_tables_are_those_of_the_code(file: str):
    path = ROOT / "scripts" / "update_readme"
    namespace = runpy.run_path(str(path), run_name="not main")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert namespace["updated"](file, text) == text, "run .venv/bin/python scripts/update_readme"


def test_every_command_and_every_field_of_the_spec_is_mentioned():
    for name in commands.commands:
        assert f"scripts/attn-export {name}" in README
    documented = set(re.findall(r"`(\w+)`", README))
    hidden = {"dropout"}  # training only
    assert set(AttentionSpec.__dataclass_fields__) - hidden <= documented


@pytest.mark.parametrize(
    "script", sorted((ROOT / "scripts").glob("[a-z]*[!k]")), ids=lambda p: p.name
)
def test_every_script_says_what_it_is_for(script: Path):
    lines = script.read_text().splitlines()
    assert lines[0].startswith("#!/usr/bin/env ")
    assert re.match(r'# \w|"""\w', lines[1])
    assert script.stat().st_mode & 0o111
