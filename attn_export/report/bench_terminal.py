"""A benchmark in the terminal: 80 columns, plain where it is piped."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from attn_export.bench.measurements import BenchReport, Contest, Measured
from attn_export.report.bench_data import in_mib, in_ms, three_digits
from attn_export.report.markup import as_text

COLUMNS = ("", "median ms", "p95 ms", "tokens/s", "MiB", "to peer", "of roof")
"""Memory: by how much the first run grew; ``to peer``: the median over the best peer's."""


def print_bench(report: BenchReport, console: Console) -> None:
    """Print one table for each contest, and what did not run."""
    for contest in report.contests:
        console.print(f"[bold]{as_text(contest.name)}[/]", highlight=False)
        console.print(_table(contest))
        for measured in contest.measured:
            if not measured.ran:
                color = "red" if measured.role == "ours" else "yellow"
                console.print(
                    f"{as_text(measured.name)} [{color}]{measured.outcome}[/]: "
                    f"{as_text(measured.reason)}",
                    highlight=False,
                    soft_wrap=True,
                )
        console.print()
    console.print(
        f"{as_text(report.name)}: {report.threads} threads, {report.rounds} rounds in turn",
        highlight=False,
        soft_wrap=True,
    )


def _table(contest: Contest) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for measured in contest.measured:
        if measured.ran:
            table.add_row(*_row(contest, measured), style=_style(measured))
    return table


def _row(contest: Contest, m: Measured) -> list[str]:
    roof = m.role == "roof"
    rate = m.flops_per_second or m.bytes_per_second
    unit = "GFLOP/s" if m.flops_per_second else "GB/s"
    return [
        as_text(m.name),
        in_ms(m),
        three_digits(m.p95 * 1e3),
        f"{rate / 1e9:.0f} {unit}" if roof else three_digits(m.tokens_per_second),
        in_mib(m.growth),
        "" if roof else three_digits(contest.ratio(m)),
        three_digits(contest.fraction(m)),
    ]


def _style(m: Measured) -> str:
    return {"ours": "bold", "peer": "", "roof": "dim"}[m.role]
