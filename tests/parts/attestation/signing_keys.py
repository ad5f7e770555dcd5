"""Key pairs in PEM, as openssl writes them, and bundles that one of them signed."""

from __future__ import annotations

import shutil
from pathlib import Path

import shared
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from model_signing import hashing, signing

from attn_export.bundle.manifest import SIGNATURE, manifest_content, write_manifest
from attn_export.commands.verify import attested

KINDS = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
}


def sign(bundle: Path, key: Path) -> None:
    """Sign a bundle as `model_signing sign key` does."""
    hashes = hashing.Config().set_ignored_paths(paths=[bundle / SIGNATURE])
    config = signing.Config().use_elliptic_key_signer(private_key=key)
    config.set_hashing_config(hashes).sign(bundle, bundle / SIGNATURE)


def make_key(folder: Path, name: str, kind: str) -> None:
    """Write NAME.pem and NAME.pub.pem."""
    key = KINDS[kind]()
    private = key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    )  # fmt: skip
    subject = form.PublicFormat.SubjectPublicKeyInfo
    (folder / f"{name}.pem").write_bytes(private)
    public = key.public_key().public_bytes(form.Encoding.PEM, subject)
    (folder / f"{name}.pub.pem").write_bytes(public)


def key_folder() -> Path:
    """Return a folder with key pairs, NAME.pem and NAME.pub.pem. Read it."""

    def make(folder: Path) -> None:
        folder.mkdir()
        kinds = {"own": "P-256", "other": "P-256", "p384": "P-384", "p521": "P-521"}
        for name, kind in {**kinds, "rsa": "RSA", "ed25519": "Ed25519"}.items():
            make_key(folder, name, kind)
        broken = "-----BEGIN PUBLIC KEY-----\nno\n-----END PUBLIC KEY-----\n"
        (folder / "broken.pem").write_text(broken)

    return shared.once("keys", make)


def signed_bundle(bundle: Path) -> Path:
    """Return a bundle with one case, signed with `own`. Read it; it is quick to copy.

    It has too little evidence for `verify` to pass.
    """

    def make(folder: Path) -> None:
        shutil.copytree(bundle, folder, ignore=shutil.ignore_patterns("test_data_set_[1-9]*"))
        with_digests(folder)
        sign(folder, key_folder() / "own.pem")

    return shared.once("signed", make)


def with_digests(bundle: Path) -> None:
    """Write the manifest of a bundle again, for the files that it has by now."""
    write_manifest(bundle, manifest_content(bundle))


def signer_of(bundle: Path, key: Path) -> str:
    """Check the signature as `verify --trust` does, and return the signer."""
    with attested(bundle, str(key), None) as (_, check):
        return str(check())
