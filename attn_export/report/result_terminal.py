"""Benchmarks, fingerprints and explanations in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite

from rich.console import Console

from attn_export.bench.measurements import BenchReport, Measured, WorkloadResult
from attn_export.diagnose.explanation import Explanation
from attn_export.diagnose.findings import Fingerprint, ProbeFinding, ProbeRow
from attn_export.dialect_names import PORTABLE
from attn_export.report.tables import (
    Column,
    Style,
    Styled,
    Table,
    in_mib,
    in_ms,
    reproduce_command,
    three_digits,
)
from attn_export.report.terminal import as_text, print_table, say

# -- benchmarks ---------------------------------------------------------------------------------


FIGURES = ("median ms", "p95 ms", "tokens/s", "MiB", "to peer", "of roof")
COLUMNS = (Column(""), *(Column(name, right=True) for name in FIGURES))
"""Columns of a benchmark. ``MiB`` is the growth of memory in the first run, ``to peer`` the median
divided by that of the best peer, ``of roof`` the result of `WorkloadResult.fraction`."""

STYLES: Mapping[str, Style] = {"ours": "bold", "peer": "", "roof": "dim"}


def print_bench(report: BenchReport, console: Console) -> None:
    """Print a table of each workload, and the candidates that did not run."""
    for workload in report.workloads:
        say(f"[bold]{as_text(workload.name)}[/]", console)
        ran = tuple(
            _bench_row(workload, measured) for measured in workload.measured if measured.ran
        )
        print_table(Table(COLUMNS, ran), console)
        for measured in workload.measured:
            if not measured.ran:
                colour = "red" if measured.role == "ours" else "yellow"
                outcome = f"[{colour}]{measured.outcome}[/]"
                say(f"{as_text(measured.name)} {outcome}: {as_text(measured.reason)}", console)
        say("", console)
    name = as_text(report.name)
    say(f"{name}: {report.threads} threads, {report.rounds} rounds in turn", console)


def _bench_row(workload: WorkloadResult, measured: Measured) -> tuple[Styled, ...]:
    is_roof = measured.role == "roof"
    rate = measured.flops_per_second or measured.bytes_per_second
    unit = "GFLOP/s" if measured.flops_per_second else "GB/s"
    style = STYLES[measured.role]
    cells = (
        measured.name,
        in_ms(measured),
        three_digits(measured.p95 * 1e3),
        f"{rate / 1e9:.0f} {unit}" if is_roof else three_digits(measured.tokens_per_second),
        in_mib(measured.growth),
        "" if is_roof else three_digits(workload.ratio(measured)),
        three_digits(workload.fraction(measured)),
    )
    return tuple(Styled(cell, style) for cell in cells)


# -- fingerprints -------------------------------------------------------------------------------


MARKS = {"onnx": "*", "pytorch": "+"}
"""Mark of a reading that differs from ONNX's or PyTorch's."""

WIDTHS = (19, 26, 17, 15)
"""Widths of the columns in characters: 80 with a space between two columns."""

LONGEST = 320
"""Largest number of characters of a note. The JSON file has all."""

LEGEND = (
    "* not as ONNX; + not as PyTorch, which runs scaled_dot_product_attention. "
    "(In brackets) ONNX says nothing, and its evaluator does this."
)
IN_PORTABLE = "portable: in operators of opset 18, where Attention does not run or is not as ONNX."
ONLY_PORTABLE = "It has no Attention: it was given portable operators of opset 18."


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
        cells = (row.probe, _runtime_cell(row, notes), _onnx_cell(row), _pytorch_cell(row, notes))
        rows.append([Styled(cell, "yellow" if row.differs else "") for cell in cells])
    print_table(Table(tuple(columns), tuple(rows), gap=1), console)
    for note, number in notes.items():
        console.print(f"{number}) {as_text(note)}", highlight=False)
    console.print(LEGEND, highlight=False)
    if any(len(row.here) > 1 for row in fingerprint.rows):
        console.print(IN_PORTABLE, highlight=False)
    elif {finding.dialect for row in fingerprint.rows for finding in row.here} <= {PORTABLE, ""}:
        console.print(ONLY_PORTABLE, highlight=False)


def _runtime_cell(row: ProbeRow, notes: dict[str, int]) -> str:
    marks = "".join(mark for name, mark in MARKS.items() if name in row.differs)
    lines = []
    for finding in row.here:
        is_portable = finding.dialect == PORTABLE and len(row.here) > 1
        prefix = f"{finding.dialect}: " if is_portable else ""
        suffix = f" {marks}" if marks and finding is row.effective else ""
        lines.append(prefix + _reading(finding, row.specified, notes) + suffix)
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
        return row.specified or "-"
    if not row.specified:
        return f"({finding.reading})"
    return (
        row.specified
        if finding.reading == row.specified
        else f"{row.specified} (evaluator: {finding.reading})"
    )


def _pytorch_cell(row: ProbeRow, notes: dict[str, int]) -> str:
    finding = row.pytorch
    return (
        finding.reading if finding.outcome == "not run" else _reading(finding, row.specified, notes)
    )


# -- explanations -------------------------------------------------------------------------------


MORE_CAUSES = 3
"""Largest number of alternative causes that are printed."""


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print the sentence of an explanation, then its evidence."""
    colour = "green" if explanation.fault == "none" else "red"
    say(f"[{colour}]{as_text(explanation.sentence)}[/]", console)
    for line in _evidence(explanation):
        say(as_text(line), console)


def _evidence(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of the evidence of an explanation."""
    for cause in explanation.causes[1 : 1 + MORE_CAUSES]:
        yield f"or: {cause.sentence}"
    if (first := explanation.first) is not None:
        says = "".join(f"; {text}" for text in (first.relation, first.says) if text)
        size = f", relative error {first.error:.1e}" if isfinite(first.error) else ""
        yield f"first wrong node: {first.location}{size}{says}"
    for pattern in explanation.pattern:
        yield f"pattern: {pattern}"
    for experiment in explanation.experiments:
        failure = "could not be run: " if experiment.passed is None else ""
        yield f"tried: {experiment.name}: {failure}{experiment.result}"
    if explanation.smallest:
        sizes = ", ".join(f"{axis} {size}" for axis, size in explanation.smallest.items())
        yield f"smallest case: {sizes}"
    for part in explanation.distance:
        yield f"distance from the float model: {part}"
    for note in explanation.notes:
        yield f"note: {note}"
    if explanation.folder is not None and explanation.smallest:
        yield f"reproduce: {reproduce_command(explanation.folder)}"
