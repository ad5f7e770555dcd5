"""Folders and files that take the place of others in one step: old or new, and whole.

However the process ends, the old one or the new one is there. Remains beside it are removed
by the next run (`scratch.sweep`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from pathlib import Path

from attn_export.interruption import undone
from attn_export.temp_folders import OLD, folder_beside, locked

RENAME_EXCHANGE = 2
"""Flag of Linux's `renameat2`: https://man7.org/linux/man-pages/man2/rename.2.html."""

UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
"""Names of open files: what reads them does not see a file that took their place."""


def take_place(new: Path, target: Path) -> None:
    """Rename a folder to `target`; the old target is removed, and stays if that fails.

    Args:
        new: The folder that was written.
        target: The folder to replace; it may be missing.

    Raises:
        OSError: If it cannot be renamed.
    """
    if not os.path.lexists(target):
        new.rename(target)
    elif exchange(new, target):
        shutil.rmtree(new, ignore_errors=True)
    else:
        _take_place_in_two_steps(new, target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; return False where that is not supported.

    Args:
        one: A folder.
        other: Another folder on the same file system.

    Raises:
        OSError: If one of them cannot be renamed.
    """
    if sys.platform != "linux":
        return False
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    here = -100  # AT_FDCWD
    if call(here, os.fsencode(one), here, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8; after a failure the old one is there. Links are followed.

    Args:
        path: The file to replace; it may be missing.
        content: Text or bytes.

    Raises:
        OSError: If it cannot be written.
    """
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    is_stream = os.path.abspath(path).startswith(STREAMS)  # noqa: PTH100 (links are kept)
    if is_stream or (path.exists() and not path.is_file()):
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))
    try:
        with folder_beside(target) as folder:
            new = folder / target.name
            new.write_bytes(data)
            if target.exists():
                shutil.copymode(target, new)
            new.replace(target)
    except OSError as error:
        # A file may be mounted, or be writable in a folder that is not.
        if error.errno not in READ_ONLY or not target.is_file():
            raise
        target.write_bytes(data)


def _take_place_in_two_steps(new: Path, target: Path) -> None:
    old = new.with_name(new.name + OLD)

    def tidy() -> None:
        if old.exists():
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)

    with undone(tidy), contextlib.ExitStack() as stack:
        # Otherwise another run could take the old one for what a killed process left.
        stack.enter_context(locked(target))
        target.rename(old)
        new.rename(target)
