"""Benchmarks, fingerprints and explanations in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite

from rich.console import Console

from attn_export.bench.measurements import BenchReport, Measured, WorkloadResult
from attn_export.diagnose.explanation import Explanation
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
