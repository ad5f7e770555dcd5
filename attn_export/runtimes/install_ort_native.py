"""Build of the programs behind `c` and `cpp`, over the code of the kits.

ONNX Runtime's library is the one in its wheel, which has no headers; those come from Debian's
package. The C API is stable: a library runs what was built with headers older than itself.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from attn_export.atomic_replace import take_place
from attn_export.runtimes.install_folder import SETUP, STAMP, InstallError, digest, missing
from attn_export.temp_folders import folder_beside, held_locks, scratch

# -- ONNX Runtime's headers, out of the package of Debian's current stable release --------------

# They are all that is used of it: its library needs a newer system than the wheel's.


RELEASE, PACKAGE = "trixie", "libonnxruntime-dev"
ARCHIVE = "https://deb.debian.org/debian"
SECONDS = 120

_MAGIC, _HEADER = b"!<arch>\n", 60
"""Of an `ar` archive, which is what a Debian package is, and of each file in it."""


def bring_headers(folder: Path, say: Callable[[str], None]) -> None:
    """Download the headers into a folder.

    Raises:
        InstallError: If no archive can be reached, or sends something else.
    """
    say(f"downloading {PACKAGE}")
    errors = []
    for archive in dict.fromkeys((ARCHIVE, *_archives_of_this_machine())):
        try:
            headers = _headers(_package(archive))
        except (OSError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
            errors.append(f"{archive}: {error}")
            continue
        _write(headers, folder)
        return
    raise InstallError(
        f"ONNX Runtime's headers cannot be downloaded ({'; '.join(errors)}); put those of a "
        f"release (onnxruntime-linux-x64-*.tgz, include/*.h) into {folder}"
    )


def _archives_of_this_machine() -> Iterator[str]:
    """Yield the archives in apt's configuration: a mirror may be the only one within reach."""
    apt = Path("/etc/apt")
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        if path.is_file():
            yield from re.findall(r"https?://\S+/debian(?=/?\s)", path.read_text(errors="replace"))


def _package(archive: str) -> bytes:
    """Return the package; its digest must match the archive's index."""
    index = _fetch(f"{archive}/dists/{RELEASE}/main/binary-amd64/Packages.xz")
    entries = "\n" + lzma.decompress(index).decode()
    at = entries.find(f"\nPackage: {PACKAGE}\n")
    if at < 0:
        raise ValueError(f"it has no {PACKAGE}")
    lines = entries[at + 1 : entries.index("\n\n", at)].splitlines()
    fields = dict(line.split(": ", 1) for line in lines if ": " in line and line[0] != " ")
    package = _fetch(f"{archive}/{fields['Filename']}")
    if hashlib.sha256(package).hexdigest() != fields["SHA256"]:
        raise ValueError(f"{fields['Filename']} has not the digest that the index says")
    return package


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        content: bytes = answer.read()
    return content


def _headers(package: bytes) -> dict[str, bytes]:
    """Return the header files of a Debian package, by their names without folders."""
    for name, content in _members(package):
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                found = {
                    PurePosixPath(member.name).name: archive.extractfile(member)
                    for member in archive
                    if member.isfile() and member.name.endswith(".h")
                }
                return {name: file.read() for name, file in found.items() if file is not None}
    raise ValueError("it is no Debian package")


def _members(package: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an `ar` archive: a header of fixed width each, content padded to even."""
    if not package.startswith(_MAGIC):
        raise ValueError("it is no Debian package")
    at = len(_MAGIC)
    while at + _HEADER <= len(package):
        header = package[at : at + _HEADER]
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        at += _HEADER
        yield name, package[at : at + size]
        at += size + size % 2


def _write(headers: dict[str, bytes], folder: Path) -> None:
    """Write all headers or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder) as new:
        for name, content in headers.items():
            (new / name).write_bytes(content)
        take_place(new, folder)


NATIVE = ("c", "cpp")
ORT = "onnxruntime"
LIBRARY = "libonnxruntime.so"
LINKS = (LIBRARY, f"{LIBRARY}.1")
"""Names under which the library is looked for: when a program is linked, and when it runs."""

RUNTIMES = Path(__file__).resolve().parent
HARNESS, KITS = RUNTIMES / "harness", RUNTIMES.parent / "kits"
APT = "apt-get install g++ cmake make"

Say = Callable[[str], None]

_ERROR = re.compile(r"error:|^CMake Error", re.IGNORECASE)


def install(folder: Path, say: Say) -> None:
    """Build both programs; quick where nothing has changed.

    Args:
        folder: Where programs are installed.
        say: Receives a message before each long step.

    Raises:
        InstallError: If something is missing; the message gives the remedy.
    """
    ort = folder / ORT
    _link_library(ort / "lib")
    waiting = [name for name in NATIVE if not_ready(name, folder)]
    if not waiting:
        return
    _check_tools()
    if not (ort / "include" / "onnxruntime_cxx_api.h").is_file():
        bring_headers(ort / "include", say)
    for name in waiting:
        say(f"building the program of {name}")
        _build(name, folder)


def program_of(name: str, folder: Path) -> Path:
    """Return the path of the program of a runtime."""
    return folder / name / "serve"


def not_ready(name: str, folder: Path) -> str:
    """Return the reason that the program of a runtime cannot be run, or ""."""
    reason = missing(name, program_of(name, folder), sources_of(name))
    library = folder / ORT / "lib" / LINKS[-1]
    if not reason and not library.is_file():
        return f"{library} is gone; run {SETUP} {name}"
    return reason


def sources_of(name: str) -> list[Path]:
    """Return the source files of the program of a runtime."""
    modules = ("cache", "model", "tensor", *(("error",) if name == "c" else ()))
    files = (f"src/{module}.{suffix}" for module in modules for suffix in (name, "h"))
    kit = [KITS / name / file for file in ("CMakeLists.txt", *files)]
    return [HARNESS / "CMakeLists.txt", HARNESS / f"serve.{name}", *kit]


def _link_library(folder: Path) -> None:
    """Link the library of the wheel under its usual names."""
    library = _library()
    folder.mkdir(parents=True, exist_ok=True)
    for name in LINKS:
        link = folder / name
        if link.is_symlink() and link.readlink() == library:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(library)


def _library() -> Path:
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        raise InstallError("onnxruntime is not installed; pip install onnxruntime")
    found = sorted((Path(spec.origin).parent / "capi").glob(f"{LIBRARY}*"))
    if not found:
        raise InstallError(f"the onnxruntime that is installed has no {LIBRARY}; this needs Linux")
    return found[-1]


def _check_tools() -> None:
    wanted = {
        "C compiler": os.environ.get("CC", "cc"),
        "C++ compiler": os.environ.get("CXX", "c++"),
        "cmake": "cmake",
        "make": "make",
    }
    for what, program in wanted.items():
        if shutil.which(program.split()[0]) is None:
            raise InstallError(f"there is no {what} ({program}); {APT}")


def _build(name: str, folder: Path) -> None:
    """Build beside the old program, and put the new one in its place."""
    with scratch() as build:
        _run(
            "cmake", "-G", "Unix Makefiles", "-S", HARNESS, "-B", build, f"-DLANGUAGE={name}",
            "-DCMAKE_BUILD_TYPE=Release", f"-DONNXRUNTIME_ROOT={folder / ORT}",
            # So that the folder may be moved.
            f"-DCMAKE_BUILD_RPATH=$ORIGIN/../{ORT}/lib",
        )  # fmt: skip
        _run("cmake", "--build", build)
        with folder_beside(folder / name) as new:
            shutil.copy2(build / "serve", new / "serve")
            (new / STAMP).write_text(digest(sources_of(name)))
            take_place(new, folder / name)


def _run(*command: str | Path) -> None:
    done = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        pass_fds=held_locks(),
    )  # fmt: skip
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        first = next((at for at, line in enumerate(lines) if _ERROR.search(line)), 0)
        raise InstallError(f"{command[0]} failed: {' '.join(lines[first : first + 2])}")
