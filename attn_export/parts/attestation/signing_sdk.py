"""Signing and verifying with OpenSSF Model Signing: keys offline, sigstore identities online.

The SDK receives digests that were computed here, so that all files are read by our own reader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from model_signing import hashing, manifest, signing, verifying
from model_signing._hashing.hashing import Digest  # private: pyproject.toml pins the version

from attn_export.bundle.manifest import SIGNATURE
from attn_export.errors import BundleError, UsageError, one_line, printable
from attn_export.parts.attestation.signature_file import SignatureFile, read_signature
from attn_export.temp_folders import scratch
from attn_export.untrusted_files import read_bytes

CURVES = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
"""The curves that the SDK supports, and their names by NIST."""

MOST_KEY = 64 * 2**10
"""The largest size of a file with a key, in bytes."""

Passphrase = Callable[[], bytes]
"""A function that returns the passphrase of a key."""


class _KnownDigests(hashing.Config):
    """A hashing configuration of the SDK that returns known digests."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._digests = digests

    def hash(
        self,
        model_path: hashing.PathLike,
        *,
        files_to_hash: Iterable[hashing.PathLike] | None = None,  # noqa: ARG002 (of the SDK)
    ) -> manifest.Manifest:
        """Return the digests as a manifest of the SDK, with the name of the bundle's folder."""
        options = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
        serialization = manifest.SerializationType.from_args(
            {**options, "ignore_paths": [SIGNATURE]}
        )
        items = [
            manifest.FileManifestItem(
                path=PurePosixPath(name), digest=Digest("sha256", bytes.fromhex(digest))
            )
            for name, digest in self._digests.items()
        ]
        return manifest.Manifest(Path(str(model_path)).name, items, serialization)


# -- signing ------------------------------------------------------------------------------------


def sign_with_key(
    bundle: Path, digests: Mapping[str, str], key: Path, passphrase: Passphrase
) -> SignatureFile:
    """Return a signature of the digests of a bundle, made with a private key."""
    secret = passphrase() if b"ENCRYPTED" in (pem := _read_key(key)) else None
    try:
        loaded = load_pem_private_key(pem, secret)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if secret is not None:
            raise UsageError(f"{key}: the passphrase is wrong, or the key is damaged") from error
        raise UsageError(
            f"{key} is not a private key in PEM; docs/security.md makes one"
        ) from error
    _check_curve(key, loaded.public_key())
    config = signing.Config().use_elliptic_key_signer(
        private_key=key,
        password=secret,  # type: ignore[arg-type]  # the SDK passes it to a function that requires bytes
    )
    return _sign(config, bundle, digests)


def sign_with_sigstore(bundle: Path, digests: Mapping[str, str]) -> SignatureFile:
    """Return a signature of the digests of a bundle by a sigstore identity; it needs a network."""
    try:
        config = signing.Config().use_sigstore_signer(use_ambient_credentials=True)
        return _sign(config, bundle, digests)
    except Exception as error:
        raise UsageError(
            f"cannot sign with sigstore: {printable(one_line(error), 160)}; it needs a network and "
            "an identity, --key needs neither"
        ) from error


def _sign(config: signing.Config, bundle: Path, digests: Mapping[str, str]) -> SignatureFile:
    config.set_hashing_config(_KnownDigests(digests))
    with scratch() as folder:
        config.sign(bundle.absolute(), folder / SIGNATURE)
        signature = read_signature(folder)
    if signature is None or signature.digests != digests:
        raise BundleError(f"the signature of {bundle} does not cover its files; build it again")
    return signature


# -- verifying ----------------------------------------------------------------------------------


def check_key(bundle: Path, signature: SignatureFile, key: Path) -> str:
    """Check that a signature was made with a key.

    Returns:
        The name of the key for reports.
    """
    try:
        loaded = load_pem_public_key(pem := _read_key(key))
    except (ValueError, UnsupportedAlgorithm) as error:
        content = "a private key" if b"PRIVATE KEY" in pem else "no public key in PEM"
        raise UsageError(
            f"{key} holds {content}; --trust takes what `openssl pkey -in KEY.pem -pubout` writes"
        ) from error
    _check_curve(key, loaded)
    digest = hashlib.sha256(
        loaded.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()
    if signature.key != digest:
        raise BundleError(f"{bundle} is signed by {signature.signer}, and {key} is key {digest}")
    config = verifying.Config().use_elliptic_key_verifier(public_key=key)
    _verify(config, bundle, signature)
    return f"key {digest}"


def check_identity(bundle: Path, signature: SignatureFile, identity: str, issuer: str) -> str:
    """Check that a signature was made by a sigstore identity.

    Returns:
        The name of the identity for reports.
    """
    if signature.key:
        raise BundleError(
            f"{bundle} is signed by key {signature.key}, not by {identity}; give the key to --trust"
        )
    try:
        config = verifying.Config().use_sigstore_verifier(identity=identity, oidc_issuer=issuer)
    except Exception as error:
        raise UsageError(
            f"cannot get sigstore's root of trust: {printable(one_line(error), 160)}; it needs a "
            "network"
        ) from error
    _verify(config, bundle, signature)
    return f"{identity} ({issuer})"


def _verify(config: verifying.Config, bundle: Path, signature: SignatureFile) -> None:
    config.set_hashing_config(_KnownDigests(signature.digests))
    with scratch() as folder:
        # The bytes that were parsed: the file may have been changed since.
        copy = folder / SIGNATURE
        copy.write_bytes(signature.content)
        try:
            config.verify(bundle.absolute(), copy)
        except Exception as error:  # the SDK raises different errors for keys and identities
            raise BundleError(
                f"{bundle / SIGNATURE} is not genuine: {printable(one_line(error), 160)}; get the "
                "signed bundle again"
            ) from error


def _read_key(path: Path) -> bytes:
    try:
        return read_bytes(path, MOST_KEY)
    except OSError as error:
        raise UsageError(f"cannot read the key {path}: {error.strerror}") from error


def _check_curve(path: Path, key: object) -> None:
    curve = key.curve.name if isinstance(key, ec.EllipticCurvePublicKey) else type(key).__name__
    if curve not in CURVES:
        name = curve.strip("_").removesuffix("PublicKey")
        raise UsageError(
            f"{path} is a key of {name}; the format takes elliptic curves "
            f"{', '.join(CURVES.values())}: openssl genpkey -algorithm EC -pkeyopt "
            "ec_paramgen_curve:P-256"
        )
