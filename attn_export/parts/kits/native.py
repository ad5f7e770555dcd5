"""ONNX Runtime through its C and C++ APIs: programs, one of the code of the kit `c`.

The programs link to ONNX Runtime's library in the wheel. The wheel has no headers; they come from
Debian's package, which may be older: the C API is stable, so that a newer library works with them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from attn_export.errors import RuntimeFailure
from attn_export.parts.installing import (
    HEADER,
    LIBRARY,
    LINKS,
    ORT,
    Say,
    digest,
    home,
    missing,
    new_installation,
    run_command,
    setup_command,
)
from attn_export.parts.kits.program import ProgramRuntime
from attn_export.parts.kits.source_folders import HARNESS, KITS
from attn_export.runtimes.protocol import Runtime, installed_version
from attn_export.system_info import missing_package
from attn_export.temp_folders import scratch

# -- the build of their programs ----------------------------------------------------------------

APT = "apt-get install g++ cmake make"

ERROR = r"(?i)^(.*error:|CMake Error).*\n?.*"
"""A regular expression for the first error of a build, with the line after it."""


def install(name: str, say: Say) -> None:
    """Build the program of a runtime, unless it is up to date. `say` receives messages."""
    ort = home() / ORT
    _link_library(ort / "lib")
    if not not_ready(name):
        return
    _check_tools()
    if not (ort / HEADER).is_file():
        from attn_export.parts.debian_packages import download_headers

        download_headers(ort / "include", say)
    say(f"building the program of {name}")
    _build(name)


def ort_root() -> Path | None:
    """Return the folder with ONNX Runtime's headers and library, if programs were built here."""
    folder = home() / ORT
    complete = (folder / HEADER).is_file() and (folder / "lib" / LIBRARY).is_file()
    return folder if complete else None


def program_of(name: str) -> Path:
    """Return the path of the program of a runtime."""
    return home() / name / "serve"


def not_ready(name: str) -> str:
    """Return the reason that the program of a runtime cannot be run, or ""."""
    reason = missing(name, program_of(name), sources_of(name))
    library = home() / ORT / "lib" / LINKS[-1]
    if not reason and not library.is_file():
        return f"{library} is gone; run {setup_command(name)}"
    return reason


def sources_of(name: str) -> list[Path]:
    """Return the source files of the program of a runtime."""
    own = [HARNESS / "CMakeLists.txt", HARNESS / f"serve.{name}"]
    if name == "cpp":
        return own
    modules = (f"src/{name}.{end}" for name in ("cache", "model", "ort_library") for end in "ch")
    core = sorted(path for path in (KITS / "core").iterdir() if path.is_file())
    return [*own, *(KITS / "c" / file for file in ("CMakeLists.txt", *modules)), *core]


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
        raise RuntimeFailure(missing_package(ORT))
    libraries = sorted((Path(spec.origin).parent / "capi").glob(f"{LIBRARY}*"))
    if not libraries:
        raise RuntimeFailure(
            f"the onnxruntime that is installed has no {LIBRARY}; this needs Linux"
        )
    return libraries[-1]


def _check_tools() -> None:
    tools = {
        "C compiler": os.environ.get("CC", "cc"),
        "C++ compiler": os.environ.get("CXX", "c++"),
        "cmake": "cmake",
        "make": "make",
    }
    for tool, program in tools.items():
        if shutil.which(program.split()[0]) is None:
            raise RuntimeFailure(f"there is no {tool} ({program}); {APT}")


def _build(name: str) -> None:
    """Build a program, and replace the old one in one step."""
    with scratch() as build:
        configure: list[str | Path] = [
            "cmake", "-G", "Unix Makefiles", "-S", HARNESS, "-B", build, f"-DLANGUAGE={name}",
            "-DCMAKE_BUILD_TYPE=Release", f"-DONNXRUNTIME_ROOT={home() / ORT}",
            # A relative path, so that the folder may be moved.
            f"-DCMAKE_BUILD_RPATH=$ORIGIN/../{ORT}/lib",
        ]  # fmt: skip
        run_command(configure, "cmake failed", ERROR)
        run_command(["cmake", "--build", build], "cmake failed", ERROR)
        with new_installation(home() / name, digest(sources_of(name))) as new:
            shutil.copy2(build / "serve", new / "serve")


# -- ONNX Runtime in C: a program over its C API, that of the kit `c` ---------------------------


class C(ProgramRuntime):
    """The runtime `c`."""

    name = "c"
    keeps_non_finite = True
    device = "cpu"
    measured = "1.31.1"

    def version(self) -> str | None:
        """Return the version of the wheel whose library the program uses."""
        return installed_version("onnxruntime-gpu", "onnxruntime")

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        return not_ready(self.name)

    def command(self) -> list[Path]:
        """Return the command line of the program."""
        return [program_of(self.name)]


# -- ONNX Runtime in C++: a program over its C++ API --------------------------------------------


class _Cpp(C):
    """The runtime `cpp`."""

    name = "cpp"


def runtimes_of(name: str) -> Sequence[Runtime]:
    """Return the runtime `c` or `cpp`."""
    return [_Cpp() if name == _Cpp.name else C()]
