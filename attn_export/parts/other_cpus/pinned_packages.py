"""Debian packages with known digests, and extraction of their files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError

from attn_export.errors import RuntimeFailure
from attn_export.parts import debian_packages
from attn_export.parts.debian_packages import fetch_package, open_data
from attn_export.parts.installing import Say

SNAPSHOT = "https://snapshot.debian.org/archive/debian/20261122T000000Z"
"""The archive of packages that Debian has replaced."""


def unpack(package: bytes, folder: Path, is_wanted: Callable[[str], bool]) -> None:
    """Unpack selected files and relative links of a package."""
    with open_data(package) as archive:
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
    for archive in (*debian_packages.archives(), SNAPSHOT):
        try:
            package = debian_packages.fetch(f"{archive}/{path}")
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
    return fetch_package(release, architecture, name)
