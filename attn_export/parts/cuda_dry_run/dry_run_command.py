"""Command `dry-run`: which CUDA kernels a graph would use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_export.commands.options import (
    STDOUT,
    fix_input_option,
    json_option,
    limit_own_memory,
    option,
    quiet_option,
    with_help,
)
from attn_export.commands.output import write_file


@with_help(
    "Runtimes and speed",
    "dry-run models/mqa",
    "dry-run model.onnx --arch sm_90",
)  # fmt: skip
@option("path", metavar="MODEL.onnx|BUNDLE", type=Path)
@option(
    "--arch", "architectures", multiple=True, metavar="NAME",
    help="sm_75, sm_80, sm_86, sm_89, sm_90, sm_100, or all.  [default: sm_80 and sm_90]",
)  # fmt: skip
@option(
    "--dialect", "dialects", multiple=True, metavar="NAME",
    help="The graphs of a bundle to run.  [default: all]",
)  # fmt: skip
@option("--batch", type=int, least=1, default=1, show_default=True, metavar="B", help="Batch size.")
@option(
    "--query-len", type=int, least=1, metavar="L",
    help="Query length.  [default: a prefill of 512, and a decode of 1 after 1023]",
)  # fmt: skip
@option("--past-len", type=int, least=0, metavar="P", help="Length of the cache.")
@fix_input_option
@json_option("Write every event; - for stdout.")
@quiet_option
def dry_run_command(
    path: Path, fixed: dict[str, str], json_file: str | None, quiet: bool, **options: Any
) -> int:
    """Show which CUDA kernels a graph would use, without a GPU.

    ONNX Runtime's own CUDA provider runs over stand-in libraries that record and compute nothing:
    where each node is placed and why, kernels, copies, waits, memory, refusals. It is no test:
    nothing passes or fails. Exit code 5 if the stand-in libraries are not built here.
    """
    from attn_export.commands.fixed_graphs import fixed_graphs
    from attn_export.parts.cuda_dry_run.dry_run import dry_run
    from attn_export.report.progress import progress

    limit_own_memory()
    with fixed_graphs([path], fixed) as (graph,), progress(quiet=quiet) as bar:
        observations = dry_run(graph, progress=bar, **options)
    from attn_export.parts.cuda_dry_run.dry_run_report import dry_run_to_json, print_dry_run

    if json_file:
        write_file(json_file, dry_run_to_json(observations))
    if json_file != STDOUT and not quiet:
        from rich.console import Console

        print_dry_run(observations, Console())
    return 0
