"""`attn-export sign`: a detached signature over every file of a bundle."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from attn_export.errors import PARAGRAPH, UsageError, printable

PASSPHRASE = "ATTN_EXPORT_PASSPHRASE"
"""The environment variable with the passphrase of a private key."""


@click.command("sign")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--key", type=click.Path(path_type=Path), metavar="PRIVATE.pem",
    help=f"A private key on an elliptic curve; its passphrase is asked for, or in {PASSPHRASE}.",
)  # fmt: skip
@click.option(
    "--sigstore", is_flag=True, help="The identity of this CI job, or yours. Needs a network."
)
@click.option("--quiet", is_flag=True, help="Print errors only.")
def sign_command(bundle: Path, key: Path | None, sigstore: bool, quiet: bool) -> int:
    """Sign every file of a bundle, in the format of OpenSSF Model Signing.

    The signature is BUNDLE/model.sig; `verify --trust` checks it. Exit code 7 if the bundle is
    damaged, or holds what is not its own.
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
    """Return the passphrase of a key, from the environment or the terminal.

    Raises:
        UsageError: If it is in neither.
    """
    given = os.environ.get(PASSPHRASE)
    if given is not None:
        return given.encode()
    if not sys.stdin.isatty():
        raise UsageError(f"the key has a passphrase; set {PASSPHRASE}, or sign in a terminal")
    entered: str = click.prompt("Passphrase", hide_input=True, err=True)
    return entered.encode()
