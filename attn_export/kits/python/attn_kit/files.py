"""Files from outside: regular ones only, whose size is known before they are read."""

from __future__ import annotations

import stat
from pathlib import Path

MOST_BYTES = 2**28
"""Golden vectors take 32 MiB altogether."""

LINE = 300


def check_regular(path: Path) -> int:
    """Return the size of a file.

    Raises:
        OSError: If there is none.
        ValueError: If it is a pipe or a device: their data may have no end.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{shown(path)} is not a regular file")
    return found.st_size


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
    """Return the end of a path, its most informative part."""
    return str(path)[-80:]


def printable(text: str) -> str:
    """Return one line: names come from files, and may hold control characters."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in words)[:LINE]


def one_line(error: Exception) -> str:
    """Return the message of an error as one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return printable(f"{str(error.filename)[-80:]}: {error.strerror}")
    return printable(str(error))
