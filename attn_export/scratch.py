"""Folders for a while: in memory where there is room, or beside what they are to replace.

On disk, making the files of a small case takes longer than computing it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attn_export.interruption import undone

MEMORY = Path("/dev/shm")
ROOM = 1 << 30
"""Bytes that have to be free there; containers often have 64 MiB."""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, removed at the end. `TMPDIR` is honoured where it is set."""
    with _removed(_place() / f"attn-export-{os.urandom(8).hex()}") as folder:
        folder.mkdir(mode=0o700)
        yield folder


@contextlib.contextmanager
def folder_beside(output: Path) -> Iterator[Path]:
    """A new folder beside `output`, removed at the end unless it was moved.

    Its name starts with a dot: what is half-written is in nobody's way.

    Raises:
        OSError: If it cannot be made.
    """
    with _removed(output.parent / f".{output.name}.{os.urandom(8).hex()}") as folder:
        folder.mkdir()
        yield folder


def take_place(new: Path, target: Path) -> None:
    """Rename a folder to `target`; what was there is removed, and stays if that fails.

    Raises:
        OSError: If it cannot be renamed.
    """
    old = new.with_name(new.name + ".old")

    def tidy() -> None:
        if old.exists():
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)

    with undone(tidy):
        if target.exists():
            target.rename(old)
        new.rename(target)


@contextlib.contextmanager
def _removed(folder: Path) -> Iterator[Path]:
    with undone(lambda: shutil.rmtree(folder, ignore_errors=True)):
        yield folder


def _place() -> Path:
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return Path(tempfile.gettempdir())
    room = shutil.disk_usage(MEMORY).free >= ROOM
    return MEMORY if room else Path(tempfile.gettempdir())
