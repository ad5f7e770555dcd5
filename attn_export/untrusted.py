"""Files from outside: regular ones, of a size that is known before they are read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from attn_export.errors import printable

MOST_TEXT = 64 * 2**20
"""The largest size of a text file, in bytes: the manifest of 10,000 cases takes less."""

T = TypeVar("T")


@contextlib.contextmanager
def regular_file(path: Path) -> Iterator[FileIO]:
    """Open a regular file for reading; a FIFO or a device would block, or never end.

    Raises:
        OSError: If it cannot be opened, or is something else.
    """
    # Without O_NONBLOCK a FIFO is opened only when somebody writes to it.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with FileIO(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield file


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the contents of a regular file.

    Args:
        path: The file.
        most: The largest size in bytes, if there is one.

    Raises:
        OSError: If it cannot be read, is larger, or is no regular file.
    """
    with regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            message = f"it has {size} bytes, and {most} is the most"
            raise OSError(errno.EFBIG, message, str(path))
        # One read of a system call gives 2 GiB at most.
        parts = []
        while size > 0 and (part := file.read(size)):
            parts.append(part)
            size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_text(path: Path) -> str:
    """Return the text of a regular file of at most `MOST_TEXT` bytes.

    Raises:
        OSError: If it cannot be read, is larger, or is no regular file.
        ValueError: If it is not UTF-8.
    """
    return read_bytes(path, MOST_TEXT).decode("utf-8")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If it is no JSON, or is nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def checked(value: object, schema: type[T]) -> T:
    """Return a value as an object of a schema.

    Args:
        value: A value from JSON or TOML.
        schema: A class of `msgspec`, or another type.

    Raises:
        ValueError: If it does not fit; the message names the field.
    """
    import msgspec

    try:
        return msgspec.convert(value, schema)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        # Patterns are long, and for nobody's eyes.
        before, found, after = printable(error).partition(" matching regex ")
        place = after.rpartition(" - at ")[2]
        said = f"{before} without such characters - at {place}" if found else before
        raise ValueError(said) from error
