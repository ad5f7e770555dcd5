"""The job behind `sign`, and checks of a signature before anything of a bundle is used."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from attn_export.bundle.manifest import MANIFEST, SIGNATURE, read_bundle
from attn_export.errors import BundleError, UsageError
from attn_export.jobs.signature_file import check_covers, check_names, digest_of, read_signature
from attn_export.output_folder import write_errors, write_whole
from attn_export.results import Signature
from attn_export.system_info import check_installed
from attn_export.temp_folders import scratch

SDK = "model_signing"


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
    from attn_export.jobs.signing_sdk import sign_with_key, sign_with_sigstore

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


@dataclasses.dataclass(frozen=True)
class Trust:
    """The signer whom the user trusts.

    Attributes:
        signer: The path of a PEM file with a public key, or a sigstore identity.
        issuer: The URL of the OpenID Connect issuer of an identity; None for a key.
    """

    signer: str
    issuer: str | None = None

    @classmethod
    def of(cls, signer: Path | str | None, issuer: str | None) -> Trust | None:
        """Return the required signer, or None if the user requires none."""
        if signer is None and issuer is not None:
            raise UsageError(f"--oidc-issuer {issuer} needs --trust IDENTITY, such as you@host")
        return None if signer is None else cls(str(signer), issuer)


def state_of(bundle: Path) -> Signature:
    """Return the signer whom a bundle's signature claims, without checking that it is genuine."""
    signature = read_signature(bundle)
    if signature is None:
        return Signature("unsigned")
    check_covers(bundle, signature)
    return Signature("not checked", signature.signer)


@contextlib.contextmanager
def signed_files(bundle: Path, trust: Trust | None) -> Iterator[tuple[Path, Signature | None]]:
    """Yield the folder to read a bundle from: itself, or a private copy of the signed files.

    If the user requires a signer, the signature is checked. Later changes of the bundle do not
    affect the copy.

    Yields:
        The folder, and the signature if it was checked.
    """
    if trust is None:
        yield bundle, None
        return
    check_installed(SDK)
    signature = read_signature(bundle)
    if signature is None:
        raise BundleError(f"{bundle} is unsigned: it holds no {SIGNATURE}; sign it with its key")
    from attn_export.jobs.signing_sdk import check_identity, check_key

    if trust.issuer is None:
        signer = check_key(bundle, signature, Path(trust.signer))
    else:
        signer = check_identity(bundle, signature, trust.signer, trust.issuer)
    # Checked before the copy, too: files that are not signed could be too large to copy.
    check_covers(bundle, signature)
    with scratch(in_memory=False) as folder:
        for name in signature.digests:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / name, folder / name, follow_symlinks=False)
        (folder / SIGNATURE).write_bytes(signature.content)
        check_covers(folder, signature)
        yield folder, Signature("verified", signer)
