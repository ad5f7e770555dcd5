"""Temporary folders: in memory if it has space, or beside their targets.

On disk, making the files of a small case takes longer than computing it.

Each folder is locked as long as a process uses it, and a killed process loses its locks: the next
run removes folders of ours that nobody has locked. A lock, unlike a process id, also says so for
processes in other containers.
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

from attn_export.interruption import undone

if sys.platform != "win32":
    import fcntl

MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 1 << 30
"""Bytes that have to be free there; containers often have 64 MiB."""

OLD = ".old"
"""End of the name under which a folder waits until another has taken its place."""

# Versions that locked nothing called their folders otherwise: those are left alone.
_SCRATCH = re.compile(r"attn-export\.[0-9a-f]{16}")
_BESIDE = re.compile(r"\.(?P<target>.+)\.attn-export-[0-9a-f]{16}(?P<old>\.old)?", re.DOTALL)

_held: set[int] = set()


@contextlib.contextmanager
def scratch(*, in_memory: bool = True) -> Iterator[Path]:
    """Make a new folder, removed at the end. `TMPDIR` is honoured where it is set.

    Args:
        in_memory: Whether it may lie in memory; false for copies of large files.
    """
    for place in (MEMORY, Path(tempfile.gettempdir())):
        _sweep_once(place)
    place = _place() if in_memory else Path(tempfile.gettempdir())
    with _new_folder(place, "attn-export.", mode=0o700) as folder:
        yield folder


@contextlib.contextmanager
def folder_beside(output: Path) -> Iterator[Path]:
    """Make a new folder beside `output`, removed at the end unless it was moved.

    Its name starts with a dot, so that an incomplete folder stays hidden.

    Raises:
        OSError: If it cannot be made.
    """
    sweep(output.parent)
    with _new_folder(output.parent, f".{output.name}.attn-export-") as folder:
        yield folder


def sweep(place: Path) -> None:
    """Remove the remains of killed processes in a folder; restore their targets."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in list(entries):
            left = _BESIDE.fullmatch(entry.name) or _SCRATCH.fullmatch(entry.name)
            if left and entry.is_dir(follow_symlinks=False):
                _sweep_folder(Path(entry.path), left)


def held_locks() -> tuple[int, ...]:
    """Return file descriptors for a child process: while it lives, its folders are in use."""
    return tuple(_held)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from sweeping a folder, under any name; it may be in use."""
    try:
        lock = _lock(folder)
    except OSError:
        lock = None
    try:
        yield
    finally:
        _release(lock)


@contextlib.contextmanager
def _new_folder(place: Path, prefix: str, mode: int = 0o777) -> Iterator[Path]:
    locks: list[int | None] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: _release(*locks))  # the last thing to do
        while not locks:
            folder = place / f"{prefix}{os.urandom(8).hex()}"
            remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(undone(remove))
            folder.mkdir(mode=mode)
            # Another process may come between, and sweep it.
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                locks.append(_lock(folder))
        yield folder


def _lock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed; None where the file system has no locks.

    Raises:
        BlockingIOError: If another process has locked it.
        FileNotFoundError: If it is not there, or no longer.
    """
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
    _held.add(number)
    return number


def _release(*locks: int | None) -> None:
    for lock in locks:
        if lock is not None:
            _held.discard(lock)
            os.close(lock)


def _sweep_folder(folder: Path, left: re.Match[str]) -> None:
    try:
        lock = _lock(folder)
    except OSError:
        return  # in use, or swept by another
    try:
        if lock is None or os.fstat(lock).st_uid != os.geteuid():
            return
        groups = left.groupdict()
        target = folder.with_name(groups.get("target") or folder.name)
        if groups.get("old") and not os.path.lexists(target):
            folder.rename(target)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        _release(lock)


@functools.cache
def _sweep_once(place: Path) -> None:
    sweep(place)


def _place() -> Path:
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return Path(tempfile.gettempdir())
    enough = shutil.disk_usage(MEMORY).free >= MIN_FREE_BYTES
    return MEMORY if enough else Path(tempfile.gettempdir())
