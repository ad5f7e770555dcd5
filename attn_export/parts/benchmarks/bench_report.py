"""Reports of `bench`: in the terminal, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from attn_export.parts.benchmarks.measurements import BenchReport, Measured, WorkloadResult
from attn_export.report.data import finite
from attn_export.report.tables import UNMEASURED, Column, Style, Styled, Table, in_mib
from attn_export.report.terminal import as_text, print_table, say

# -- figures ------------------------------------------------------------------------------------


def three_digits(value: float) -> str:
    """Format a number with about three digits and no exponent; NaN and infinities are a dash."""
    if not math.isfinite(value):
        return UNMEASURED
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 4)}f}"


def in_ms(measured: Measured | None) -> str:
    """Format the median in milliseconds with three digits, or a dash."""
    if measured is None or not measured.ran:
        return UNMEASURED
    return three_digits(measured.median * 1e3)


# -- tables -------------------------------------------------------------------------------------


FIGURES = ("median ms", "p95 ms", "tokens/s", "MiB", "to peer", "of roof")
COLUMNS = (Column(""), *(Column(name, right=True) for name in FIGURES))
"""Columns of a benchmark. ``MiB`` is the growth of memory in the first run, ``to peer`` the median
divided by that of the best peer, ``of roof`` the result of `WorkloadResult.fraction`."""

_ALONE = (*COLUMNS[:-2], Column("peak MiB", right=True))
"""Columns without peers and rooflines, with the most memory of the process."""

_STYLES: Mapping[str, Style] = {"ours": "bold", "peer": "", "roof": "dim"}


def print_bench(report: BenchReport, console: Console) -> None:
    """Print a table of each workload, and the candidates that did not run."""
    for workload in report.workloads:
        say(f"[bold]{as_text(workload.name)}[/]", console)
        alone = all(measured.role == "ours" for measured in workload.measured)
        ran = tuple(
            _bench_row(workload, measured, alone=alone)
            for measured in workload.measured
            if measured.ran
        )
        print_table(Table(_ALONE if alone else COLUMNS, ran), console)
        for measured in workload.measured:
            if not measured.ran:
                colour = "red" if measured.role == "ours" else "yellow"
                outcome = f"[{colour}]{measured.outcome}[/]"
                say(f"{as_text(measured.name)} {outcome}: {as_text(measured.reason)}", console)
        say("", console)
    if report.left_out:
        say(f"no time was left for: {as_text('; '.join(report.left_out))}", console)
    if report.busy:
        say(f"[yellow]warning:[/] {as_text(report.busy)}", console)
    name = as_text(report.name)
    say(f"{name}: {report.threads} threads, {report.rounds} rounds in turn", console)


def _bench_row(workload: WorkloadResult, measured: Measured, *, alone: bool) -> tuple[Styled, ...]:
    is_roof = measured.role == "roof"
    rate = measured.flops_per_second or measured.bytes_per_second
    unit = "GFLOP/s" if measured.flops_per_second else "GB/s"
    style = _STYLES[measured.role]
    cells = [
        measured.name,
        in_ms(measured),
        three_digits(measured.p95 * 1e3),
        f"{rate / 1e9:.0f} {unit}" if is_roof else three_digits(measured.tokens_per_second),
        in_mib(measured.growth),
    ]
    if alone:
        cells.append(in_mib(measured.peak))
    else:
        cells.append("" if is_roof else three_digits(workload.ratio(measured)))
        cells.append(three_digits(workload.fraction(measured)))
    return tuple(Styled(cell, style) for cell in cells)


# -- as JSON ------------------------------------------------------------------------------------

_BENCH_FORMAT = "attn-export-bench/1"


def bench_to_json(report: BenchReport) -> str:
    """Return the report as JSON text, with a newline at the end. Missing measurements are null."""
    return json.dumps(bench_to_dict(report), indent=1, allow_nan=False) + "\n"


def bench_to_dict(report: BenchReport) -> dict[str, Any]:
    """Return the report as plain values."""
    return {
        "format": _BENCH_FORMAT,
        "name": report.name,
        "exit_code": report.exit_code,
        "threads": report.threads,
        "rounds": report.rounds,
        "environment": report.environment,
        "workloads": [workload_to_dict(workload) for workload in report.workloads],
        "left_out": [*report.left_out],
        "busy": report.busy,
    }


def workload_to_dict(workload: WorkloadResult) -> dict[str, Any]:
    """Return one workload as plain values."""
    return {
        "name": workload.name,
        "sizes": dict(workload.sizes),
        "gflops_roof": finite(workload.flops_roof / 1e9),
        "gbs_roof": finite(workload.bytes_roof / 1e9),
        "candidates": [_candidate(workload, measured) for measured in workload.measured],
    }


def _candidate(workload: WorkloadResult, measured: Measured) -> dict[str, Any]:
    has_tokens = bool(measured.candidate.work.tokens)
    return {
        "name": measured.name,
        "role": measured.role,
        "outcome": measured.outcome,
        "reason": measured.reason,
        "runs": len(measured.seconds),
        "median_ms": finite(measured.median * 1e3),
        "p95_ms": finite(measured.p95 * 1e3),
        "min_ms": finite(min(measured.seconds, default=math.nan) * 1e3),
        "tokens_per_second": finite(measured.tokens_per_second) if has_tokens else None,
        "peak_memory_growth_bytes": measured.growth,
        "peak_memory_bytes": measured.peak,
        "gflops": finite(measured.flops_per_second / 1e9),
        "gbs": finite(measured.bytes_per_second / 1e9),
        "ratio_to_best_peer": None if measured.role == "roof" else finite(workload.ratio(measured)),
        "fraction_of_roof": finite(workload.fraction(measured)),
    }
