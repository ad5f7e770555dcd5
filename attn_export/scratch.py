"""A folder for a while, in memory where there is room.

On disk, making the files of a small case takes longer than computing it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM = 1 << 30
"""Bytes that have to be free there; containers often have 64 MiB."""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, removed at the end. `TMPDIR` is honoured where it is set."""
    with tempfile.TemporaryDirectory(prefix="attn-export-", dir=_place()) as folder:
        yield Path(folder)


def _place() -> Path | None:
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return None
    return MEMORY if shutil.disk_usage(MEMORY).free >= ROOM else None
