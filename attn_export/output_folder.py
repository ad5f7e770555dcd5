"""The rule by which commands replace an existing output folder: everything in it is their own.

What `build`, `kit` and `explain` write holds a list of its files with their digests. A folder with
any other file, link or folder in it, or with a changed file, is a user's work.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from attn_export.errors import OutputError
from attn_export.interruption import undone
from attn_export.temp_folders import OLD, folder_beside, locked
from attn_export.untrusted_files import regular_file

# -- the rule by which commands replace an existing output folder -------------------------------

LIST = "attn-export-files.json"
FORMAT = "attn-export-files/1"

Digests = Mapping[str, str]
"""SHA-256 of files, by their names relative to the folder, with slashes."""


def replaceable(
    output: Path, kind: str, listed: Callable[[Path], Digests | None] | None = None
) -> Path:
    """Return where an output folder lies once links are followed, if it may be written.

    Args:
        output: New, empty, or a folder of the same kind as it was written.
        kind: Such as ``"kit"``.
        listed: Reads the list of a folder; None where it is not of this kind. Default: the list
            that `write_list` wrote.

    Raises:
        OutputError: If something else is there.
        OSError: If it cannot be looked at.
    """
    # A link stays, and what it points to is replaced.
    target = Path(os.path.realpath(output))
    check_utf8(target)
    if target in (here := Path.cwd(), *here.parents):
        raise OutputError(f"{target} is the current folder, or holds it; choose another --output")
    if not os.path.lexists(target):
        return target
    if not target.is_dir():
        raise OutputError(f"{target} exists and is no folder; choose another --output")
    if any(target.iterdir()):
        _check_own(target, kind, listed(target) if listed else _read_list(target, kind))
    return target


def check_utf8(path: Path | str) -> None:
    """Refuse a path that is no text: runtimes and file formats take UTF-8 alone.

    Raises:
        OutputError: If so.
    """
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        shown = ascii(str(path))[-120:]
        raise OutputError(
            f"the path {shown} is not UTF-8; rename it, or set a UTF-8 locale: LC_ALL=C.UTF-8"
        ) from error


def write_list(folder: Path, kind: str) -> None:
    """Write the list of all files in a folder. The last file to write.

    Args:
        folder: The folder.
        kind: The kind of folder.
    """
    names = sorted(name for name, is_file in entries(folder) if is_file)
    files = {name: sha256(folder / name) for name in names}
    (folder / LIST).write_text(_to_text(kind, files), encoding="utf-8")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_list(folder: Path, kind: str) -> Digests | None:
    path = folder / LIST
    if path.is_symlink() or not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        files = {str(name): str(value) for name, value in content["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    # Every byte counts: a list to which something was added is not ours.
    return {**files, LIST: sha256(path)} if text == _to_text(kind, files) else None


def _to_text(kind: str, files: Digests) -> str:
    content = {"format": FORMAT, "kind": kind, "files": dict(files)}
    return json.dumps(content, indent=1) + "\n"


def _check_own(target: Path, kind: str, listed: Digests | None) -> None:
    if listed is None:
        raise OutputError(f"{target} exists and is no {kind}; choose another --output or remove it")
    folders = {parent.as_posix() for name in listed for parent in Path(name).parents}
    for name, is_file in entries(target):
        if name not in (listed if is_file else folders):
            raise OutputError(f"{target} holds {name}, which is not the {kind}'s; move it away")
        if is_file and sha256(target / name) != listed[name]:
            raise OutputError(
                f"{target / name} was changed since the {kind} was written; move {target} away or "
                "choose another --output"
            )


def entries(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the name of everything in a folder, and whether it is a file; of links, that alone.

    Raises:
        OSError: If a folder cannot be listed.
    """
    for place, folders, files in os.walk(folder, onerror=_refuse):
        for name in (*folders, *files):
            path = Path(place, name)
            inside = path.relative_to(folder).as_posix()
            if path.is_symlink():
                yield f"{inside} (a link)", True
            elif path.is_dir() or path.is_file():
                yield inside, path.is_file()
            else:
                yield f"{inside} (no plain file)", True


def _refuse(error: OSError) -> None:
    raise error  # what cannot be listed could be anybody's


# -- folders and files that take the place of others in one step: old or new, and whole ---------

# However the process ends, the old one or the new one is there. Remains beside it are removed
# by the next run (`temp_folders.sweep`).

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
