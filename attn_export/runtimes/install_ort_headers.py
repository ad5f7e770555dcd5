"""ONNX Runtime's headers, out of the package of Debian's current stable release.

They are all that is used of it: its library needs a newer system than the wheel's.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from attn_export.atomic_replace import take_place
from attn_export.runtimes.install_folder import InstallError
from attn_export.temp_folders import folder_beside

RELEASE, PACKAGE = "trixie", "libonnxruntime-dev"
ARCHIVE = "https://deb.debian.org/debian"
SECONDS = 120

_MAGIC, _HEADER = b"!<arch>\n", 60
"""Of an `ar` archive, which is what a Debian package is, and of each file in it."""


def bring_headers(folder: Path, say: Callable[[str], None]) -> None:
    """Download the headers into a folder.

    Args:
        folder: The folder to write.
        say: The receiver of progress messages.

    Raises:
        InstallError: If no archive can be reached, or sends something else.
    """
    say(f"downloading {PACKAGE}")
    errors = []
    for archive in dict.fromkeys((ARCHIVE, *_archives_of_this_machine())):
        try:
            headers = _headers(_package(archive))
        except (OSError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
            errors.append(f"{archive}: {error}")
            continue
        _write(headers, folder)
        return
    raise InstallError(
        f"ONNX Runtime's headers cannot be downloaded ({'; '.join(errors)}); put those of a "
        f"release (onnxruntime-linux-x64-*.tgz, include/*.h) into {folder}"
    )


def _archives_of_this_machine() -> Iterator[str]:
    """Yield the archives in apt's configuration: a mirror may be the only one within reach."""
    apt = Path("/etc/apt")
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        if path.is_file():
            yield from re.findall(r"https?://\S+/debian(?=/?\s)", path.read_text(errors="replace"))


def _package(archive: str) -> bytes:
    """Return the package; its digest must match the archive's index."""
    index = _fetch(f"{archive}/dists/{RELEASE}/main/binary-amd64/Packages.xz")
    entries = "\n" + lzma.decompress(index).decode()
    at = entries.find(f"\nPackage: {PACKAGE}\n")
    if at < 0:
        raise ValueError(f"it has no {PACKAGE}")
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


def _headers(package: bytes) -> dict[str, bytes]:
    """Return the header files of a Debian package, by their names without folders."""
    for name, content in _members(package):
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                found = {
                    PurePosixPath(member.name).name: archive.extractfile(member)
                    for member in archive
                    if member.isfile() and member.name.endswith(".h")
                }
                return {name: file.read() for name, file in found.items() if file is not None}
    raise ValueError("it is no Debian package")


def _members(package: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an `ar` archive: a header of fixed width each, content padded to even."""
    if not package.startswith(_MAGIC):
        raise ValueError("it is no Debian package")
    at = len(_MAGIC)
    while at + _HEADER <= len(package):
        header = package[at : at + _HEADER]
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        at += _HEADER
        yield name, package[at : at + size]
        at += size + size % 2


def _write(headers: dict[str, bytes], folder: Path) -> None:
    """Write all headers or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder) as new:
        for name, content in headers.items():
            (new / name).write_bytes(content)
        take_place(new, folder)
