"""Reader of a bundle's detached signature in the format of OpenSSF Model Signing, without its SDK.

The file holds a DSSE envelope around an in-toto statement, which lists files with their digests:
https://github.com/ossf/model-signing-spec
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from attn_export.bundle.manifest import SIGNATURE
from attn_export.errors import BundleError, printable
from attn_export.output_folder import entries, sha256
from attn_export.schema import Digest, FileName, Text
from attn_export.untrusted_files import MOST_TEXT, checked, parse_json, read_bytes

# -- schema of the file and of the statement in it -----------------------------------------------


class EnvelopeSignature(Struct, forbid_unknown_fields=True):
    """The signature of an envelope, in base64."""

    sig: str
    keyid: Literal[""] = ""


class Envelope(Struct, forbid_unknown_fields=True):
    """A DSSE envelope, whose payload is a statement in base64."""

    payload: str
    payloadType: Literal["application/vnd.in-toto+json"]  # noqa: N815 (names of the format)
    signatures: Annotated[list[EnvelopeSignature], Meta(min_length=1, max_length=1)]


class PublicKey(Struct, forbid_unknown_fields=True):
    """The public key of a signature, as the SHA-256 of its PEM file."""

    hint: Digest


class KeyMaterial(Struct, forbid_unknown_fields=True):
    """The verification material of a signature with a key."""

    publicKey: PublicKey  # noqa: N815
    tlogEntries: Annotated[list[Any], Meta(max_length=0)]  # noqa: N815


class SigstoreBundle(Struct, forbid_unknown_fields=True):
    """The content of the file."""

    mediaType: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]  # noqa: N815
    verificationMaterial: dict[str, Any]  # noqa: N815
    dsseEnvelope: Envelope  # noqa: N815


class SignedSubject(Struct, forbid_unknown_fields=True):
    """The signed folder, whose digest is computed from those of the files."""

    name: Text
    digest: dict[Text, Digest]


class SignedFile(Struct, forbid_unknown_fields=True):
    """A signed file."""

    name: FileName
    algorithm: Literal["sha256"]
    digest: Digest


class Serialization(Struct, forbid_unknown_fields=True):
    """The options of the signer. `ignore_paths` has no effect here: every file must be signed."""

    method: Literal["files"]
    hash_type: Literal["sha256"]
    allow_symlinks: bool
    ignore_paths: list[Text] = []


class Predicate(Struct, forbid_unknown_fields=True):
    """The signed files, and the options of the signer."""

    resources: Annotated[list[SignedFile], Meta(min_length=1, max_length=100_000)]
    serialization: Serialization


class SignedStatement(Struct, forbid_unknown_fields=True):
    """The in-toto statement in the envelope."""

    type: Literal["https://in-toto.io/Statement/v1"] = field(name="_type")
    subject: Annotated[list[SignedSubject], Meta(min_length=1, max_length=1)]
    predicateType: Literal["https://model_signing/signature/v1.0"]  # noqa: N815
    predicate: Predicate


# -- reading ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SignatureFile:
    """A signature that was read and parsed, but not verified.

    Attributes:
        content: The bytes of the file.
        digests: The SHA-256 of each signed file, by name.
        key: The SHA-256 of the PEM file of the signer's public key; empty for a sigstore identity.
    """

    content: bytes
    digests: Mapping[str, str]
    key: str

    @property
    def signer(self) -> str:
        """The claimed signer."""
        return f"key {self.key}" if self.key else "an identity of sigstore"


def read_signature(bundle: Path) -> SignatureFile | None:
    """Return the parsed signature of a bundle; None if there is none."""
    path = bundle / SIGNATURE
    if path.is_symlink():
        raise BundleError(f"{path} is a link, and a bundle holds files alone; copy it with cp -rL")
    try:
        content = read_bytes(path, MOST_TEXT)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return _parse(content)
    except ValueError as error:
        raise BundleError(
            f"{path} is not a signature of this format: {printable(error, 160)}; sign the "
            "bundle again"
        ) from error


def _parse(content: bytes) -> SignatureFile:
    text = content.decode("utf-8")
    value = parse_json(text)
    # The file must be byte for byte what the SDK writes, without spaces and repeated keys.
    if json.dumps(value, separators=(",", ":"), ensure_ascii=False) != text:
        raise ValueError("it was changed after it was written")
    bundle = checked(value, SigstoreBundle)
    material = bundle.verificationMaterial
    key = checked(material, KeyMaterial).publicKey.hint if "publicKey" in material else ""
    envelope = bundle.dsseEnvelope
    _decoded(envelope.signatures[0].sig)
    payload = parse_json(_decoded(envelope.payload).decode("utf-8"))
    files = checked(payload, SignedStatement).predicate.resources
    digests = {file.name: file.digest for file in files}
    if len(digests) < len(files):
        raise ValueError("it lists a file twice")
    return SignatureFile(content, digests, key)


def _decoded(text: str) -> bytes:
    data = base64.b64decode(text, validate=True)
    # The last character may have unused bits, which could be changed without another result.
    if base64.b64encode(data).decode() != text:
        raise ValueError("its base64 was changed after it was written")
    return data


# -- the signed files ---------------------------------------------------------------------------


def check_covers(bundle: Path, signature: SignatureFile) -> None:
    """Refuse a bundle in which a file differs from the signed one, or is not signed."""
    files = {*signature.digests, SIGNATURE}
    check_names(bundle, files, "was not signed; remove it, or sign the bundle again")
    for name, digest in signature.digests.items():
        if digest_of(bundle, name) != digest:
            raise BundleError(
                f"{bundle / name} was changed after the bundle was signed; get the signed one again"
            )


def check_names(bundle: Path, files: set[str], complaint: str) -> None:
    """Refuse a bundle that contains other files or folders than expected."""
    folders = {parent.as_posix() for name in files for parent in Path(name).parents}
    try:
        for name, is_file in entries(bundle):
            if name not in (files if is_file else folders):
                raise BundleError(f"{bundle} holds {name}, which {complaint}")
    except OSError as error:
        raise BundleError(f"{bundle} cannot be read: {error.strerror}") from error


def digest_of(bundle: Path, name: str) -> str:
    """Return the SHA-256 of a file of a bundle."""
    try:
        return sha256(bundle / name)
    except OSError as error:
        raise BundleError(f"{bundle / name} cannot be read: {error.strerror}") from error
