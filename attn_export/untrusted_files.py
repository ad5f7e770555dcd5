"""Reading of untrusted files: regular files of limited size, JSON, TOML, headers of safetensors."""

from __future__ import annotations

import bisect
import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from attn_export.errors import printable

MOST_TEXT = 64 * 2**20
"""The largest size of a text file, in bytes. The manifest of 10,000 cases is smaller."""

_MOST_TOML = 2**20
"""The largest size of a TOML file, in bytes: tomllib reads about 1 MB a second."""

_MOST_DOTS = 5 * 10**7
"""The largest sum of the squares of the numbers of dots in the lines of a TOML file."""

_MOST_LEVELS = 100
"""The largest number of lists and objects within each other. Python's `repr` has a limit, too."""

_MOST_BITS = 10_000
"""The largest number of bits of an integer; `str` refuses those of 4,301 digits."""

T = TypeVar("T")


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading. Refuse a FIFO or device, which could block or be endless."""
    # Without O_NONBLOCK, opening a FIFO blocks until a writer opens it.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = FileIO(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_bytes(
    path: Path, most: int | None = None, *, start: int = 0, length: int | None = None
) -> bytes:
    """Return the content of a regular file, or `length` bytes of it from `start` on.

    `most`: The largest allowed size in bytes; None for no limit.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size - start if length is None else length
        file.seek(start)
        if most is not None and size > most:
            message = f"it has {size} bytes, and {most} is the most"
            raise OSError(errno.EFBIG, message, str(path))
        # A single system call reads at most 2 GiB.
        chunks = []
        while size > 0 and (chunk := file.read(size)):
            chunks.append(chunk)
            size -= len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def read_text(path: Path) -> str:
    """Return the text of a regular file of at most `MOST_TEXT` bytes."""
    return read_bytes(path, MOST_TEXT).decode("utf-8")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    _check_values(value)
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file of at most `_MOST_TOML` bytes."""
    text = read_bytes(path, _MOST_TOML).decode("utf-8")
    # A key of n names takes tomllib n² steps: 64 s for 64 kB.
    if sum(line.count(".") ** 2 for line in text.split("\n")) > _MOST_DOTS:
        raise ValueError("it has too many dots in a line")
    try:
        values = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    _check_values(values)
    return values


def _check_values(value: object) -> None:
    """Raise ValueError if values are nested too deep, or an integer has more digits than `str`."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        if not level:
            return
        # Such integers are hexadecimal ones of TOML.
        if any(isinstance(each, int) and each.bit_length() > _MOST_BITS for each in level):
            raise ValueError(f"an integer has more than {_MOST_BITS} bits")
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    raise ValueError("it is nested too deep")


LONGEST_HEADER = 100_000_000
"""The largest header in bytes that the safetensors library reads."""


def safetensors_entries(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the offset of the tensors in a safetensors file, and the header's entries by tensor.

    The format: 8 bytes with the length of the header, the header in JSON, then the tensors
    (https://huggingface.co/docs/safetensors, "Format"). The entries are not checked.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"its header takes {length} bytes, and {LONGEST_HEADER} is the most")
        entries = parse_json(file.read(length).decode("utf-8"))
    entries.pop("__metadata__", None)
    return 8 + length, entries


def checked(value: object, schema: type[T]) -> T:
    """Return a value converted to a schema that it fits."""
    import msgspec

    try:
        return msgspec.convert(value, schema)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        problem, _, path = str(error).rpartition(" - at ")
        try:
            field, actual = _locate(value, path, partial(_same_error, value, schema, str(error)))
        except (LookupError, TypeError):  # no path, or a value that looks like one
            problem, field, actual = str(error), "", shortened(value)
        # Regular expressions are left out: they are long and no help to the user.
        problem, pattern, _ = problem.partition(" matching regex ")
        problem = f"{problem} without such characters" if pattern else printable(problem, 120)
        where = f" - at `{field}`" if field else ""
        # Whole objects with wrong fields are too large to show.
        is_shown = (field and not problem.startswith("Object ")) or not isinstance(value, dict)
        raise ValueError(f"{problem}{where}{f', which is {actual}' * is_shown}") from error


def _same_error(value: object, schema: type[T], message: str) -> bool:
    import msgspec

    try:
        msgspec.convert(value, schema)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        return str(error) == message
    return False


def _locate(value: Any, path: str, fails: Callable[[], bool]) -> tuple[str, str]:
    """Return the full path and the shortened value of the field in an error of msgspec.

    `path` is that of the message, such as "`key` in `$.files`". `fails` returns whether converting
    `value`, which is changed temporarily, again leads to the same error.
    """
    if not re.fullmatch(r"(`key` in )?`\$[^`]*`", path):
        raise LookupError(path)
    is_key = path.startswith("`key` in ")
    field = "$"
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if name or index.isdigit():
            value = value[name or int(index)]
            field += f".{name}" if name else f"[{index}]"
        else:
            key = _first_wrong_key(value, fails)
            value = value[key]
            field += f"[{shortened(key)}]"
    return field, shortened(_first_wrong_key(value, fails) if is_key else value)


def _first_wrong_key(mapping: dict[str, Any], fails: Callable[[], bool]) -> str:
    """Return the key for which msgspec writes `[...]`, or which is wrong itself."""
    # By bisection: it is the last one of the shortest prefix of the mapping with the same error.
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
    """Return a value as at most 60 characters; objects and long arrays by their length."""
    if isinstance(value, list | dict) and (isinstance(value, dict) or len(value) > 8):
        return f"{'an object' if isinstance(value, dict) else 'an array'} of {len(value)}"
    return printable(repr(value), 60)
