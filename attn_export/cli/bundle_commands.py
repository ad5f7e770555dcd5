"""Commands on an existing bundle: `tune`, `sign`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_export.cli.options import (
    PATH,
    STDOUT,
    json_option,
    measuring_options,
    quiet_option,
)
from attn_export.cli.output import write_file
from attn_export.errors import PARAGRAPH, UsageError, printable

if TYPE_CHECKING:
    from attn_export.jobs.tune import TuningResult


# -- tune ---------------------------------------------------------------------------------------


@click.command("tune")
@click.argument("bundle", type=PATH)
@measuring_options("512, 2048", "form")
@click.option(
    "--runtime", "runtimes", multiple=True, metavar="NAME",
    help="A runtime that verifies the result.  [default: those of the bundle's report]",
)  # fmt: skip
@json_option("Write every figure; - for stdout.")
@quiet_option
def tune_command(bundle: Path, json_file: str | None, quiet: bool, **options: Any) -> int:
    """Measure the forms of a bundle's ort graphs on this machine, and keep the fastest of each.

    The bundle is changed only if the new graphs pass. A signature is removed: sign it again.
    """
    from attn_export.jobs.tune import tune
    from attn_export.report.progress import progress

    with progress(quiet=quiet) as bar:
        tuned = tune(bundle, progress=bar, **options)
    if json_file:
        write_file(json_file, to_json(tuned))
    if json_file != STDOUT and (not quiet or tuned.exit_code):
        print_tuned(tuned, quiet=quiet)
    return tuned.exit_code


def to_json(tuned: TuningResult) -> str:
    """Return the measured times, the chosen forms and the report as JSON text."""
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


def print_tuned(tuned: TuningResult, *, quiet: bool) -> None:
    """Print the times of all forms, the form of each graph, and the result of verifying."""
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


# -- sign ---------------------------------------------------------------------------------------

PASSPHRASE = "ATTN_EXPORT_PASSPHRASE"
"""The environment variable with the passphrase of a private key."""


@click.command("sign")
@click.argument("bundle", type=PATH)
@click.option(
    "--key", type=PATH, metavar="PRIVATE.pem",
    help=f"A private key on an elliptic curve. Its passphrase is in {PASSPHRASE}, or prompted for.",
)  # fmt: skip
@click.option(
    "--sigstore", is_flag=True, help="The identity of this CI job, or yours. Needs a network."
)
@quiet_option
def sign_command(bundle: Path, key: Path | None, sigstore: bool, quiet: bool) -> int:
    """Sign every file of a bundle, in the format of OpenSSF Model Signing.

    The signature is BUNDLE/model.sig; `verify --trust` checks it. Exit code 7 if the bundle is
    damaged, or has files that its manifest does not list.
    """
    from attn_export.bundle import SIGNATURE
    from attn_export.jobs.sign import sign

    if (key is None) != sigstore:
        raise UsageError("sign with either --key PRIVATE.pem or --sigstore")
    signature = sign(bundle, key=key, passphrase=_passphrase)
    if not quiet:
        click.echo(printable(f"{bundle / SIGNATURE}: {signature}", PARAGRAPH))
    return 0


def _passphrase() -> bytes:
    """Return the passphrase of a key, from the environment or the terminal."""
    from_environment = os.environ.get(PASSPHRASE)
    if from_environment is not None:
        return from_environment.encode()
    if not sys.stdin.isatty():
        raise UsageError(f"the key has a passphrase; set {PASSPHRASE}, or sign in a terminal")
    entered: str = click.prompt("Passphrase", hide_input=True, err=True)
    return entered.encode()
