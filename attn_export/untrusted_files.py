"""Files from outside: regular ones, of a size that is known before they are read."""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from functools import partial
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
        ValueError: If it does not fit; the message names the field and its value.
    """
    import msgspec

    try:
        return msgspec.convert(value, schema)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        said, _, place = str(error).rpartition(" - at ")
        try:
            field, found = _locate(value, place, partial(_same_error, value, schema, str(error)))
        except (LookupError, TypeError):  # No path, or a value that looks like one.
            said, field, found = str(error), "", shortened(value)
        # Patterns are long, and for nobody's eyes.
        said, pattern, _ = said.partition(" matching regex ")
        said = f"{said} without such characters" if pattern else printable(said, 120)
        where = f" - at `{field}`" if field else ""
        # An object whose fields are wrong is too large to show.
        is_shown = (field and not said.startswith("Object ")) or not isinstance(value, dict)
        raise ValueError(f"{said}{where}{f', which is {found}' * is_shown}") from error


def _same_error(value: object, schema: type[T], message: str) -> bool:
    import msgspec

    try:
        msgspec.convert(value, schema)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        return str(error) == message
    return False


def _locate(value: Any, place: str, fails: Callable[[], bool]) -> tuple[str, str]:
    """Return the full path and the shortened value of the field that an error of msgspec means.

    msgspec writes `[...]` for any key of a mapping. The key is the last one of the shortest
    beginning of the mapping that still fails.

    Args:
        value: The value that was converted. It is as before afterwards.
        place: Its path as msgspec writes it, such as "`key` in `$.files`".
        fails: Converts the value again, and returns whether the error is the same.

    Raises:
        LookupError: If it is no path of this value. (TypeError likewise.)
    """
    if not re.fullmatch(r"(`key` in )?`\$[^`]*`", place):
        raise LookupError(place)
    of_key = place.startswith("`key` in ")
    field = "$"
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place):
        if name or index.isdigit():
            value = value[name or int(index)]
            field += f".{name}" if name else f"[{index}]"
        else:
            key = _first_wrong_key(value, fails)
            value = value[key]
            field += f"[{shortened(key)}]"
    return field, shortened(_first_wrong_key(value, fails) if of_key else value)


def _first_wrong_key(mapping: dict[str, Any], fails: Callable[[], bool]) -> str:
    items = list(mapping.items())

    def fails_with(count: int) -> bool:
        mapping.clear()
        mapping.update(items[:count])
        return fails()

    count = bisect.bisect_left(range(1, len(items)), True, key=fails_with) + 1
    mapping.clear()
    mapping.update(items)
    return items[count - 1][0]


def shortened(value: object) -> str:
    """Return a value of a file in at most 60 characters, and an array by its length."""
    if isinstance(value, list | dict) and (isinstance(value, dict) or len(value) > 8):
        return f"{'an object' if isinstance(value, dict) else 'an array'} of {len(value)}"
    return printable(repr(value), 60)
