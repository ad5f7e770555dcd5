"""The report in a terminal, in a pipe, and where colours are not wanted."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from conftest import command
from reports import GRAPHS, clean, mixed, run, verdict
from rich.console import Console

from attn_export.errors import printable
from attn_export.report.tables import status_text
from attn_export.report.terminal import print_report
from attn_export.results import Detail, Report

FORMS = ("model.onnx", "model.portable.onnx", "model.ort.onnx", GRAPHS[1], "in float32")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
NAME = "shape_B2_P17_L5_and_a_name_that_is_longer_than_any_that_there_is"


def all_wrong(*runtimes: str, graphs: tuple[str, ...] = FORMS) -> Report:
    """Return a report with every figure at its widest."""
    runs = tuple(run(name, graph=graph) for name in runtimes for graph in graphs)
    verdicts = tuple(
        verdict(r.runtime, "failed", 999.9999, graph=r.graph, case=NAME, max_abs=1e-7, max_rel=1e-6,
                message="relative error 1.0e-02 over the whole output, tolerance 1.0e-05")
        for r in runs
    )  # fmt: skip
    return Report("wide", runs, verdicts, {}, (f"a note on {NAME} that goes on and on and on",))


WIDE = {
    "one": all_wrong("onnx-reference"),
    "two": all_wrong("onnx-reference", "ort-cuda"),
    "many": all_wrong("onnx-reference", "ort-cpu", "openvino", "ort-cuda"),
    "mixed": mixed(),
    "clean": clean(),
}


def printed(report: Report, *, terminal: bool, verbose: bool = False) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=80, force_terminal=terminal), verbose=verbose)
    return out.getvalue()


@pytest.mark.parametrize("report", WIDE.values(), ids=WIDE)
def test_it_fits_80_columns_and_no_figure_or_name_is_cut_off(report: Report):
    said = COLOUR.sub("", printed(report, terminal=True))
    assert all(len(line) <= 80 for line in said.splitlines()), said
    assert "…" not in said.replace("… and", "")
    for of in report.runs:
        assert of.runtime in said
    if report.name == "wide":
        assert said.count("1000.000") == len(report.runs)


def test_a_file_name_is_never_broken_across_lines():
    name = "x" * 90 + ".onnx"
    said = COLOUR.sub("", printed(all_wrong("onnx-reference", graphs=(name,)), terminal=True))
    assert said.count(name) == 2  # in the table and in the failure
    assert "1000.000" in said


@pytest.mark.parametrize("report", WIDE.values(), ids=WIDE)
def test_in_a_pipe_each_message_is_one_plain_line(report: Report):
    said = printed(report, terminal=False, verbose=True)
    assert "\x1b" not in said
    for of in [v for v in report.verdicts if v.status != "passed"]:
        assert any(
            line.startswith(status_text(of.status))
            and of.case in line
            and line.endswith(printable(of.message))
            for line in said.splitlines()
        )  # fmt: skip


def test_a_failure_names_runtime_form_case_and_output():
    said = printed(mixed(), terminal=False, verbose=True)
    assert "failed bad standard B2_L3 output: relative error 1e-2" in said


def test_failures_of_a_kind_are_one_line_with_the_worst():
    cases = [(f"{kind}_{n}", n) for kind in ("shape", "decode") for n in (1, 3, 2)]
    verdicts = [verdict("bad", "failed", float(n), case=case) for case, n in cases]
    report = Report("m", (run("bad"),), (*verdicts, verdict("bad", "passed", 0.5)), {}, ())
    lines = [line for line in printed(report, terminal=False).splitlines() if "worst" in line]
    starts = [line.partition(": ")[0] for line in lines]
    assert starts == [f"failed bad standard {k}, 3 cases, output" for k in ("shape", "decode")]
    assert [line.partition(": ")[2][:15] for line in lines] == [
        "worst shape_3 o",
        "worst decode_3 ",
    ]


def test_failures_of_a_layer_are_a_line_for_each_phase_below_what_to_do():
    names = {
        "prefill": ("shape_B1_P0_L5", "sharp_left_padding_B2_P0_L1"),
        "decode": ("shape_B1_P5_L1", "right_padding_B3_P17_L1"),
        "chunk": ("shape_B1_P5_L2", "tiny_values_B2_P9_L7"),
        "special": ("base", "nan_in_rows"),
        "changed": ("changed_query", "changed_attn_mask"),
        "far_past": ("far_past_1040_L3", "far_past_2047"),
        "": ("shape_batch2_seq5", "outliers_B3_L2"),
    }
    cases = [case for pair in zip(*names.values(), strict=True) for case in pair]
    verdicts = tuple(verdict("bad", "failed", 2.0, case=case) for case in cases)
    report = Report("m", (run("bad"),), verdicts, {}, (), explanations=("the graph is wrong",))
    said = printed(report, terminal=False).splitlines()
    assert said[:2] == [
        "why: the graph is wrong",
        "next: correct the export at the place named above, and compare again.",
    ]
    starts = [line.partition(": ")[0] for line in said if ": worst" in line]
    assert starts == [f"failed bad standard {k}, 2 cases, output".replace(" ,", ",") for k in names]


def test_a_note_is_cut_and_a_detail_is_counted_but_for_verbose():
    notes = ("short", f"long {'word ' * 40}", Detail("what was tried"))
    report = Report("m", (run("good"),), (verdict("good", "passed", 0.5),), {}, notes)
    said = printed(report, terminal=False)
    shown = [line for line in said.splitlines() if line.startswith("note: ")]
    assert [len(line) <= 126 for line in shown] == [True, True]
    assert "2 notes in full: --verbose" in said
    said = printed(report, terminal=False, verbose=True)
    assert [f"note: {note.strip()}" in said for note in notes] == [True] * 3
    assert Report.joined("both", {"part": report}).notes[2] == "part: what was tried"
    assert isinstance(Report.joined("both", {"part": report}).notes[2], Detail)


def in_terminal(words: list[str], **environment: str) -> str:
    """Return the output of a command on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    environment = {**plain, "TERM": "xterm-256color", **environment}
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # Linux says so where the other side is closed
                break
            if not part:
                break
            said += part
    os.close(ours)
    return said.decode()


def test_the_command_line_is_coloured_in_a_terminal_only_and_honours_no_color(bundle: Path):
    words = command(("verify", bundle, "--runtime", "ort-cpu"))
    green = re.compile(r"\x1b\[[\d;]*3\dm")
    coloured = in_terminal(words)
    assert green.search(coloured)
    assert "\x1b[32mpassed" in coloured
    assert not green.search(in_terminal(words, NO_COLOR="1"))
    piped = subprocess.run(words, capture_output=True, text=True)
    assert "\x1b" not in piped.stdout + piped.stderr
    shown = coloured.rpartition("\x1b[2K")[2]  # after the progress bar
    assert all(len(COLOUR.sub("", line)) <= 80 for line in shown.splitlines())
