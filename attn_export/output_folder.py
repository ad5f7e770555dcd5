"""Replacement of output folders: only if nothing in them is a user's work, and in one step.

The folders that `build`, `kit` and `explain` write contain a list of their files with digests. A
folder with another file, link or folder, or with a changed file, is not replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from attn_export.errors import OutputError
from attn_export.temp_folders import OLD, folder_beside
from attn_export.untrusted_files import open_regular

# -- checks of an existing output folder --------------------------------------------------------

LIST = "attn-export-files.json"
FORMAT = "attn-export-files/1"

Digests = Mapping[str, str]
"""The SHA-256 of files, by their names relative to the folder, with slashes."""


def replaceable(
    output: Path, kind: str, listed: Callable[[Path], Digests | None] | None = None
) -> Path:
    """Return the path of an output folder that may be replaced, with links resolved.

    It must not exist, or be empty, or be an unchanged folder of the same kind.

    `listed`: A function that reads the list of files of a folder, or returns None if the folder is
    not of this kind. Default: one that reads the list of `write_list`.
    """
    # A link is kept; the folder to which it points is replaced.
    target = Path(os.path.realpath(output))
    check_utf8(target)
    if target in (here := Path.cwd(), *here.parents):
        raise OutputError(f"{target} is the current folder, or holds it; choose another --output")
    if not os.path.lexists(target):
        return target
    if not target.is_dir():
        raise OutputError(f"{target} exists and is not a folder; choose another --output")
    if not os.access(target, os.W_OK):  # it moves to another parent, which writes to it
        raise OutputError(f"{target} is read-only; make it writable, or choose another --output")
    if any(target.iterdir()):
        _check_unchanged(target, kind, listed(target) if listed else _read_list(target, kind))
    return target


def check_utf8(path: Path | str) -> None:
    """Refuse a path that is not UTF-8, which runtimes and file formats require."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        shown = ascii(str(path))[-120:]
        raise OutputError(
            f"the path {shown} is not UTF-8; rename it, or set a UTF-8 locale: LC_ALL=C.UTF-8"
        ) from error


def write_list(folder: Path, kind: str) -> None:
    """Write the list of all files in a folder. It must be written last."""
    names = sorted(name for name, is_file in entries(folder) if is_file)
    files = {name: sha256(folder / name) for name in names}
    (folder / LIST).write_text(_to_text(kind, files), encoding="utf-8")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_regular(path) as file:
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
    # The list must be byte for byte what `write_list` writes.
    return {**files, LIST: sha256(path)} if text == _to_text(kind, files) else None


def _to_text(kind: str, files: Digests) -> str:
    content = {"format": FORMAT, "kind": kind, "files": dict(files)}
    return json.dumps(content, indent=1) + "\n"


def _check_unchanged(target: Path, kind: str, listed: Digests | None) -> None:
    if listed is None:
        raise OutputError(f"{target} exists and is no {kind}; choose another --output or remove it")
    name, is_listed = first_change(target, listed)
    if name and is_listed:
        raise OutputError(
            f"{target / name} was changed since the {kind} was written; move {target} away or "
            "choose another --output"
        )
    if name:
        raise OutputError(f"{target} holds {name}, which is not the {kind}'s; move it away")


def first_change(folder: Path, listed: Digests) -> tuple[str, bool]:
    """Return something in a folder that is not as listed, or "", and whether it is listed."""
    folders = {parent.as_posix() for name in listed for parent in Path(name).parents}
    for name, is_file in entries(folder):
        if name not in (listed if is_file else folders):
            return name, False
        if is_file and sha256(folder / name) != listed[name]:
            return name, True
    return "", False


def entries(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the name of each file, folder and link in a folder, and whether it is no folder.

    The names of links and special files have a suffix that says so.
    """
    for parent, folders, files in os.walk(folder, onerror=_raise):
        for name in (*folders, *files):
            path = Path(parent, name)
            inside = path.relative_to(folder).as_posix()
            if path.is_symlink():
                yield f"{inside} (a link)", True
            elif path.is_dir() or path.is_file():
                yield inside, path.is_file()
            else:
                yield f"{inside} (no plain file)", True


def _raise(error: OSError) -> None:
    raise error  # a folder that cannot be listed may contain a user's files


# -- replacement of folders and files in one step -----------------------------------------------

# However the process ends, either the old or the new folder or file is complete.

RENAME_EXCHANGE, AT_FDCWD = 2, -100
"""Arguments of Linux's `renameat2`: https://man7.org/linux/man-pages/man2/rename.2.html."""

_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""The errors of `renameat2` on systems without it."""

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""The errors for a file that cannot be replaced, but may be writable."""

_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
"""Prefixes of paths that stand for open files, which must be written to and not replaced."""


@contextlib.contextmanager
def write_errors(output: Path | str) -> Iterator[None]:
    """Turn an OSError in this block into an OutputError that names the output."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error


@contextlib.contextmanager
def replacement_of(output: Path, kind: str) -> Iterator[Path]:
    """Yield a new folder, which gets a list of its files and replaces `output` after the block."""
    with write_errors(output):
        target = replaceable(output, kind)
        target.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(target) as folder:
            yield folder
            write_list(folder, kind)
            take_place(folder, replaceable(target, kind))


def take_place(new: Path, target: Path) -> None:
    """Replace a folder by one of `folder_beside`. If that fails, the old folder is kept."""
    if not os.path.lexists(target):
        new.rename(target)
    elif not exchange(new, target):
        # If the process ends between the renames, `temp_folders` puts the old folder back.
        old = new.with_name(OLD) / target.name
        old.parent.mkdir()
        target.rename(old)
        new.rename(target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; return False if the system cannot."""
    library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    call = getattr(library, "renameat2", None)
    if call is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if call(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step. If that fails, the old file is kept. Links are followed."""
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    is_stream = os.path.abspath(path).startswith(_STREAMS)  # noqa: PTH100 (links are kept)
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
        # The file may be a mount point, or writable in a read-only folder.
        if error.errno not in _READ_ONLY or not target.is_file():
            raise
        target.write_bytes(data)
