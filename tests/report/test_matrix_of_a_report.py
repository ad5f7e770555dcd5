"""Runtime × graph, from a report."""

from __future__ import annotations

import io

from reports import mixed
from rich.console import Console

from attn_export.report.tables import UNMEASURED, graph_label, matrix
from attn_export.report.terminal import print_report


def test_passed_failed_crashed_missing_and_unsupported_are_distinguished():
    found = matrix(mixed())
    assert found.graphs == ("standard", "ort.decode")
    cells = {key: (cell.colour, cell.text) for key, cell in found.cells.items()}
    assert cells == {
        ("good", "standard"): ("green", "0.250"),
        ("good", "ort.decode"): ("grey", UNMEASURED),
        ("bad", "standard"): ("red", "FAILED 12.500"),
        ("dead", "standard"): ("red", "crashed"),
        ("gone", "standard"): ("red", UNMEASURED),
    }


def test_whatever_is_not_green_has_its_reason():
    assert matrix(mixed()).reasons() == {
        "good: it has no TensorScatter": ["ort.decode"],
        "bad: 3 cases failed": ["standard"],
        "dead: ended with signal SIGSEGV: <core> & 100 %": ["standard"],
        "gone: it is not installed": ["standard"],
    }


def test_with_many_runtimes_the_terminal_shows_the_matrix():
    out = io.StringIO()
    print_report(mixed(), Console(file=out, width=80))
    said = out.getvalue()
    assert "worst error / tolerance" in said
    assert "good: it has no TensorScatter (ort.decode)" in said
    *lines, verdict = said.splitlines()  # a sentence is one line, as long as it is
    assert all(len(line) <= 80 for line in lines if not line.startswith("failed "))
    assert verdict.endswith("(exit 6)")


def test_a_graph_is_called_by_its_form():
    assert [graph_label(name) for name in ("model.onnx", "model.portable.onnx", "in float32")] == [
        "standard", "portable", "in float32",
    ]  # fmt: skip
