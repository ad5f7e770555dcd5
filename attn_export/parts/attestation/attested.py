"""What `verify` checks of a signature, before anything of a bundle is used.

`model_signing` signs bundles, and says here whether a signature is genuine. Its file holds a DSSE
envelope around a list of files with digests: https://github.com/ossf/model-signing-spec
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from attn_export.bundle.manifest import SIGNATURE
from attn_export.errors import BundleError, UsageError, one_line, printable
from attn_export.output_folder import first_change
from attn_export.results import BundleCheck, Signature
from attn_export.schema import Digest, FileName
from attn_export.system_info import check_installed
from attn_export.temp_folders import scratch
from attn_export.untrusted_files import MOST_TEXT, checked, parse_json, read_bytes

_SDK, _IDENTITY = "model_signing", "an identity of sigstore"


class _Claim(NamedTuple):
    """What a signature says, which may be a lie: its bytes, the SHA-256 of files, and its signer.

    The signer is a key, by the SHA-256 of its PEM file, or `_IDENTITY`.
    """

    content: bytes
    digests: Mapping[str, str]
    signer: str


@contextlib.contextmanager
def attested(
    bundle: Path, signer: Path | str | None, issuer: str | None
) -> Iterator[tuple[Path, BundleCheck]]:
    """Yield the folder to read a bundle from, and the check of the rest; see `commands`.

    The folder is the bundle, or a private copy of what `signer` signed: a public key in PEM, or a
    sigstore identity, which has an `issuer`.
    """
    if signer is None:
        if issuer is not None:
            raise UsageError(f"--oidc-issuer {issuer} needs --trust IDENTITY, such as you@host")
        yield bundle, partial(_claimed, bundle)
        return
    check_installed(_SDK)
    claim = _read(bundle)
    if claim is None:
        raise BundleError(f"{bundle} is unsigned: it holds no {SIGNATURE}; sign it with its key")
    if (claim.signer == _IDENTITY) != (issuer is not None):
        raise BundleError(
            f"{bundle} is signed by {claim.signer}, not by {signer}; give the right one to --trust"
        )
    verifier = _verifier(str(signer), issuer)
    _check_covers(bundle, claim)  # before the copy: files that are not signed could be too large
    with scratch(in_memory=False) as folder:
        copy, signature = folder / "bundle", folder / SIGNATURE  # beside it: not all sign its name
        for name in claim.digests:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / name, copy / name, follow_symlinks=False)
        signature.write_bytes(claim.content)
        try:
            verifier.verify(copy, signature)
        except Exception as error:  # the SDK raises different errors for keys and identities
            raise BundleError(
                f"{bundle / SIGNATURE}, which claims {claim.signer}, is not genuine for {signer}: "
                f"{printable(one_line(error), 160)}; give the signer to --trust, or get the signed "
                "bundle again"
            ) from error
        found = claim.signer if issuer is None else f"{signer} ({issuer})"
        yield copy, lambda: Signature("verified", found)


def _claimed(folder: Path) -> Signature:
    """Return the signature of a bundle as it is claimed."""
    claim = _read(folder)
    if claim is None:
        return Signature("unsigned")
    _check_covers(folder, claim)
    return Signature("not checked", claim.signer)


def _verifier(signer: str, issuer: str | None) -> Any:
    """Return the SDK's verifier for a signer."""
    from model_signing import verifying  # not above: only `--trust` needs it

    try:
        if issuer is None:
            return verifying.Config().use_elliptic_key_verifier(public_key=Path(signer))
        return verifying.Config().use_sigstore_verifier(identity=signer, oidc_issuer=issuer)
    except Exception as error:
        advice = (
            "is no public key on P-256, P-384 or P-521: --trust takes what `openssl pkey -in "
            "KEY.pem -pubout` writes"
            if issuer is None
            else "cannot be checked without sigstore's root of trust: it needs a network"
        )
        raise UsageError(f"{signer} {advice} ({printable(one_line(error), 160)})") from error


def _read(bundle: Path) -> _Claim | None:
    """Return what the signature of a bundle claims; None if there is none."""
    path = bundle / SIGNATURE
    try:
        content = read_bytes(path, MOST_TEXT)
        outer = parse_json(content.decode("utf-8"))
        payload = base64.b64decode(outer["dsseEnvelope"]["payload"], validate=True)
        listed = parse_json(payload.decode("utf-8"))["predicate"]["resources"]
        digests = {checked(e["name"], FileName): checked(e["digest"], Digest) for e in listed}
        if not 0 < len(listed) == len(digests):
            raise ValueError("it lists no file, or one twice")
        material = outer["verificationMaterial"]
        if "publicKey" not in material:
            return _Claim(content, digests, _IDENTITY)
        return _Claim(content, digests, f"key {checked(material['publicKey']['hint'], Digest)}")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BundleError(
            f"{path} is not a signature of this format: {printable(one_line(error), 160)}; sign "
            "the bundle again"
        ) from error


def _check_covers(bundle: Path, claim: _Claim) -> None:
    """Refuse a bundle in which a file differs from the signed one, or is not signed."""
    signature = hashlib.sha256(claim.content).hexdigest()
    try:
        name, is_signed = first_change(bundle, {**claim.digests, SIGNATURE: signature})
        missing = [file for file in claim.digests if not (bundle / file).is_file()]
    except OSError as error:
        raise BundleError(f"{error.filename or bundle} cannot be read: {error.strerror}") from error
    if name and not is_signed:
        raise BundleError(
            f"{bundle} holds {name}, which was not signed; remove it, or sign the bundle again"
        )
    if name or missing:
        raise BundleError(
            f"{bundle / (name or missing[0])} was changed after the bundle was signed; get the "
            "signed one again"
        )
