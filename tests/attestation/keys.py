"""Key pairs in PEM, as openssl writes them."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

PASSPHRASE = b"a passphrase"

KINDS = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
}


def make_key(folder: Path, name: str, kind: str, passphrase: bytes = b"") -> None:
    """Write NAME.pem and NAME.pub.pem."""
    key = KINDS[kind]()
    lock = form.BestAvailableEncryption(passphrase) if passphrase else form.NoEncryption()
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, lock)
    subject = form.PublicFormat.SubjectPublicKeyInfo
    (folder / f"{name}.pem").write_bytes(private)
    public = key.public_key().public_bytes(form.Encoding.PEM, subject)
    (folder / f"{name}.pub.pem").write_bytes(public)
