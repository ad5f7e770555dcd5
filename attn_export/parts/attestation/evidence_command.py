"""`attn-export evidence`."""

from __future__ import annotations

from pathlib import Path

from attn_export.commands.options import option, quiet_option
from attn_export.commands.output import echo
from attn_export.errors import PARAGRAPH, printable


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
