"""Temporary folders, in memory if it has space, or next to an output.

Memory is used because writing the files of a small case to a disk takes longer than computing it.

Each lies in a *holder*, whose file `LOCK` its process locks. A killed process loses the lock, in a
container of its own, too. The next run removes holders that nobody has locked: folders with their
names, 64 random bits among them, and with nothing else in them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.errors import OutputError
from attn_export.interruption import AT_END
from attn_export.system_info import allow_many_files

if TYPE_CHECKING:
    import numpy as np
    from filelock import BaseFileLock

MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 1 << 30
"""The number of bytes that must be free in `MEMORY`. Containers often have 64 MiB."""

_LEFT = 1 << 20
"""The most bytes that are free where a disk is full: a write that fails may leave some."""

_NOT_USED: list[Path] = []
"""The places in memory that are not used; see `use_disk`."""

HELD = {LOCK := "lock", NEW := "new", OLD := "old"}
"""What a holder holds: its lock, the temporary folder, and folders while others replace them."""

_HOLDER = re.compile(r"(\..+\.)?attn-export\.[0-9a-f]{16}", re.DOTALL)


@contextlib.contextmanager
def scratch(*, in_memory: bool = True) -> Iterator[Path]:
    """Create a temporary folder, which is removed at the end. `TMPDIR` is used if it is set."""
    for parent in (MEMORY, Path(tempfile.gettempdir())):
        _sweep_once(parent)
    parent = _fastest_parent() if in_memory else Path(tempfile.gettempdir())
    with _new_folder(parent, "") as folder, _tells_full(parent):
        yield folder


@contextlib.contextmanager
def _tells_full(folder: Path) -> Iterator[None]:
    """Name a temporary folder whose disk is full, before what this block wrote is removed."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC or shutil.disk_usage(folder).free > _LEFT:
            raise
        raise OutputError(
            f"the temporary folder {folder} is full; free space there, or name another by TMPDIR"
        ) from error


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
            if _HOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _sweep_holder(Path(entry.path))


def _sweep_holder(holder: Path) -> None:
    is_ours = holder.stat().st_uid == _user() and {x.name for x in holder.iterdir()} <= HELD
    if is_ours:
        with _lock_of(holder):
            _remove(holder)


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
    holders: list[Path] = []  # more than one if other processes remove them before they are locked

    def remove() -> None:
        for holder in holders:
            _remove(holder)

    AT_END.append(remove)
    try:
        while True:
            holder = parent / f"{prefix}attn-export.{secrets.token_hex(8)}"
            lock = _lock_of(holder)
            holders.append(holder)
            holder.mkdir(mode=0o700)
            try:
                lock.acquire()
            except (TimeoutError, FileNotFoundError):
                continue
            except OSError:
                pass  # where locks are not supported, nothing is removed, either
            if holder.exists():
                break
        (holder / NEW).mkdir()
        yield holder / NEW
    finally:
        try:
            remove()
        finally:
            AT_END.remove(remove)
            lock.release()


def in_file(array: np.ndarray) -> np.ndarray:
    """Return an array that lies in a temporary file, which goes with the last view of it."""
    return joined_in_file([array]).reshape(array.shape)


def on_disk(array: Any) -> Any:
    """Return a value that is read later: from a file, if it is a large array."""
    if getattr(array, "nbytes", 0) < _SMALL or array.dtype.hasobject:
        return array
    return array if array.dtype.name == "bfloat16" else in_file(array)


_SMALL = 2**16
"""The size in bytes of arrays that stay in memory."""


def joined_in_file(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Return the elements of arrays, one array after another, in such a file."""
    import numpy as np

    folder = Path(tempfile.gettempdir())
    with tempfile.TemporaryFile(dir=folder) as file, _tells_full(folder):
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)
        file.flush()
        if not file.tell():
            return array.reshape(-1)
        allow_many_files()
        view: np.ndarray = np.memmap(file, array.dtype, "r")
    return view


def use_disk() -> None:
    """Put the next temporary folders of this process on the disk, since memory is needed."""
    _NOT_USED.append(MEMORY)


def _fastest_parent() -> Path:
    if MEMORY in _NOT_USED:
        return Path(tempfile.gettempdir())
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return Path(tempfile.gettempdir())
    enough = shutil.disk_usage(MEMORY).free >= MIN_FREE_BYTES
    return MEMORY if enough else Path(tempfile.gettempdir())
