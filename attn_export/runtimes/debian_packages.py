"""Files out of packages of Debian, of any release and architecture, without installing them."""

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

from attn_export.output_folder import take_place
from attn_export.runtimes.install_folder import InstallError
from attn_export.temp_folders import folder_beside

ARCHIVE = "https://deb.debian.org/debian"
HEADERS = "libonnxruntime-dev"
"""The package with ONNX Runtime's headers. They are all that is used of it: its library needs a
newer system than the wheel's."""

SNAPSHOT = "https://snapshot.debian.org/archive/debian/20261122T000000Z"
"""The archive that keeps what Debian has replaced."""

SECONDS = 120

_MAGIC, _HEADER = b"!<arch>\n", 60
"""First bytes of an `ar` archive (a Debian package is one), and length of a file's header."""

Say = Callable[[str], None]


def bring_headers(folder: Path, say: Say) -> None:
    """Download ONNX Runtime's headers into a folder: all or none.

    Args:
        folder: The folder to write.
        say: The receiver of progress messages.

    Raises:
        InstallError: If no archive can be reached, or sends something else.
    """
    say(f"downloading {HEADERS}")
    try:
        package = fetch_package("trixie", "amd64", HEADERS)
    except InstallError as error:
        raise InstallError(
            f"{error}; put ONNX Runtime's headers of a release (onnxruntime-linux-x64-*.tgz, "
            f"include/*.h) into {folder}"
        ) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder) as new, _files(package) as archive:
        for member in archive:
            is_header = member.isfile() and member.name.endswith(".h")
            content = archive.extractfile(member) if is_header else None
            if content is not None:
                (new / PurePosixPath(member.name).name).write_bytes(content.read())
        take_place(new, folder)


def unpack(package: bytes, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Unpack files, folders and relative links of a package.

    Args:
        package: The package.
        folder: The folder to write into.
        wanted: Whether to unpack a path, such as ``usr/bin/qemu-aarch64``.
    """
    with _files(package) as archive:
        for member in archive:
            member.name = member.name.removeprefix("./")
            kept = member.isfile() or (member.issym() and not member.linkname.startswith("/"))
            if kept and wanted(member.name):
                archive.extract(member, folder, filter="data")


def unpack_pinned(
    source: Mapping[str, Any], folder: Path, wanted: Callable[[str], bool], say: Say
) -> None:
    """Download packages of known digests, and unpack files of them.

    Args:
        source: `release`, and `packages`: their paths in an archive, with their digests.
        folder: The folder to write into.
        wanted: Whether to unpack a path.
        say: The receiver of progress messages.

    Raises:
        InstallError: If one cannot be downloaded.
    """
    for path, sha256 in source["packages"].items():
        unpack(fetch_pinned(path, sha256, source["release"], say), folder, wanted)


def fetch_pinned(path: str, sha256: str, release: str, say: Say) -> bytes:
    """Return a package of a known digest, or the release's newer one where Debian replaced it.

    Args:
        path: Its path in an archive: ``pool/main/z/zlib/zlib1g_1.2.13.dfsg-1_arm64.deb``.
        sha256: Its digest.
        release: The name of the release.
        say: The receiver of progress messages.

    Raises:
        InstallError: If no archive can be reached, or sends something else.
    """
    errors = []
    for archive in (*_archives(), SNAPSHOT):
        try:
            package = _fetch(f"{archive}/{path}")
        except OSError as error:
            # Where Debian itself has it no more, the archive of old packages need not answer.
            gone = isinstance(error, HTTPError) and error.code == HTTPStatus.NOT_FOUND
            if not gone and archive != SNAPSHOT:
                errors.append(f"{archive}: {error}")
            continue
        if hashlib.sha256(package).hexdigest() == sha256:
            return package
        errors.append(f"{archive}: it has not the digest {sha256[:12]}…")
    if errors:
        raise InstallError(f"Debian's {path} cannot be downloaded ({'; '.join(errors)})")
    name, _, architecture = PurePosixPath(path).stem.split("_")
    say(f"Debian has no {PurePosixPath(path).name} any more; taking the {name} of {release}")
    return fetch_package(release, architecture, name)


def fetch_package(release: str, architecture: str, name: str) -> bytes:
    """Return the package of a release; its digest must be that of the archive's index.

    Args:
        release: The name of the release: ``"trixie"``.
        architecture: ``"amd64"`` or ``"arm64"``.
        name: The name of the package.

    Raises:
        InstallError: If no archive can be reached, or sends something else.
    """
    errors = []
    for archive in _archives():
        try:
            return _package(archive, release, architecture, name)
        except (OSError, ValueError, lzma.LZMAError) as error:
            errors.append(f"{archive}: {error}")
    raise InstallError(f"Debian's {name} cannot be downloaded ({'; '.join(errors)})")


def _archives() -> tuple[str, ...]:
    """Return the archives, also those of apt: a mirror may be the only one within reach."""
    found = {ARCHIVE: None}
    apt = Path("/etc/apt")
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        if path.is_file():
            text = path.read_text(errors="replace")
            found |= dict.fromkeys(re.findall(r"https?://\S+/debian(?=/?\s)", text))
    return tuple(found)


def _package(archive: str, release: str, architecture: str, name: str) -> bytes:
    index = _fetch(f"{archive}/dists/{release}/main/binary-{architecture}/Packages.xz")
    entries = "\n" + lzma.decompress(index).decode()
    at = entries.find(f"\nPackage: {name}\n")
    if at < 0:
        raise ValueError(f"it has no {name}")
    lines = entries[at + 1 : entries.index("\n\n", at)].splitlines()
    fields = dict(line.split(": ", 1) for line in lines if ": " in line and line[0] != " ")
    package = _fetch(f"{archive}/{fields['Filename']}")
    if hashlib.sha256(package).hexdigest() != fields["SHA256"]:
        raise ValueError(f"{fields['Filename']} has not the digest that the index says")
    return package


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        content: bytes = answer.read()
    return content


def _files(package: bytes) -> tarfile.TarFile:
    """Open the archive of the files of a Debian package.

    Raises:
        InstallError: If it is no Debian package.
    """
    try:
        for name, content in _members(package):
            if name.startswith("data.tar"):
                return tarfile.open(fileobj=io.BytesIO(content))
    except (ValueError, tarfile.TarError) as error:
        raise InstallError(f"what was downloaded is no Debian package: {error}") from error
    raise InstallError("what was downloaded is no Debian package")


def _members(package: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an `ar` archive: a header of fixed width each, content padded to even."""
    if not package.startswith(_MAGIC):
        raise ValueError("it has another start")
    at = len(_MAGIC)
    while at + _HEADER <= len(package):
        header = package[at : at + _HEADER]
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        at += _HEADER
        yield name, package[at : at + size]
        at += size + size % 2
