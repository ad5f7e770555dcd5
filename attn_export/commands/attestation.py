"""Who vouches for a bundle: checked by a part, if it is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from attn_export.errors import UsageError
from attn_export.optional_parts import hooks
from attn_export.results import BundleCheck


@contextlib.contextmanager
def attested(
    bundle: Path, signer: Path | str | None, issuer: str | None
) -> Iterator[tuple[Path, BundleCheck]]:
    """Yield the folder to read a bundle from, and the check of the rest.

    `signer` and `issuer` are those of --trust and --oidc-issuer.
    """
    for of_part in hooks("attested"):
        with of_part(bundle, signer, issuer) as found:
            yield found
        return
    if signer is not None or issuer is not None:
        raise UsageError(
            "--trust needs the part attestation, which is missing; install attn-export whole"
        )
    yield bundle, lambda: None
