"""Benchmarks, fingerprints and explanations in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite

from rich.console import Console

from attn_export.bench.measurements import BenchReport, Contest, Measured
from attn_export.diagnose.explanation import Experiment, Explanation
from attn_export.diagnose.findings import Fingerprint, ProbeFinding, ProbeRow
from attn_export.dialect_names import PORTABLE
from attn_export.report.tables import Column, Style, Styled, Table, in_mib, in_ms, three_digits
from attn_export.report.terminal import as_text, print_table, say

# -- A benchmark in the terminal: 80 columns, plain where it is piped ---------------------------


FIGURES = ("median ms", "p95 ms", "tokens/s", "MiB", "to peer", "of roof")
COLUMNS = (Column(""), *(Column(name, right=True) for name in FIGURES))
"""Memory: by how much the first run grew; ``to peer``: the median over the best peer's."""

STYLES: Mapping[str, Style] = {"ours": "bold", "peer": "", "roof": "dim"}


def print_bench(report: BenchReport, console: Console) -> None:
    """Print one table for each contest, and what did not run.

    Args:
        report: Results of the benchmark.
        console: The console to print on.
    """
    for contest in report.contests:
        say(f"[bold]{as_text(contest.name)}[/]", console)
        ran = tuple(_row(contest, measured) for measured in contest.measured if measured.ran)
        print_table(Table(COLUMNS, ran), console)
        for measured in contest.measured:
            if not measured.ran:
                color = "red" if measured.role == "ours" else "yellow"
                outcome = f"[{color}]{measured.outcome}[/]"
                say(f"{as_text(measured.name)} {outcome}: {as_text(measured.reason)}", console)
        say("", console)
    name = as_text(report.name)
    say(f"{name}: {report.threads} threads, {report.rounds} rounds in turn", console)


def _row(contest: Contest, m: Measured) -> tuple[Styled, ...]:
    roof = m.role == "roof"
    rate = m.flops_per_second or m.bytes_per_second
    unit = "GFLOP/s" if m.flops_per_second else "GB/s"
    style = STYLES[m.role]
    cells = (
        m.name,
        in_ms(m),
        three_digits(m.p95 * 1e3),
        f"{rate / 1e9:.0f} {unit}" if roof else three_digits(m.tokens_per_second),
        in_mib(m.growth),
        "" if roof else three_digits(contest.ratio(m)),
        three_digits(contest.fraction(m)),
    )
    return tuple(Styled(cell, style) for cell in cells)


# -- A fingerprint in the terminal: 80 columns, plain where it is piped -------------------------


MARKS = {"onnx": "*", "pytorch": "+"}
WIDTHS = (19, 26, 17, 15)
"""Widths of the columns; with one space after each but the last, 80."""

LONGEST = 320
"""Characters of a note; --json FILE has all."""

LEGEND = (
    "* not as ONNX; + not as PyTorch, which is asked for scaled_dot_product_attention. "
    "(In brackets) ONNX says nothing, and its evaluator does this."
)
IN_PORTABLE = "portable: in operators of opset 18, where Attention does not run or is not as ONNX."
ONLY_PORTABLE = "It has no Attention: it was given portable operators of opset 18."


def print_probe(found: Fingerprint, console: Console) -> None:
    """Print the table, its notes and the legend of its marks.

    Args:
        found: The fingerprint.
        console: The console to print on.
    """
    versions = found.environment.get("versions", {})
    assert isinstance(versions, dict)
    notes: dict[str, int] = {}
    heads = (
        "probe", f"{found.runtime} {found.version}", f"ONNX {versions.get('onnx', '')}",
        f"PyTorch {versions.get('torch', '')}".split("+")[0],
    )  # fmt: skip
    columns = (Column(h, width=width) for h, width in zip(heads, WIDTHS, strict=True))
    rows = []
    for row in found.rows:
        cells = (row.probe, _here(row, notes), _onnx(row), _pytorch(row, notes))
        rows.append([Styled(cell, "yellow" if row.differs else "") for cell in cells])
    print_table(Table(tuple(columns), tuple(rows), gap=1), console)
    for note, number in notes.items():
        console.print(f"{number}) {as_text(note)}", highlight=False)
    console.print(LEGEND, highlight=False)
    if any(len(row.here) > 1 for row in found.rows):
        console.print(IN_PORTABLE, highlight=False)
    elif {each.dialect for row in found.rows for each in row.here} <= {PORTABLE, ""}:
        console.print(ONLY_PORTABLE, highlight=False)


def _here(row: ProbeRow, notes: dict[str, int]) -> str:
    marks = "".join(mark for name, mark in MARKS.items() if name in row.differs)
    lines = []
    for each in row.here:
        form = f"{each.dialect}: " if each.dialect == PORTABLE and len(row.here) > 1 else ""
        mark = f" {marks}" if marks and each is row.effective else ""
        lines.append(form + _reading(each, row.says, notes) + mark)
    return "\n".join(lines)


def _reading(each: ProbeFinding, says: str, notes: dict[str, int]) -> str:
    """Return the reading, with a note number if its detail goes beyond the ONNX reading."""
    if not each.detail or each.reading == says:
        return each.reading
    note = f"{each.reading}: {each.detail}"
    note = note if len(note) <= LONGEST else f"{note[: LONGEST - 2]} …"
    return f"{each.reading} {notes.setdefault(note, len(notes) + 1)})"


def _onnx(row: ProbeRow) -> str:
    found = row.evaluator
    if found is None:
        return row.says or "-"
    if not row.says:
        return f"({found.reading})"
    return row.says if found.reading == row.says else f"{row.says} (evaluator: {found.reading})"


def _pytorch(row: ProbeRow, notes: dict[str, int]) -> str:
    found = row.pytorch
    return found.reading if found.outcome == "not run" else _reading(found, row.says, notes)


# -- an explanation in the terminal -------------------------------------------------------------


MORE_CAUSES = 3


def print_explanation(found: Explanation, console: Console) -> None:
    """Print the sentence first, then its evidence.

    Args:
        found: The explanation.
        console: The console to print on.
    """
    colour = "green" if found.fault == "none" else "red"
    say(f"[{colour}]{as_text(found.sentence)}[/]", console)
    for line in lines(found):
        say(as_text(line), console)


def lines(found: Explanation) -> Iterator[str]:
    """Yield the evidence of the sentence, line by line."""
    for cause in found.causes[1 : 1 + MORE_CAUSES]:
        yield f"or: {cause.sentence}"
    if found.first is not None:
        line = f" ({found.first.line})" if found.first.line else ""
        says = f"; {found.first.says}" if found.first.says else ""
        size = f", relative error {found.first.error:.1e}" if isfinite(found.first.error) else ""
        yield f"first wrong node: {found.first.operator} {found.first.node}{line}{size}{says}"
    for said in found.pattern:
        yield f"pattern: {said}"
    for experiment in found.experiments:
        yield f"tried: {experiment.name}: {_outcome(experiment)}"
    if found.smallest:
        sizes = ", ".join(f"{axis} {size}" for axis, size in found.smallest.items())
        yield f"smallest case: {sizes}"
    for part in found.distance:
        yield f"distance from the float model: {part}"
    for note in found.notes:
        yield f"note: {note}"
    if found.folder is not None and found.smallest:
        yield f"reproduce: python {found.folder}/reproduce.py"


def _outcome(experiment: Experiment) -> str:
    return (
        f"could not be run: {experiment.result}" if experiment.mended is None else experiment.result
    )
