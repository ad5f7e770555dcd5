"""`attn-export bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_export.commands.options import (
    STDOUT,
    json_option,
    option,
    quiet_option,
    removed_option,
    with_help,
    with_options,
)
from attn_export.commands.output import write_file


@with_help("Runtimes and speed", "bench models/mqa", "bench models/mqa --threads 1")
@option("bundle", type=Path)
@option(
    "--batch", type=int, least=1, multiple=True, metavar="B",
    help="Batch sizes.  [default: 1]",
)  # fmt: skip
@option(
    "--prefill", type=int, least=1, multiple=True, metavar="L",
    help="New tokens without a past.  [default: 512]",
)  # fmt: skip
@option(
    "--decode", type=int, least=2, multiple=True, metavar="S",
    help="Keys that one new token sees, its own included.  [default: 2048, with a cache]",
)  # fmt: skip
@option(
    "--rounds", type=int, least=1, default=5, show_default=True,
    help="The number of measurements of each candidate.",
)  # fmt: skip
@option(
    "--threads", type=int, least=1, most=1024,
    help="Threads for computing, at most one per core.  [default: all cores]",
)  # fmt: skip
@option(
    "--seconds", type=float, least=0, default=300.0, show_default=True,
    help="The time after which no further workload is begun.",
)  # fmt: skip
@json_option("Write every figure; - for stdout.")
@quiet_option
@with_options(removed_option("--chart", "--json FILE has its figures"))
def bench_command(bundle: Path, json_file: str | None, quiet: bool, **options: Any) -> int:
    """Measure a bundle's graphs against PyTorch, the bare exporter's graph and rooflines.

    Candidates run in turns, each in a process of its own, with bound inputs and outputs. Those
    that cannot run are listed with the reason. Exit code 5 if a graph of the bundle is among
    them.
    """  # fmt: skip
    from attn_export.parts.benchmarks.bench import bench
    from attn_export.parts.benchmarks.bench_report import bench_to_json
    from attn_export.report.progress import progress

    with progress(quiet=quiet) as bar:
        report = bench(bundle, progress=bar, **options)
    if json_file:
        write_file(json_file, bench_to_json(report))
    if json_file != STDOUT and (not quiet or report.exit_code):
        from rich.console import Console

        from attn_export.parts.benchmarks.bench_report import print_bench

        print_bench(report, Console(stderr=quiet))
    return report.exit_code
