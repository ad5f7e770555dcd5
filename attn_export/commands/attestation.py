"""The part that checks who vouches for a bundle, or what stands in for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from attn_export.errors import UsageError
from attn_export.parts import parts
from attn_export.results import Signature
from attn_export.schema import Manifest


class Attestation(Protocol):
    """What `verify` calls of the module that a part names in `verifies`."""

    def signed_files(
        self, bundle: Path, signer: Path | str | None, issuer: str | None
    ) -> AbstractContextManager[tuple[Path, Signature | None]]:
        """Yield the folder to read a bundle from, and its signature if a signer was required.

        Args:
            bundle: The bundle's folder, of which nothing has been read.
            signer: The required signer, as of --trust.
            issuer: Who vouches for the signer's identity, as of --oidc-issuer.
        """

    def check_attested(
        self, bundle: Path, manifest: Manifest, signature: Signature | None
    ) -> Signature | None:
        """Check what the bundle says of itself, and return the signature that it claims.

        Args:
            bundle: The folder to read the bundle from.
            manifest: The manifest, with whose digests its files agree.
            signature: The signature if it was checked, which is returned.
        """


class _Absent:
    """Stand-in without such a part: it refuses what needs one, and states nothing."""

    @contextlib.contextmanager
    def signed_files(
        self, bundle: Path, signer: Path | str | None, issuer: str | None
    ) -> Iterator[tuple[Path, Signature | None]]:
        if signer is not None or issuer is not None:
            raise UsageError(
                "--trust needs the part attestation, which is missing; install attn-export whole"
            )
        yield bundle, None

    def check_attested(self, _: Path, __: Manifest, signature: Signature | None) -> None:
        """Return nothing: whether there is a signature is not known."""


def attestation() -> Attestation:
    """Return the module of the part that is there, or a stand-in."""
    names = [part.verifies for part in parts() if part.verifies]
    return cast("Attestation", import_module(names[0])) if names else _Absent()
