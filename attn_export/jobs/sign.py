"""Signatures of bundles: made, and checked before anything of a bundle is used."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from attn_export.bundle import MANIFEST, SIGNATURE, read_bundle
from attn_export.errors import BundleError, OutputError, UsageError
from attn_export.jobs.signature_file import (
    check_covers,
    check_names,
    digest_of,
    read_signature,
)
from attn_export.output_folder import write_whole
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
    """Sign every file of a bundle, into `model.sig` within it.

    Args:
        bundle: The bundle's folder. A signature that is there is replaced.
        key: A PEM file with a private key on an elliptic curve. Default: an identity of sigstore,
            which needs a network.
        passphrase: Returns the passphrase of the key; called if it has one.

    Raises:
        UsageError: If the key is of no use, or the SDK is not installed.
        BundleError: If the bundle is damaged, or holds what is not its own.
        OutputError: If the signature cannot be written.
    """
    check_installed(SDK)
    folder = Path(bundle)
    digests = dict(read_bundle(folder).manifest["files"])
    digests[MANIFEST] = digest_of(folder, MANIFEST)
    check_names(folder, {*digests, SIGNATURE}, "is not the bundle's; move it away")
    from attn_export.jobs.signing_sdk import sign_with_key, sign_with_sigstore

    if key is None:
        signature = sign_with_sigstore(folder, digests)
    else:
        signature = sign_with_key(folder, digests, Path(key), passphrase or _no_passphrase)
    check_covers(folder, signature)
    try:
        write_whole(folder / SIGNATURE, signature.content)
    except OSError as error:
        raise OutputError(f"cannot write {folder / SIGNATURE}: {error.strerror}") from error
    return Signature("verified", signature.signer)


def _no_passphrase() -> bytes:
    raise UsageError("the key has a passphrase, and none was given")


@dataclasses.dataclass(frozen=True)
class Trust:
    """The signer whom the user trusts.

    Attributes:
        signer: A PEM file with a public key, or an identity of sigstore.
        issuer: URL of the OpenID Connect issuer of an identity; None for keys.
    """

    signer: str
    issuer: str | None = None

    @classmethod
    def of(cls, signer: Path | str | None, issuer: str | None) -> Trust | None:
        """Return the signer to require, or None if any will do.

        Args:
            signer: See `Trust`.
            issuer: See `Trust`.

        Raises:
            UsageError: If there is an issuer and no identity.
        """
        if signer is None and issuer is not None:
            raise UsageError(f"--oidc-issuer {issuer} needs --trust IDENTITY, such as you@host")
        return None if signer is None else cls(str(signer), issuer)


def state_of(bundle: Path) -> Signature:
    """Return whether a bundle has a signature. It covers every file, and is not checked.

    Args:
        bundle: The bundle's folder.

    Raises:
        BundleError: If there is one, and a file is not the one that was signed.
    """
    signature = read_signature(bundle)
    if signature is None:
        return Signature("unsigned")
    check_covers(bundle, signature)
    return Signature("not checked", signature.signer)


@contextlib.contextmanager
def opened(bundle: Path, trust: Trust | None) -> Iterator[tuple[Path, Signature | None]]:
    """Give the folder of a bundle to read from: itself, or a private copy of what was signed.

    Args:
        bundle: The bundle's folder.
        trust: The signer that is required, if one is.

    Yields:
        The folder, and its signature if it was checked.

    Raises:
        UsageError: See `trusted_copy`.
        BundleError: See `trusted_copy`.
    """
    if trust is None:
        yield bundle, None
    else:
        with trusted_copy(bundle, trust) as found:
            yield found


@contextlib.contextmanager
def trusted_copy(bundle: Path, trust: Trust) -> Iterator[tuple[Path, Signature]]:
    """Check a bundle's signature and give a private copy of the signed files, until the end.

    Whatever happens to the bundle meanwhile, the copy is what was signed.

    Args:
        bundle: The bundle's folder.
        trust: The signer that is required.

    Yields:
        The copy, and the signer.

    Raises:
        UsageError: If the key is of no use, or the SDK is not installed.
        BundleError: If the bundle is unsigned, signed by another, or not as it was signed.
    """
    check_installed(SDK)
    signature = read_signature(bundle)
    if signature is None:
        raise BundleError(f"{bundle} is unsigned: it holds no {SIGNATURE}; sign it with its key")
    from attn_export.jobs.signing_sdk import check_identity, check_key

    if trust.issuer is None:
        signer = check_key(bundle, signature, Path(trust.signer))
    else:
        signer = check_identity(bundle, signature, trust.signer, trust.issuer)
    # First in place: what is not signed could be too large to copy.
    check_covers(bundle, signature)
    with scratch(in_memory=False) as folder:
        for name in signature.digests:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / name, folder / name, follow_symlinks=False)
        (folder / SIGNATURE).write_bytes(signature.content)
        check_covers(folder, signature)
        yield folder, Signature("verified", signer)
