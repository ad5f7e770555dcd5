"""The table `[tool.attn-export]` of pyproject.toml: what it sets, and that options win."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Cli

from attn_export.configuration import read_configuration
from attn_export.errors import UsageError

TABLE = """[tool.attn-export]
runtimes = ["onnx-reference"]
require = ["onnx-reference"]
baseline = "errors.json"
"""


def test_the_nearest_file_counts_and_none_is_an_empty_table(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text(TABLE)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    table = read_configuration(below)
    assert table.runtimes == table.require == ["onnx-reference"]
    assert table.baseline == str(tmp_path / "errors.json")
    (below / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert (read_configuration(below).runtimes, read_configuration(below).baseline) == ([], "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tool.attn-export]\nruntime = []", "unknown field `runtime`"),
        ("[tool.attn-export]\nruntimes = 'ort-cpu'", "Expected `array`"),
        ("[tool.attn-export]\nbaseline = 'a\\u0007'", "without such characters"),
        ("[tool]\nattn-export = 1", "Expected `object`"),
        ("[tool", "cannot read"),
        ("tool = 1", ""),
    ],
)
def test_a_wrong_table_is_one_line_that_names_the_file(text: str, says: str, tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text(text.replace("'a\\u0007'", '"a\\u0007"'))
    if not says:
        assert read_configuration(tmp_path).runtimes == []
        return
    with pytest.raises(UsageError, match=says) as caught:
        read_configuration(tmp_path)
    assert str(tmp_path / "pyproject.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_verify_takes_what_no_option_says(bundle: Path, cli: Cli, tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text(TABLE)
    done = cli("verify", bundle, "--quiet")
    assert (done.returncode, "there is no baseline" in done.stderr) == (2, True)
    assert cli("verify", bundle, "--update", "--quiet", "--json", "a.json").returncode == 0
    assert (tmp_path / "errors.json").is_file()
    words = ("--runtime", "ort-cpu", "--require", "ort-cpu", "--quiet", "--json", "b.json")
    assert cli("verify", bundle, *words).returncode == 0
    of_table, of_options = (
        {run["runtime"] for run in json.loads((tmp_path / name).read_text())["runs"]}
        for name in ("a.json", "b.json")
    )
    assert (of_table, of_options) == ({"onnx-reference"}, {"ort-cpu"})
