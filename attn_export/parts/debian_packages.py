"""Download of Debian packages of any release and architecture, and extraction of their files."""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import tarfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError

from attn_export.errors import RuntimeFailure
from attn_export.output_folder import take_place
from attn_export.parts.installing import Say
from attn_export.temp_folders import folder_beside

_ARCHIVE = "https://deb.debian.org/debian"
HEADERS = "libonnxruntime-dev"
"""The package with ONNX Runtime's headers. Its library is not used, because it needs a newer system
than the library in the wheel."""

SECONDS = 120
"""The time limit of a download."""

_MAGIC, _HEADER = b"!<arch>\n", 60
"""The first bytes of an `ar` archive, which a Debian package is, and the length of a file
header."""


def download_headers(folder: Path, say: Say) -> None:
    """Download ONNX Runtime's headers into a folder, in one step."""
    say(f"downloading {HEADERS}")
    try:
        package = _fetch_package("trixie", "amd64", HEADERS)
    except RuntimeFailure as error:
        raise RuntimeFailure(
            f"{error}; put ONNX Runtime's headers of a release (onnxruntime-linux-x64-*.tgz, "
            f"include/*.h) into {folder}"
        ) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder) as new, _open_data(package) as archive:
        for member in archive:
            is_header = member.isfile() and member.name.endswith(".h")
            content = archive.extractfile(member) if is_header else None
            if content is not None:
                (new / PurePosixPath(member.name).name).write_bytes(content.read())
        take_place(new, folder)


def _fetch_package(release: str, architecture: str, name: str) -> bytes:
    """Return a package of a release, whose digest must match the index of the archive."""
    errors = []
    for archive in archives():
        try:
            return _package(archive, release, architecture, name)
        except (OSError, ValueError, lzma.LZMAError) as error:
            errors.append(f"{archive}: {error}")
    raise RuntimeFailure(f"Debian's {name} cannot be downloaded ({'; '.join(errors)})")


def archives() -> tuple[str, ...]:
    """Return the URLs of archives: Debian's, and the mirrors that apt is configured to use."""
    archives = {_ARCHIVE: None}
    apt = Path("/etc/apt")
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        if path.is_file():
            text = path.read_text(errors="replace")
            archives |= dict.fromkeys(re.findall(r"https?://\S+/debian(?=/?\s)", text))
    return tuple(archives)


def _package(archive: str, release: str, architecture: str, name: str) -> bytes:
    index = fetch(f"{archive}/dists/{release}/main/binary-{architecture}/Packages.xz")
    entries = "\n" + lzma.decompress(index).decode()
    at = entries.find(f"\nPackage: {name}\n")
    if at < 0:
        raise ValueError(f"it has no {name}")
    lines = entries[at + 1 : entries.index("\n\n", at)].splitlines()
    fields = dict(line.split(": ", 1) for line in lines if ": " in line and line[0] != " ")
    package = fetch(f"{archive}/{fields['Filename']}")
    if hashlib.sha256(package).hexdigest() != fields["SHA256"]:
        raise ValueError(f"{fields['Filename']} has not the digest that the index says")
    return package


def fetch(url: str) -> bytes:
    """Return the content of a URL."""
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        content: bytes = answer.read()
    return content


def _open_data(package: bytes) -> tarfile.TarFile:
    """Open the tar archive with the files of a Debian package; RuntimeFailure if it is none."""
    try:
        for name, content in _members(package):
            if name.startswith("data.tar"):
                return tarfile.open(fileobj=io.BytesIO(content))
    except (ValueError, tarfile.TarError) as error:
        raise RuntimeFailure(f"what was downloaded is not a Debian package: {error}") from error
    raise RuntimeFailure("what was downloaded is not a Debian package")


def _members(package: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of an `ar` archive.

    Each file has a header of fixed length, and its content is padded to an even length.
    """
    if not package.startswith(_MAGIC):
        raise ValueError("it has another start")
    at = len(_MAGIC)
    while at + _HEADER <= len(package):
        header = package[at : at + _HEADER]
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        at += _HEADER
        yield name, package[at : at + size]
        at += size + size % 2


# -- packages with known digests ----------------------------------------------------------------

SNAPSHOT = "https://snapshot.debian.org/archive/debian/20261122T000000Z"
"""The archive of packages that Debian has replaced."""


def unpack(package: bytes, folder: Path, is_wanted: Callable[[str], bool]) -> None:
    """Unpack selected files and relative links of a package."""
    with _open_data(package) as archive:
        for member in archive:
            member.name = member.name.removeprefix("./")
            allowed = member.isfile() or (member.issym() and not member.linkname.startswith("/"))
            if allowed and is_wanted(member.name):
                archive.extract(member, folder, filter="data")


def unpack_pinned(
    source: Mapping[str, Any], folder: Path, is_wanted: Callable[[str], bool], say: Say
) -> None:
    """Download packages with known digests, and unpack selected files.

    `source`: A table with `release`, the name of the Debian release, and `packages`, the SHA-256 of
    each package by its path in an archive.
    """
    for path, sha256 in source["packages"].items():
        unpack(fetch_pinned(path, sha256, source["release"], say), folder, is_wanted)


def fetch_pinned(path: str, sha256: str, release: str, say: Say) -> bytes:
    """Return a package with a known digest, or its successor if Debian has replaced it."""
    errors = []
    for archive in (*archives(), SNAPSHOT):
        try:
            package = fetch(f"{archive}/{path}")
        except OSError as error:
            # It is no error if mirrors no longer have the package, or if the snapshot archive
            # does not answer.
            gone = isinstance(error, HTTPError) and error.code == HTTPStatus.NOT_FOUND
            if not gone and archive != SNAPSHOT:
                errors.append(f"{archive}: {error}")
            continue
        if hashlib.sha256(package).hexdigest() == sha256:
            return package
        errors.append(f"{archive}: it has not the digest {sha256[:12]}…")
    if errors:
        raise RuntimeFailure(f"Debian's {path} cannot be downloaded ({'; '.join(errors)})")
    name, _, architecture = PurePosixPath(path).stem.split("_")
    say(f"Debian has no {PurePosixPath(path).name} any more; taking the {name} of {release}")
    return _fetch_package(release, architecture, name)
