"""Baselines: an error that grew by more than a factor fails, even within the tolerance."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import Cli

from attn_export import verify
from attn_export.errors import OutputError, UsageError
from attn_export.judge.gate import FLOOR, apply_baseline, read_baseline, write_baseline
from attn_export.results import Report, RuntimeRun, Verdict
from attn_export.system_info import processor


def report(share: float | None, version: str = "1.0", runtime: str = "some") -> Report:
    run = RuntimeRun(runtime, "model.onnx", "ran", "", required=True, facts={"version": version})
    verdict = Verdict(runtime, "model.onnx", "B1", "output", "passed", worst=share)
    return Report("test", (run,), (verdict,), {}, ())


@pytest.mark.parametrize(
    ("before", "now", "passes"),
    [
        (0.1, 0.1, True),
        (0.1, 0.39, True),
        (0.1, 0.41, False),
        (0.1, 0.0, True),
        (0.0, 4 * FLOOR, True),
        (0.0, 4.1 * FLOOR, False),
        (None, 0.9, True),
    ],
)
def test_more_than_4_times_worse_fails(before, now, passes, tmp_path: Path):
    write_baseline(tmp_path / "b.json", report(before))
    found = apply_baseline(report(now), read_baseline(tmp_path / "b.json"))
    assert found.passed == passes
    assert found.exit_code == (0 if passes else 6)


def test_the_change_of_versions_is_reported(tmp_path: Path):
    write_baseline(tmp_path / "b.json", report(0.1))
    baseline = read_baseline(tmp_path / "b.json")
    (verdict,) = apply_baseline(report(0.5, "1.1"), baseline).verdicts
    assert verdict.message == (
        "error / tolerance is 0.5 and was 0.1 in the baseline: more than 4 times worse; "
        f"some 1.0 on {processor()} before, 1.1 on {processor()} now"
    )
    (verdict,) = apply_baseline(report(0.5), baseline).verdicts
    assert verdict.message.endswith(f"1.0 on {processor()} as before")


def test_another_processor_is_reported_and_an_emulated_one_is_the_same(tmp_path: Path):
    for name, says in {
        "some": f"some 1.0 on another CPU before, 1.0 on {processor()} now",
        "ort-cpu@haswell": "; 1.0 as before",
    }.items():
        path = tmp_path / name
        write_baseline(path, report(0.1, runtime=name))
        path.write_text(path.read_text().replace(processor(), "another CPU"))
        (verdict,) = apply_baseline(report(0.5, runtime=name), read_baseline(path)).verdicts
        assert verdict.message.endswith(says)


def test_a_failed_output_keeps_its_own_message(tmp_path: Path):
    write_baseline(tmp_path / "b.json", report(0.1))
    wrong = report(20.0)
    failed = dataclasses.replace(wrong.verdicts[0], status="failed", message="off")
    wrong = dataclasses.replace(wrong, verdicts=(failed,))
    assert apply_baseline(wrong, read_baseline(tmp_path / "b.json")).verdicts == (failed,)


def test_a_runtime_that_was_not_there_is_a_note_and_update_adds_it(tmp_path: Path):
    path = tmp_path / "b.json"
    write_baseline(path, report(0.1))
    found = apply_baseline(report(0.9, runtime="new"), read_baseline(path))
    assert found.passed
    assert found.notes == ("not in the baseline: new/model.onnx; --update adds it",)
    write_baseline(path, report(0.9, runtime="new"))
    assert set(read_baseline(path).errors) == {"some/model.onnx", "new/model.onnx"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "attn-export-baseline/1"}'])
def test_another_file_is_refused_and_left_alone(text: str, tmp_path: Path):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"b\.json"):
        read_baseline(path)
    with pytest.raises(UsageError, match=r"b\.json"):
        write_baseline(path, report(0.1))
    assert path.read_text() == text
    with pytest.raises(UsageError, match="there is no baseline"):
        read_baseline(tmp_path / "none.json")
    with pytest.raises(OutputError, match="cannot write"):
        write_baseline(tmp_path / "no" / "b.json", report(0.1))
    assert [p.name for p in tmp_path.iterdir()] == ["b.json"]


def test_a_bundle_against_its_own_past(bundle: Path, tmp_path: Path, cli: Cli):
    path = tmp_path / "b.json"
    words = ("verify", bundle, "--runtime", "ort-cpu", "--baseline", path)
    done = cli(*words)
    assert done.returncode == 2
    assert "--update makes one" in done.stderr
    assert cli(*words, "--update").returncode == 0
    assert cli(*words).returncode == 0
    content = json.loads(path.read_text())
    errors = content["errors"]["ort-cpu/model.onnx"]
    # As if this engine had been much more precise before.
    content["errors"]["ort-cpu/model.onnx"] = dict.fromkeys(errors, 0.0)
    path.write_text(json.dumps(content))
    worse = verify(bundle, runtimes=["ort-cpu"], baseline=path)
    failed = [v for v in worse.verdicts if v.status == "failed"]
    assert {f"{v.case}/{v.output}" for v in failed} == {
        name for name, share in errors.items() if share > 4 * FLOOR
    }
    assert failed
    assert cli("verify", bundle, "--update").returncode == 2
