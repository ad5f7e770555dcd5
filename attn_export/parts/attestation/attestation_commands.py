"""`attn-export evidence` and `sign`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from attn_export.commands.options import option, quiet_option
from attn_export.commands.output import echo
from attn_export.errors import PARAGRAPH, UsageError, printable

PASSPHRASE = "ATTN_EXPORT_PASSPHRASE"
"""The environment variable with the passphrase of a private key."""


@option("bundle", type=Path)
@quiet_option
def evidence_command(bundle: Path, quiet: bool) -> int:
    """Write what a bundle's report says for other tools: an in-toto test result and an ML-BOM.

    They are BUNDLE/evidence/, and `verify` compares them with the report. A signature, which does
    not cover them, is removed: sign it again.
    """
    from attn_export.parts.attestation.statements import BOM, STATEMENT, add_statements

    was_signed = add_statements(bundle)
    if not quiet:
        for name in (STATEMENT, BOM):
            echo(printable(str(bundle / name), PARAGRAPH))
        if was_signed:
            echo("the signature did not cover these and is gone; sign the bundle again")
    return 0


@option("bundle", type=Path)
@option(
    "--key", type=Path, metavar="PRIVATE.pem",
    help=f"A private key on an elliptic curve. Its passphrase is in {PASSPHRASE}, or prompted for.",
)  # fmt: skip
@option("--sigstore", is_flag=True, help="The identity of this CI job, or yours. Needs a network.")
@quiet_option
def sign_command(bundle: Path, key: Path | None, sigstore: bool, quiet: bool) -> int:
    """Sign every file of a bundle, in the format of OpenSSF Model Signing.

    The signature is BUNDLE/model.sig; `verify --trust` checks it. Exit code 7 if the bundle is
    damaged, or has files that its manifest does not list.
    """
    from attn_export.bundle.manifest import SIGNATURE
    from attn_export.parts.attestation.sign import sign

    if (key is None) != sigstore:
        raise UsageError("sign with either --key PRIVATE.pem or --sigstore")
    signature = sign(bundle, key=key, passphrase=_passphrase)
    if not quiet:
        echo(printable(f"{bundle / SIGNATURE}: {signature}", PARAGRAPH))
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
