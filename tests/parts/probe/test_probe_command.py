"""`attn-export probe`: complete tables even if the runtime crashes, pure JSON, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import command, run_command
from processes import worker_after

from attn_export.commands.main import run
from attn_export.parts.probe.pytorch import PyTorch
from attn_export.parts.probe.run_probes import probes, run_cases
from attn_export.results import Outcome, StoredCase
from attn_export.runtimes import process
from attn_export.runtimes.catalogue import all_names, runtime
from attn_export.runtimes.engines.onnx_reference import OnnxReference
from attn_export.runtimes.protocol import Limits
from attn_export.runtimes.run_options import Progress, RunOptions
from attn_export.schema import GraphFile
from attn_export.tensorfile import write_tensors

NAMES = [probe.name for probe in probes()]
WITH_NAN = ["NaN in hidden key", "NaN in hidden value", "NaN in a query"]


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch):
    """Let every runtime's process run some Python first."""

    def change(code: str) -> None:
        monkeypatch.setattr(process, "child_command", worker_after(code))
        monkeypatch.setattr(PyTorch, "unavailable", lambda _: "not run here")

    return change


# -- what is printed --------------------------------------------------------------------------


of_one_run = pytest.mark.xdist_group("printed by probe")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the table that the command prints, and its JSON."""
    folder = tmp_path_factory.mktemp("probe")
    done = run_command(["probe", "onnx-reference", "--json", "f.json"], folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, (folder / "f.json").read_text()


@of_one_run
def test_a_plain_table_of_80_columns_with_every_probe(printed: tuple[str, str]):
    table, _ = printed
    assert "\x1b" not in table
    lines = table.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [n for n in NAMES if not any(line.startswith(n) for line in lines)] == []
    assert "keys to P+i +" in table
    assert "+ not as PyTorch" in table


@of_one_run
def test_the_json_has_every_probe_and_names_no_folder(printed: tuple[str, str]):
    _, text = printed
    report = json.loads(text)
    assert report["format"] == "attn-export-fingerprint/1"
    assert report["runtime"] == "onnx-reference"
    assert [each["name"] for each in report["probes"]] == NAMES
    past = report["probes"][NAMES.index("causal, past")]
    assert past["differs_from"] == ["pytorch"]
    assert past["runtime"] == [
        {"form": "standard", "outcome": "ran", "reading": "keys to P+i", "detail": None}
    ]
    assert past["onnx"]["says"] == past["onnx"]["evaluator"]["reading"] == "keys to P+i"
    assert past["pytorch"]["reading"] == "keys to i"
    assert tempfile.gettempdir() not in text


def test_json_to_a_file_and_quiet(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PyTorch, "unavailable", lambda _: "not run here")
    file = tmp_path / "f.json"
    assert run(["probe", "onnx-reference", "--quiet", "--json", str(file)]) == 0
    assert (capsys.readouterr()) == ("", "")
    assert len(json.loads(file.read_text())["probes"]) == len(NAMES)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["onnx-reference"], 5, "onnx-reference cannot run here: it is away; pip install it"),
        (["ort_cpu"], 2, "unknown runtime 'ort_cpu'; did you mean ort-cpu? choose"),
        (["all"], 2, f"choose from {', '.join(all_names())}\n"),
        (["ort-cpu", "--json", "nowhere/f.json"], 2, "no such folder"),
        ([], 2, "RUNTIME"),
    ],
)
def test_an_impossible_probe_is_one_line_and_a_code(
    arguments, code, message, capsys, monkeypatch: pytest.MonkeyPatch
):
    away = "it is away; pip install it"
    monkeypatch.setattr(OnnxReference, "unavailable", lambda _: away)
    assert run(["probe", *arguments]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert message in said.err


# -- a runtime that dies -----------------------------------------------------------------------


def rows(capsys) -> dict[str, list[dict[str, str]]]:
    return {row["name"]: row["runtime"] for row in json.loads(capsys.readouterr().out)["probes"]}


def test_a_runtime_that_crashes_in_the_middle_still_has_a_full_table(changed, capsys):
    changed(
        "import numpy as np\n"
        "from attn_export.runtimes.protocol import Engine as E\n"
        "run = E.run\n"
        "def dies(self, inputs, bound):\n"
        "    floats = [x for x in inputs.values() if x.dtype.kind == 'f']\n"
        "    if any(np.isnan(x).any() for x in floats): os.abort()\n"
        "    return run(self, inputs, bound)\n"
        "E.run = dies"
    )
    assert run(["probe", "onnx-reference", "--json", "-"]) == 0
    found = rows(capsys)
    assert list(found) == NAMES
    for name in WITH_NAN:
        assert [each["outcome"] for each in found[name]] == ["crashed", "crashed"]
        assert "SIGABRT" in found[name][0]["detail"]
    assert found["infinite score"][0]["reading"] == "NaN in its row"
    assert [n for n in NAMES if found[n][0]["outcome"] == "crashed"] == WITH_NAN


ENDS = {
    "ran": "say(event='done', objection='')",
    "refused": "say(event='done', objection='for a reason')",
    "out of memory": "say(event='failed', outcome='out of memory', reason='for a reason', kind='')",
    "crashed": "os.abort()",
    "hung": "time.sleep(60)",
}
SCRIPT = """
import json, os, shutil, sys, time
def say(**event): print(json.dumps(event), flush=True)
cases = json.loads(sys.stdin.readline())["cases"]
if {loaded}: say(event="loaded", facts={{}})
for case in cases[:{serves}]:
    shutil.copytree({outputs!r}, case["outputs"])
    say(event="case", name=case["name"], outputs=1)
{end}
"""
"""A process that serves some cases, then ends in a given way."""


class Reported(Progress):
    """Progress that keeps the cases."""

    def __init__(self) -> None:
        self.cases: list[str] = []

    def advance(self, text: str) -> None:
        self.cases.append(text)


def run_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *script: tuple[int, Outcome, bool]
) -> tuple[list[Outcome], int]:
    """Return the outcomes of four cases, and the number of processes they took."""
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    write_tensors(outputs, "output", {"output": np.zeros(2)})
    steps, started = iter(script), []
    reported = Reported()

    def next_command(*_: object) -> list[str]:
        serves, outcome, loaded = next(steps)
        started.append(outcome)
        code = SCRIPT.format(loaded=loaded, serves=serves, outputs=str(outputs), end=ENDS[outcome])
        return [sys.executable, "-c", code]

    monkeypatch.setattr(process, "child_command", next_command)
    cases = [StoredCase(str(number), tmp_path, {}, "probe") for number in range(4)]
    run = RunOptions(
        (runtime("ort-cpu"),), frozenset(), limits=Limits(threads=1, seconds=2, memory_mib=None),
        progress=reported,
    )  # fmt: skip
    found = run_cases(run, tmp_path / "model.onnx", GraphFile("model.onnx"), cases, [])
    assert reported.cases == ["0", "1", "2", "3"]
    return [found["ort-cpu", case.name][0] for case in cases], len(started)


@pytest.mark.parametrize(
    ("script", "outcomes"),
    [
        ([(4, "ran", True)], ["ran"] * 4),
        ([(1, "crashed", True), (2, "ran", True)], ["ran", "crashed", "ran", "ran"]),
        ([(0, "crashed", True), (0, "hung", True), (2, "ran", True)],
         ["crashed", "hung", "ran", "ran"]),
        ([(3, "out of memory", True)], ["ran", "ran", "ran", "out of memory"]),
        ([(0, "refused", False)], ["refused"] * 4),
        ([(1, "crashed", True), (0, "crashed", False)], ["ran"] + ["crashed"] * 3),
        ([(4, "refused", True)], ["refused"] * 4),  # its results do not count
        ([(4, "crashed", True)], ["ran"] * 4),
    ],
)  # fmt: skip
def test_each_case_has_one_answer_however_processes_end(
    script, outcomes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert run_script(tmp_path, monkeypatch, *script) == (outcomes, len(script))


# -- PyTorch ----------------------------------------------------------------------------------


def test_without_torch_it_says_so_and_starts_nothing(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attn_export.parts.probe.pytorch.find_spec", lambda _: None)
    monkeypatch.setattr(PyTorch, "load", None)
    assert run(["probe", "onnx-reference", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    of_pytorch = {row["name"]: row["pytorch"] for row in report["probes"]}
    assert of_pytorch["causal, past"]["reading"] == "torch is not installed"
    assert of_pytorch["softcap"]["reading"] == "has no softcap"
    assert not any("pytorch" in row["differs_from"] for row in report["probes"])


def test_probes_run_without_torch(tmp_path: Path):
    stub = tmp_path / "torch"
    stub.mkdir()
    (stub / "__init__.py").write_text("raise ImportError('no torch here')\n")
    done = subprocess.run(
        command(["probe", "onnx-reference", "--json", "-"]),
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    row = json.loads(done.stdout)["probes"][0]
    assert row["reading"] == "keys to i"
    assert row["pytorch"]["outcome"] == "refused"
    assert "no torch here" in row["pytorch"]["detail"]
