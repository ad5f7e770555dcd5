"""The signature of a bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attn_export.bundle.manifest import MANIFEST, SIGNATURE, read_bundle
from attn_export.errors import UsageError
from attn_export.output_folder import write_errors, write_whole
from attn_export.parts.attestation.attested import SDK
from attn_export.parts.attestation.signature_file import check_covers, check_names, digest_of
from attn_export.results import Signature
from attn_export.system_info import check_installed


def sign(
    bundle: Path | str,
    *,
    key: Path | str | None = None,
    passphrase: Callable[[], bytes] | None = None,
) -> Signature:
    """Sign every file of a bundle, and write the signature to `model.sig` in it.

    `key`: A PEM file with a private key on an elliptic curve. Default: a sigstore identity, which
    requires a network.

    Returns:
        The signature, with the name of its signer.
    """
    check_installed(SDK)
    folder = Path(bundle)
    digests = dict(read_bundle(folder).files)
    digests[MANIFEST] = digest_of(folder, MANIFEST)
    check_names(folder, {*digests, SIGNATURE}, "is not the bundle's; move it away")
    from attn_export.parts.attestation.signing_sdk import sign_with_key, sign_with_sigstore

    if key is None:
        signature = sign_with_sigstore(folder, digests)
    else:
        signature = sign_with_key(folder, digests, Path(key), passphrase or _no_passphrase)
    check_covers(folder, signature)
    with write_errors(folder / SIGNATURE):
        write_whole(folder / SIGNATURE, signature.content)
    return Signature("verified", signature.signer)


def _no_passphrase() -> bytes:
    raise UsageError("the key has a passphrase, and none was given")
