"""Temporary folders, in memory if it has space, or next to an output.

Memory is used because writing the files of a small case to a disk takes longer than computing it.

A process locks its folders while it uses them, and loses the locks when it is killed. The next run
removes folders without a lock. Unlike process ids, locks also work across containers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attn_export.interruption import undo_at_end

if sys.platform != "win32":
    import fcntl

MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 1 << 30
"""The number of bytes that must be free in `MEMORY`. Containers often have 64 MiB."""

OLD = ".old"
"""The suffix of the name of an old folder while a new one replaces it."""

# Older releases without locks used other names. Their folders are not removed.
_SCRATCH = re.compile(r"attn-export\.[0-9a-f]{16}")
_BESIDE = re.compile(r"\.(?P<target>.+)\.attn-export-[0-9a-f]{16}(?P<old>\.old)?", re.DOTALL)

_locks: set[int] = set()


@contextlib.contextmanager
def scratch(*, in_memory: bool = True) -> Iterator[Path]:
    """Create a temporary folder, which is removed at the end. `TMPDIR` is used if it is set."""
    for parent in (MEMORY, Path(tempfile.gettempdir())):
        _sweep_once(parent)
    parent = _fastest_parent() if in_memory else Path(tempfile.gettempdir())
    with _new_folder(parent, "attn-export.", mode=0o700) as folder:
        yield folder


@contextlib.contextmanager
def folder_beside(output: Path) -> Iterator[Path]:
    """Create a hidden folder next to `output`, which is removed at the end unless it was moved."""
    sweep(output.parent)
    with _new_folder(output.parent, f".{output.name}.attn-export-") as folder:
        yield folder


def sweep(parent: Path) -> None:
    """Remove the temporary folders of killed processes, and restore old folders."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in list(entries):
            name = _BESIDE.fullmatch(entry.name) or _SCRATCH.fullmatch(entry.name)
            if name and entry.is_dir(follow_symlinks=False):
                _sweep_folder(Path(entry.path), name)


_sweep_once = functools.cache(sweep)


def held_locks() -> tuple[int, ...]:
    """Return the descriptors of all locks, for a child process that must keep the locks, too."""
    return tuple(_locks)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder in this block, so that no other process removes it, even if it is renamed.

    It is no error if another process has locked it.
    """
    try:
        lock = _lock(folder)
    except OSError:
        lock = None
    try:
        yield
    finally:
        _release(lock)


@contextlib.contextmanager
def _new_folder(parent: Path, prefix: str, mode: int = 0o777) -> Iterator[Path]:
    locks: list[int | None] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: _release(*locks))  # runs last
        while not locks:
            folder = parent / f"{prefix}{os.urandom(8).hex()}"
            remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(undo_at_end(remove))
            folder.mkdir(mode=mode)
            # Another process may remove the folder before it is locked.
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                locks.append(_lock(folder))
        yield folder


def _lock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed; return None if locks are not supported."""
    if sys.platform == "win32":
        return None
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(number), folder.stat(follow_symlinks=False)):
            raise FileNotFoundError(f"{folder} was removed")
    except (BlockingIOError, FileNotFoundError):
        os.close(number)
        raise
    except OSError:
        os.close(number)
        return None
    _locks.add(number)
    return number


def _release(*locks: int | None) -> None:
    for lock in locks:
        if lock is not None:
            _locks.discard(lock)
            os.close(lock)


def _sweep_folder(folder: Path, name: re.Match[str]) -> None:
    try:
        lock = _lock(folder)
    except OSError:
        return  # in use, or removed by another process
    try:
        if lock is None or os.fstat(lock).st_uid != os.geteuid():
            return
        groups = name.groupdict()
        target = folder.with_name(groups.get("target") or folder.name)
        if groups.get("old") and not os.path.lexists(target):
            folder.rename(target)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        _release(lock)


def _fastest_parent() -> Path:
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return Path(tempfile.gettempdir())
    enough = shutil.disk_usage(MEMORY).free >= MIN_FREE_BYTES
    return MEMORY if enough else Path(tempfile.gettempdir())
