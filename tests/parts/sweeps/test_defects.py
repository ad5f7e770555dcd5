"""Bisection: the release in which the verdict on a graph changed, and the causes that are shown."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from attn_export import AttentionSpec, build
from attn_export.commands.main import run
from attn_export.errors import UsageError
from attn_export.parts.sweeps.releases import bisect, plain_cause

CAUSES = {
    "c, model.onnx: the graph is right, c is not: it is slow": "it is slow",
    "c, model.onnx: the graph is right, c is wrong: it is slow": "it is slow",
    "relative error 2.4e+00 over the whole output": "relative error 2.4e+00 over the whole output",
    "ort-cpu, m.onnx: no known fault (see above)": "no known fault",
    "": "",
}


@pytest.mark.parametrize("cause", CAUSES)
def test_causes_are_shown_without_names_of_files(cause: str):
    assert plain_cause(cause) == CAUSES[cause]


RELEASES = ["ort-cpu==1.28.0", "ort-cpu==1.27.0"]


def test_the_first_release_that_passes_is_found_by_running_them(need, bundle: Path, capsys):
    for release in RELEASES:
        need(release)
    assert run(["bisect", str(bundle), "--good", "1.28.0", "--bad", "1.27.0"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "ort-cpu==1.28.0 is the first that passes; ort-cpu==1.27.0 failed"


def test_the_output_of_an_installation_does_not_mix_with_the_progress_bar(
    bundle: Path, tmp_path: Path
):
    (tmp_path / "onnxruntime").mkdir()
    links = [f'<a href="onnxruntime-9.9.{n}-py3-none-any.whl">x</a>' for n in (0, 1)]
    (tmp_path / "onnxruntime/index.html").write_text("\n".join(links))
    terminal, other_end = pty.openpty()
    command = [sys.executable, "-m", "attn_export", "bisect", bundle, "--install"]
    process = subprocess.Popen(
        [*command, "--good", "9.9.1", "--bad", "9.9.0"], stdin=other_end, stderr=other_end,
        env={**os.environ, "TERM": "xterm", "PIP_INDEX_URL": tmp_path.as_uri()},
    )  # fmt: skip
    os.close(other_end)
    said = b""
    with contextlib.suppress(OSError):  # Linux's end of file
        while part := os.read(terminal, 2**16):
            said += part
    os.close(terminal)
    assert process.wait() == 5
    before, line, after = said.decode().partition("installing onnxruntime==9.9.0")
    assert line, said
    assert before.endswith("\x1b[2K"), "the bar is erased before the line"
    written, _, error = after.partition("attn-export: pip install")
    assert "ERROR:" in written
    assert "failed; what it said is above" in error
    assert "\u2501" not in written, "no bar is drawn until the installation has ended"


def test_two_releases_of_one_verdict_are_refused(need, tmp_path: Path):
    for release in RELEASES:
        need(release)
    spec = AttentionSpec(embed_dim=16, num_heads=2)
    build(spec, tmp_path / "plain", dialects=["standard"], runtimes=["ort-cpu"])
    with pytest.raises(UsageError, match=r"1\.27\.0 passed and .*1\.28\.0 passed"):
        bisect(tmp_path / "plain", RELEASES, "standard")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--runtime", "onnx-reference"], "has no releases"),
        (["--good", "x", "--bad", "1.27.0"], "is not a version"),
        (["--dialect", "x", "--good", "1.28.0", "--bad", "1.27.0"], "no graph in the dialect 'x'"),
        (["--good", "1.27.0", "--bad", "1.27.0"], "there are 1 releases"),
        (["--good", "0.1.0", "--bad", "0.2.0"], "not installed"),
    ],
)
def test_an_impossible_bisection_is_refused_in_one_line(arguments, says: str, bundle: Path, capsys):
    assert run(["bisect", str(bundle), *arguments]) in (2, 5)
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
