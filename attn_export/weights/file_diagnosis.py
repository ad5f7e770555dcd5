"""Diagnosis of files that are not valid safetensors files.

The format: 8 bytes with the length of the header, the header in JSON, then the tensors
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from attn_export.errors import one_line

CONVERT: Final = (
    "reading it could run code; convert it where you trust it: safetensors.torch.save_file("
    "torch.load(FILE, map_location='cpu', weights_only=True), 'model.safetensors')"
)
LONGEST_HEADER: Final = 100_000_000
"""Largest header in bytes that the safetensors library reads."""
AGAIN: Final = "download it again"


def diagnose(file: Path, error: Exception) -> str:
    """Return the defect of a file that the safetensors library refused, and the remedy.

    Args:
        file: The file.
        error: The error of the library.
    """
    if file.is_dir():
        return "is a folder; give a .safetensors file"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(9)
    except FileNotFoundError:
        return "does not exist; check the path"
    except OSError as problem:
        return f"cannot be read: {problem.strerror}"
    if not size:
        return f"is empty; {AGAIN}"
    if _looks_pickled(start):
        return f"is a pickle or a zip archive, not safetensors; {CONVERT}"
    return _header_problem(file, size, start) or f"is broken: {one_line(error)}; {AGAIN}"


def _looks_pickled(start: bytes) -> bool:
    # A header of 640 bytes starts with the same two bytes as a pickle, but then comes its brace.
    is_header = start[4:8] == bytes(4) and start[8:9] == b"{"
    pickled = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return not is_header and (pickled or start[:4] == b"PK\x03\x04")


def _header_problem(file: Path, size: int, start: bytes) -> str | None:
    """Return the defect of the sizes or the header, or None if they are valid."""
    length = int.from_bytes(start[:8], "little")
    if size < 8 or (length <= LONGEST_HEADER and 8 + length > size and start[8:9] in (b"{", b"")):
        needed = f"its header alone takes {8 + length}" if size >= 8 else "its header takes more"
        return f"is truncated: it has {size} bytes, {needed}; {AGAIN}"
    if length > LONGEST_HEADER or start[8:9] != b"{":
        return "is no safetensors file: it does not start with a header; give a .safetensors file"
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(8 + length)[8:])
        entries = [value for key, value in header.items() if key != "__metadata__"]
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in entries), default=0)
    except (OSError, ValueError, RecursionError):
        return f"has a header that is not JSON; {AGAIN}"
    except (KeyError, TypeError, IndexError, AttributeError):
        return None
    if end > size:
        return f"is truncated: it has {size} bytes, its header describes {end}; {AGAIN}"
    if end < size:
        return f"has {size - end} bytes more than the {end} that its header describes; {AGAIN}"
    return None
