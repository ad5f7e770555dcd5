"""`attn-export probe`."""

from __future__ import annotations

import click

from attn_export.cli.output import STDOUT, check_folders, write_file
from attn_export.errors import RuntimeFailure


@click.command("probe")
@click.argument("runtime")
@click.option("--json", "json_file", metavar="FILE", help="Write it as JSON; - for stdout.")
@click.option("--quiet", is_flag=True, help="Print errors only.")
def probe_command(runtime: str, json_file: str | None, quiet: bool) -> int:
    """Find the meaning of attention in a runtime, beside ONNX and PyTorch.

    Small cases, each of which tells several meanings apart: causal alignment, windows, shared
    heads, masked rows, softcap, NaN, empty axes, precision, small numbers. A crash, a hang and a
    refusal are answers too. Exit code 5 if the runtime cannot run here, or answers nothing.
    """
    from attn_export.jobs.probe import probe
    from attn_export.report.probe_data import probe_to_json
    from attn_export.report.progress import progress

    check_folders(json_file)
    with progress(quiet=quiet) as bar:
        found = probe(runtime, progress=bar)
    if json_file:
        write_file(json_file, probe_to_json(found))
    if json_file != STDOUT and not quiet:
        from rich.console import Console

        from attn_export.report.probe_terminal import print_probe

        print_probe(found, Console())
    return 0 if found.ran else RuntimeFailure.exit_code
