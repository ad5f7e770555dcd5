"""`attn-export bench` and `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_export.commands.options import (
    STDOUT,
    Decorator,
    json_option,
    option,
    quiet_option,
    with_help,
    with_options,
)
from attn_export.commands.output import write_file


def _measuring_options(prefill: str, measured: str) -> Decorator:
    """Return a decorator that adds --batch, --prefill, --decode, --rounds and --threads."""
    return with_options(
        option(
            "--batch", type=int, least=1, multiple=True, metavar="B",
            help="Batch sizes.  [default: 1]",
        ),
        option(
            "--prefill", type=int, least=1, multiple=True, metavar="L",
            help=f"New tokens without a past.  [default: {prefill}]",
        ),
        option(
            "--decode", type=int, least=2, multiple=True, metavar="S",
            help="Keys that one new token sees, its own included.  [default: 2048, with a cache]",
        ),
        option(
            "--rounds", type=int, least=1, default=5, show_default=True,
            help=f"The number of measurements of each {measured}.",
        ),
        option(
            "--threads", type=int, least=1, most=1024,
            help="Threads for computing, at most one per core.  [default: all cores]",
        ),
    )  # fmt: skip


@with_help("Runtimes and speed", "bench models/mqa", "bench models/mqa --chart mqa.svg --threads 1")
@option("bundle", type=Path)
@_measuring_options("512", "candidate")
@option(
    "--seconds", type=float, least=0, default=300.0, show_default=True,
    help="The time after which no further workload is begun.",
)  # fmt: skip
@json_option("Write every figure; - for stdout.")
@option("--chart", metavar="FILE.svg", help="Draw the medians.")
@quiet_option
def bench_command(
    bundle: Path, json_file: str | None, chart: str | None, quiet: bool, **options: Any
) -> int:
    """Measure a bundle's graphs against PyTorch, the bare exporter's graph and rooflines.

    Candidates run in turns, each in a process of its own, with bound inputs and outputs. Those
    that cannot run are listed with the reason. Exit code 5 if a graph of the bundle is among
    them.
    """  # fmt: skip
    from attn_export.parts.benchmarks.bench import bench
    from attn_export.parts.benchmarks.bench_chart import check_chart_file, write_chart
    from attn_export.parts.benchmarks.bench_json import bench_to_dict, bench_to_json
    from attn_export.report.progress import progress

    if chart:
        check_chart_file(chart)
    with progress(quiet=quiet) as bar:
        report = bench(bundle, progress=bar, **options)
    if chart:
        write_chart({report.name: bench_to_dict(report)["workloads"]}, chart)
    if json_file:
        write_file(json_file, bench_to_json(report))
    if json_file != STDOUT and (not quiet or report.exit_code):
        from rich.console import Console

        from attn_export.parts.benchmarks.bench_terminal import print_bench

        print_bench(report, Console(stderr=quiet))
    return report.exit_code


@with_help("Runtimes and speed", "tune models/mqa")
@option("bundle", type=Path)
@_measuring_options("512, 2048", "form")
@option(
    "--runtime", "runtimes", multiple=True, metavar="NAME",
    help="A runtime that verifies the result.  [default: those of the bundle's report]",
)  # fmt: skip
@json_option("Write every figure; - for stdout.")
@quiet_option
def tune_command(bundle: Path, json_file: str | None, quiet: bool, **options: Any) -> int:
    """Measure the forms of a bundle's ort graphs on this machine, and keep the fastest of each.

    The bundle is changed only if the new graphs pass. A signature is removed, and statements are:
    write them again by evidence and sign.
    """
    from attn_export.parts.benchmarks.bench_json import tuned_to_json
    from attn_export.parts.benchmarks.tune import tune
    from attn_export.report.progress import progress

    with progress(quiet=quiet) as bar:
        tuned = tune(bundle, progress=bar, **options)
    if json_file:
        write_file(json_file, tuned_to_json(tuned))
    if json_file != STDOUT and (not quiet or tuned.exit_code):
        from attn_export.parts.benchmarks.bench_terminal import print_tuned

        print_tuned(tuned, quiet=quiet)
    return tuned.exit_code
