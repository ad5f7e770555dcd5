"""`attn-export dry-run`: graphs in ONNX Runtime's CUDA provider, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.options import limit_own_memory
from attn_export.cli.output import STDOUT, check_folders, write_file

SIZE = click.IntRange(min=1, max=1 << 24)


@click.command("dry-run")
@click.argument("path", metavar="MODEL.onnx|BUNDLE", type=click.Path(path_type=Path))
@click.option(
    "--arch", "architectures", multiple=True, metavar="NAME",
    help="sm_75, sm_80, sm_86, sm_89, sm_90, sm_100, or all.  [default: sm_80 and sm_90]",
)  # fmt: skip
@click.option(
    "--dialect", "dialects", multiple=True, metavar="NAME", help="Which graphs of a bundle.  [all]"
)
@click.option("--batch", type=SIZE, default=1, show_default=True, metavar="B", help="Batch size.")
@click.option(
    "--query-len", type=SIZE, metavar="L",
    help="Query length.  [default: a prefill of 512, and a decode of 1 after 1023]",
)  # fmt: skip
@click.option(
    "--past-len", type=click.IntRange(min=0, max=1 << 24), metavar="P", help="Length of the cache."
)
@click.option("--json", "json_file", metavar="FILE", help="Write every event; - for stdout.")
@click.option("--quiet", is_flag=True, help="Print errors only.")
def dry_run_command(
    path: Path,
    architectures: tuple[str, ...],
    dialects: tuple[str, ...],
    batch: int,
    query_len: int | None,
    past_len: int | None,
    json_file: str | None,
    quiet: bool,
) -> int:
    """Show which CUDA kernels a graph would use, without a GPU.

    ONNX Runtime's own CUDA provider runs over stand-in libraries that record and compute nothing:
    where each node is placed and why, kernels, copies, waits, memory, refusals. It is no test:
    nothing of it passes or fails. Exit code 5 if the stand-in libraries are not built here.
    """
    from attn_export.jobs.dry_run import dry_run
    from attn_export.report.progress import progress

    check_folders(json_file)
    limit_own_memory()
    with progress(quiet=quiet) as bar:
        found = dry_run(
            path, architectures=architectures, dialects=dialects, batch=batch,
            query_len=query_len, past_len=past_len, progress=bar,
        )  # fmt: skip
    from attn_export.report.dry_run_report import dry_run_to_json, print_dry_run

    if json_file:
        write_file(json_file, dry_run_to_json(found))
    if json_file != STDOUT and not quiet:
        from rich.console import Console

        print_dry_run(found, Console())
    return 0
