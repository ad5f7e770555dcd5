"""The part that checks who vouches for a bundle; without it, what needs it is refused."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from attn_export.errors import UsageError
from attn_export.parts import parts
from attn_export.results import Signature
from attn_export.schema import Manifest


def signed_files(
    bundle: Path, signer: Path | str | None, issuer: str | None
) -> AbstractContextManager[tuple[Path, Signature | None]]:
    """Yield the folder to read a bundle from, and its signature if a signer was required.

    `signer`, `issuer`: Those of --trust and --oidc-issuer.
    """
    if part := _part():
        found: AbstractContextManager[Any] = part.signed_files(bundle, signer, issuer)
        return found
    if signer is not None or issuer is not None:
        raise UsageError(
            "--trust needs the part attestation, which is missing; install attn-export whole"
        )
    return nullcontext((bundle, None))


def check_attested(
    bundle: Path, manifest: Manifest, signature: Signature | None
) -> Signature | None:
    """Check what a bundle says of itself; return the checked signature, or that which it claims."""
    if part := _part():
        signature = part.check_attested(bundle, manifest, signature)
    return signature


def _part() -> Any:
    names = [part.verifies for part in parts() if part.verifies]
    return import_module(names[0]) if names else None
