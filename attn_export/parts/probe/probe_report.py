"""Fingerprints of runtimes as JSON, and in the terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from attn_export.dialect_names import PORTABLE
from attn_export.parts.probe.findings import Fingerprint, ProbeFinding, ProbeRow
from attn_export.report.tables import Column, Styled, Table
from attn_export.report.terminal import as_text, print_table

_FINGERPRINT_FORMAT = "attn-export-fingerprint/1"


def probe_to_json(fingerprint: Fingerprint) -> str:
    """Return the fingerprint as JSON text, with a newline at the end."""
    content = {
        "format": _FINGERPRINT_FORMAT,
        "runtime": fingerprint.runtime,
        "version": fingerprint.version,
        "environment": fingerprint.environment,
        "probes": [_row(row) for row in fingerprint.rows],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _row(row: ProbeRow) -> dict[str, Any]:
    return {
        "name": row.probe.name,
        "about": row.probe.about,
        "reading": row.effective.reading,
        "differs_from": list(row.differs),
        "runtime": [_finding(finding) for finding in row.here],
        "onnx": {
            "says": row.probe.specified or None,
            "evaluator": None if row.evaluator is None else _finding(row.evaluator),
        },
        "pytorch": _finding(row.pytorch),
    }


def _finding(finding: ProbeFinding) -> dict[str, str | None]:
    return {
        "form": finding.dialect or None,
        "outcome": finding.outcome,
        "reading": finding.reading,
        "detail": finding.detail or None,
    }


# -- in the terminal ----------------------------------------------------------------------------

_MARKS = {"onnx": "*", "pytorch": "+"}
"""Mark of a reading that differs from ONNX's or PyTorch's."""

WIDTHS = (19, 26, 17, 15)
"""Widths of the columns in characters: 80 with a space between two columns."""

LONGEST = 320
"""Largest number of characters of a note. The JSON file has all."""

_LEGEND = (
    "* not as ONNX; + not as PyTorch, which runs scaled_dot_product_attention. "
    "(In brackets) ONNX says nothing, and its evaluator does this."
)
_IN_PORTABLE = "portable: in operators of opset 18, where Attention does not run or is not as ONNX."
_ONLY_PORTABLE = "It has no Attention: it was given portable operators of opset 18."


def print_probe(fingerprint: Fingerprint, console: Console) -> None:
    """Print the table of a fingerprint, its notes, and the legend of its marks."""
    versions = fingerprint.environment.get("versions", {})
    assert isinstance(versions, dict)
    notes: dict[str, int] = {}
    headings = (
        "probe", f"{fingerprint.runtime} {fingerprint.version}", f"ONNX {versions.get('onnx', '')}",
        f"PyTorch {versions.get('torch', '')}".split("+")[0],
    )  # fmt: skip
    columns = (Column(h, width=width) for h, width in zip(headings, WIDTHS, strict=True))
    rows = []
    for row in fingerprint.rows:
        cells = (
            row.probe.name,
            _runtime_cell(row, notes),
            _onnx_cell(row),
            _pytorch_cell(row, notes),
        )
        rows.append([Styled(cell, "yellow" if row.differs else "") for cell in cells])
    print_table(Table(tuple(columns), tuple(rows), gap=1), console)
    for note, number in notes.items():
        console.print(f"{number}) {as_text(note)}", highlight=False)
    console.print(_LEGEND, highlight=False)
    if any(len(row.here) > 1 for row in fingerprint.rows):
        console.print(_IN_PORTABLE, highlight=False)
    elif {finding.dialect for row in fingerprint.rows for finding in row.here} <= {PORTABLE, ""}:
        console.print(_ONLY_PORTABLE, highlight=False)


def _runtime_cell(row: ProbeRow, notes: dict[str, int]) -> str:
    marks = "".join(mark for name, mark in _MARKS.items() if name in row.differs)
    lines = []
    for finding in row.here:
        is_portable = finding.dialect == PORTABLE and len(row.here) > 1
        prefix = f"{finding.dialect}: " if is_portable else ""
        suffix = f" {marks}" if marks and finding is row.effective else ""
        lines.append(prefix + _reading(finding, row.probe.specified, notes) + suffix)
    return "\n".join(lines)


def _reading(finding: ProbeFinding, onnx_reading: str, notes: dict[str, int]) -> str:
    """Return a reading, with the number of a note if it has details and is not that of ONNX."""
    if not finding.detail or finding.reading == onnx_reading:
        return finding.reading
    note = f"{finding.reading}: {finding.detail}"
    note = note if len(note) <= LONGEST else f"{note[: LONGEST - 2]} …"
    return f"{finding.reading} {notes.setdefault(note, len(notes) + 1)})"


def _onnx_cell(row: ProbeRow) -> str:
    finding = row.evaluator
    if finding is None:
        return row.probe.specified or "-"
    if not row.probe.specified:
        return f"({finding.reading})"
    return (
        row.probe.specified
        if finding.reading == row.probe.specified
        else f"{row.probe.specified} (evaluator: {finding.reading})"
    )


def _pytorch_cell(row: ProbeRow, notes: dict[str, int]) -> str:
    finding = row.pytorch
    return (
        finding.reading
        if finding.outcome == "not run"
        else _reading(finding, row.probe.specified, notes)
    )
