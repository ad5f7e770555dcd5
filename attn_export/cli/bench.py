"""`attn-export bench`."""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.output import STDOUT, check_folders, write_file

SIZE = click.IntRange(min=1)


@click.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--batch", type=SIZE, multiple=True, metavar="B", help="Batch sizes.  [default: 1]")
@click.option(
    "--prefill",
    type=SIZE,
    multiple=True,
    metavar="L",
    help="New tokens without a past.  [default: 512]",
)
@click.option(
    "--decode",
    type=click.IntRange(min=2),
    multiple=True,
    metavar="S",
    help="Keys that one new token sees, its own included.  [default: 2048, with a cache]",
)
@click.option("--rounds", type=SIZE, default=5, show_default=True, help="Turns of each candidate.")
@click.option("--threads", type=SIZE, help="For computing, on all sides.  [default: all cores]")
@click.option("--json", "json_file", metavar="FILE", help="Write every figure; - for stdout.")
@click.option("--chart", metavar="FILE.svg|.png", help="Draw the medians.")
@click.option("--quiet", is_flag=True, help="Print errors only.")
def bench_command(
    bundle: Path,
    batch: tuple[int, ...],
    prefill: tuple[int, ...],
    decode: tuple[int, ...],
    rounds: int,
    threads: int | None,
    json_file: str | None,
    chart: str | None,
    quiet: bool,
) -> int:
    """Measure a bundle's graphs against PyTorch, the bare exporter's graph and the machine.

    All take turns in one interleaved run, each in a process of its own, with everything bound.
    What cannot run here is listed with the reason. Exit code 5 if a graph of the bundle is
    among it.
    """  # fmt: skip
    from attn_export.jobs.bench import bench
    from attn_export.report.bench_chart import check_chart_file, write_chart
    from attn_export.report.bench_data import bench_to_json
    from attn_export.report.progress import progress

    check_folders(json_file)
    if chart:
        check_chart_file(chart)
    with progress(quiet=quiet) as bar:
        report = bench(
            bundle, batch=batch, prefill=prefill, decode=decode, rounds=rounds, threads=threads,
            progress=bar,
        )  # fmt: skip
    if chart:
        write_chart({report.name: report.contests}, chart)
    if json_file:
        write_file(json_file, bench_to_json(report))
    if json_file == STDOUT:
        return report.exit_code
    if not quiet or report.exit_code:
        from rich.console import Console

        from attn_export.report.bench_terminal import print_bench

        print_bench(report, Console(stderr=quiet))
    return report.exit_code
