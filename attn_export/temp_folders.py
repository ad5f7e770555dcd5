"""Temporary folders, in memory if it has space, or next to an output.

Memory is used because writing the files of a small case to a disk takes longer than computing it.

Each lies in a *holder*, whose file `LOCK` its process locks. A killed process loses the lock, in a
container of its own, too. The next run removes holders that nobody has locked, by their names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.interruption import AT_END

if TYPE_CHECKING:
    from filelock import BaseFileLock

MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 1 << 30
"""The number of bytes that must be free in `MEMORY`. Containers often have 64 MiB."""

LOCK, NEW, OLD = "lock", "new", "old"
"""What a holder holds: its lock, the temporary folder, and folders while others replace them."""

_HOLDER = re.compile(r"(\..+\.)?attn-export-[a-z0-9_]{8}", re.DOTALL)


@contextlib.contextmanager
def scratch(*, in_memory: bool = True) -> Iterator[Path]:
    """Create a temporary folder, which is removed at the end. `TMPDIR` is used if it is set."""
    for parent in (MEMORY, Path(tempfile.gettempdir())):
        _sweep_once(parent)
    parent = _fastest_parent() if in_memory else Path(tempfile.gettempdir())
    with _new_folder(parent, "") as folder:
        yield folder


@contextlib.contextmanager
def folder_beside(output: Path) -> Iterator[Path]:
    """Create a hidden folder next to `output`, which is removed at the end unless it was moved."""
    sweep(output.parent)
    with _new_folder(output.parent, f".{output.name}.") as folder:
        yield folder


def sweep(parent: Path) -> None:
    """Remove the temporary folders of killed processes, and restore old folders."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in list(entries):
            is_holder = _HOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            if is_holder and entry.stat(follow_symlinks=False).st_uid == _user():
                with contextlib.suppress(OSError), _lock_of(Path(entry.path)):
                    _remove(Path(entry.path))


_sweep_once = functools.cache(sweep)


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # of all files on Windows


def _lock_of(holder: Path) -> BaseFileLock:
    from filelock import FileLock  # not above: `--help` takes no lock

    return FileLock(holder / LOCK, timeout=0)


def _remove(holder: Path) -> None:
    """Remove a holder, and put back an old folder that no new one has replaced."""
    for old in (holder / OLD).glob("*"):
        target = holder.with_name(old.name)
        if not os.path.lexists(target):
            old.rename(target)
    shutil.rmtree(holder, ignore_errors=True)


@contextlib.contextmanager
def _new_folder(parent: Path, prefix: str) -> Iterator[Path]:
    while True:
        holder = Path(tempfile.mkdtemp(prefix=f"{prefix}attn-export-", dir=parent))
        try:
            made, lock = holder.stat(), _lock_of(holder)
            lock.acquire()
        except (TimeoutError, FileNotFoundError):
            continue  # another process removes it, for it was not locked yet
        except OSError:
            pass  # where locks are not supported, nothing is removed, either
        if holder.stat()[:5] == made[:5]:  # it is not a new folder of that name
            break
    (holder / NEW).mkdir()
    remove = functools.partial(_remove, holder)
    AT_END.append(remove)
    try:
        yield holder / NEW
    finally:
        remove()
        AT_END.remove(remove)
        lock.release()


def _fastest_parent() -> Path:
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return Path(tempfile.gettempdir())
    enough = shutil.disk_usage(MEMORY).free >= MIN_FREE_BYTES
    return MEMORY if enough else Path(tempfile.gettempdir())
