"""Reading of files that others may have written: regular files of limited size only."""

from __future__ import annotations

import stat
from pathlib import Path

MOST_BYTES = 2**28
"""Largest size of a file. All test cases of a bundle together take 32 MiB at most."""

LINE = 300


def check_regular(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        OSError: If there is no such file.
        ValueError: If it is not regular. Data of pipes and devices may have no end.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{shown(path)} is not a regular file")
    return status.st_size


def read(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        OSError, ValueError: If it cannot be read, is not a regular file or is too large.
    """
    size = check_regular(path)
    if size > MOST_BYTES:
        raise ValueError(f"{shown(path)} has {size} bytes; {MOST_BYTES} are the most")
    return path.read_bytes()


def shown(path: Path) -> str:
    """Return the last 80 characters of a path, for messages."""
    return str(path)[-80:]


def printable(text: str) -> str:
    """Return a text as one line without control characters, which names in files may have."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in words)[:LINE]


def one_line(error: Exception) -> str:
    """Return the message of an error as one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return printable(f"{str(error.filename)[-80:]}: {error.strerror}")
    return printable(str(error))
