"""The summary of a CI job's step, and its annotations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from reports import clean, mixed

from attn_export.report.ci import github_annotations, to_markdown
from attn_export.report.tables import UNMEASURED


def test_verdict_first_then_figures_then_what_is_wrong():
    text = to_markdown(mixed())
    assert text.startswith("## test & \\<more\\>: **failed** (exit code 6)\n")
    assert "| good | model.onnx | 1/1 | 0.250 | 1.0e-07 |" in text
    assert f"| bad | model.onnx | **0/3** | 12.500 | {UNMEASURED} | **FAILED** |" in text
    assert (
        "- failed: bad, standard, B2\\_L3, output: relative error 1e-2 over \\<the\\> whole \\|"
        in text
    )
    assert "- gone, standard: not run, **required**: it is not installed" in text
    assert "- good, ort.decode: not run, not required: it has no TensorScatter" in text
    assert "- a note with \\`code\\`" in text


def test_a_report_that_passed_is_the_table_alone():
    text = to_markdown(clean())
    assert text.startswith("## clean: passed\n")
    assert "###" not in text


def test_an_annotation_for_each_failure_on_one_line():
    lines = github_annotations(mixed())
    assert len(lines) == 4 + 2
    assert all(line.startswith("::error title=") and "\n" not in line for line in lines)
    assert "100 %25" in next(line for line in lines if "dead" in line)
    assert lines[0].startswith("::error title=test & <more>%3A bad%2C standard%2C B2_L3::output: ")
    assert github_annotations(clean()) == []


def test_a_job_on_github_has_both_and_json_on_stdout_stays_json(bundle: Path, tmp_path: Path):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    command = [sys.executable, "-m", "attn_export", "verify", str(bundle), "--runtime", "ort-cuda"]
    environment = {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_ACTIONS": "true", "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 5  # no GPU, and it is required
    assert "::error title=small%3A ort-cuda%2C standard::not run" in done.stdout
    assert summary.read_text().startswith("before\n## small: **failed** (exit code 5)")
    done = subprocess.run(
        [*command, "--json", "-"], env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith("{")
    assert "::error" not in done.stdout
