"""`attn-export tune`: the fastest form of a bundle's graphs on the machine at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attn_export.cli.commands import SIZE, size_options
from attn_export.cli.output import STDOUT, check_folders, write_file
from attn_export.errors import printable

if TYPE_CHECKING:
    from attn_export.jobs.tune import Tuned


@click.command("tune")
@click.argument("bundle", type=click.Path(path_type=Path))
@size_options("512, 2048")
@click.option("--rounds", type=SIZE, default=5, show_default=True, help="Turns of each form.")
@click.option("--threads", type=SIZE, help="For computing.  [default: all cores]")
@click.option(
    "--runtime",
    "runtimes",
    multiple=True,
    metavar="NAME",
    help="A runtime that verifies the result.  [default: those of the bundle's report]",
)
@click.option("--json", "json_file", metavar="FILE", help="Write every figure; - for stdout.")
@click.option("--quiet", is_flag=True, help="Print errors only.")
def tune_command(
    bundle: Path,
    batch: tuple[int, ...],
    prefill: tuple[int, ...],
    decode: tuple[int, ...],
    rounds: int,
    threads: int | None,
    runtimes: tuple[str, ...],
    json_file: str | None,
    quiet: bool,
) -> int:
    """Measure the forms of a bundle's ort graphs here, and keep the fastest of each.

    The bundle is changed only if the new graphs pass. A signature is removed: sign it again.
    """
    from attn_export.jobs.tune import tune
    from attn_export.report.progress import progress

    check_folders(json_file)
    with progress(quiet=quiet) as bar:
        tuned = tune(
            bundle, batch=batch, prefill=prefill, decode=decode, rounds=rounds, threads=threads,
            runtimes=runtimes, progress=bar,
        )  # fmt: skip
    if json_file:
        write_file(json_file, to_json(tuned))
    if json_file != STDOUT and (not quiet or tuned.exit_code):
        print_tuned(tuned, quiet=quiet)
    return tuned.exit_code


def to_json(tuned: Tuned) -> str:
    """Return times, forms and verdicts as JSON text, with a newline at the end."""
    from attn_export.report.data import bench_to_dict
    from attn_export.report.data import to_json as report_to_json

    report = None if tuned.report is None else json.loads(report_to_json(tuned.report))
    content = {
        "format": "attn-export-tune/1",
        "forms": dict(tuned.forms),
        "bench": bench_to_dict(tuned.bench),
        "report": report,
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def print_tuned(tuned: Tuned, *, quiet: bool) -> None:
    """Print the times of all forms, the form of each graph, and the result of verifying.

    Args:
        tuned: The result of the job.
        quiet: Whether to print to stderr.
    """
    from rich.console import Console

    from attn_export.report.result_terminal import print_bench
    from attn_export.report.terminal import print_report

    console = Console(stderr=quiet)
    print_bench(tuned.bench, console)
    for name, form in tuned.forms.items():
        click.echo(f"{printable(name)}: {printable(form)}", err=quiet)
    if tuned.report is None:
        click.echo("the bundle has these forms already; nothing was written", err=quiet)
        return
    if tuned.report.passed:
        click.echo(
            f"{len(tuned.report.verdicts)} verdicts passed; the bundle is written", err=quiet
        )
        return
    print_report(tuned.report, console)
    click.echo("the bundle stays as it was", err=quiet)
