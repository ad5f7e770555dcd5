"""What `verify` checks of a signature and of statements, before anything of a bundle is used."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from attn_export.bundle.manifest import SIGNATURE
from attn_export.errors import BundleError, UsageError
from attn_export.parts.attestation.signature_file import check_covers, read_signature
from attn_export.parts.attestation.statements import check_statements
from attn_export.results import Signature
from attn_export.schema import Manifest
from attn_export.system_info import check_installed
from attn_export.temp_folders import scratch

SDK = "model_signing"


def check_attested(bundle: Path, manifest: Manifest, signature: Signature | None) -> Signature:
    """Compare the statements of a bundle, and return its signature: as checked, or as claimed."""
    check_statements(bundle, manifest)
    return signature or state_of(bundle)


def state_of(bundle: Path) -> Signature:
    """Return the signer whom a bundle's signature claims, without checking that it is genuine."""
    signature = read_signature(bundle)
    if signature is None:
        return Signature("unsigned")
    check_covers(bundle, signature)
    return Signature("not checked", signature.signer)


@contextlib.contextmanager
def signed_files(
    bundle: Path, signer: Path | str | None, issuer: str | None
) -> Iterator[tuple[Path, Signature | None]]:
    """Yield the folder to read a bundle from: itself, or a private copy of the signed files.

    If the user requires a signer, the signature is checked. Later changes of the bundle do not
    affect the copy.

    `signer`: The path of a PEM file with a public key, or a sigstore identity.
    `issuer`: The URL of the OpenID Connect issuer of an identity; None for a key.

    Yields:
        The folder, and the signature if it was checked.
    """
    if signer is None:
        if issuer is not None:
            raise UsageError(f"--oidc-issuer {issuer} needs --trust IDENTITY, such as you@host")
        yield bundle, None
        return
    check_installed(SDK)
    signature = read_signature(bundle)
    if signature is None:
        raise BundleError(f"{bundle} is unsigned: it holds no {SIGNATURE}; sign it with its key")
    from attn_export.parts.attestation.signing_sdk import check_identity, check_key

    if issuer is None:
        found = check_key(bundle, signature, Path(signer))
    else:
        found = check_identity(bundle, signature, str(signer), issuer)
    # Checked before the copy, too: files that are not signed could be too large to copy.
    check_covers(bundle, signature)
    with scratch(in_memory=False) as folder:
        for name in signature.digests:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / name, folder / name, follow_symlinks=False)
        (folder / SIGNATURE).write_bytes(signature.content)
        check_covers(folder, signature)
        yield folder, Signature("verified", found)
