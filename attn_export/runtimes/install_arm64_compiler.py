"""Installation of Debian's C and C++ compiler for arm64, with a toolchain file for CMake.

CTest runs what it built on an emulated CPU, with ONNX Runtime's library of the wheel for ARM.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from attn_export.output_folder import take_place
from attn_export.runtimes import install_cpus
from attn_export.runtimes.debian_packages import Say, bring_headers, unpack_pinned
from attn_export.runtimes.emulated_cpu import NAME as CPUS
from attn_export.runtimes.install_cpus import ARM
from attn_export.runtimes.install_folder import STAMP, InstallError, digest, home, missing
from attn_export.runtimes.install_ort_native import HEADER, LIBRARY, LINKS, ORT
from attn_export.temp_folders import folder_beside

NAME = "arm64-compiler"
"""The folder below that of the runtimes, and the name by which it is set up."""

SOURCES = Path(__file__).resolve().parent / "arm64_compiler"
PACKAGES, TOOLCHAIN, TOOL = "packages.toml", "toolchain.cmake", "tool"
TOOLS = ("gcc", "g++", "ar", "ranlib")
PREFIX = "aarch64-linux-gnu-"
UNUSED = ("lto1", "lto-", "san.", "gcov", "doc/", "share/")
"""Parts of the paths of files that nothing here uses: half of all bytes."""


def install(folder: Path, say: Say) -> None:
    """Download and unpack; quick where it is there.

    Nothing goes into the system, and no root is needed. Emulated CPUs are installed as well.

    Args:
        folder: The folder of all runtimes.
        say: The receiver of progress messages.

    Raises:
        InstallError: If something cannot be downloaded.
    """
    install_cpus.install(folder, say)
    if not not_ready(folder):
        return
    headers = folder / ORT / HEADER.parent
    if not (folder / ORT / HEADER).is_file():
        bring_headers(headers, say)
    target = folder / NAME
    with folder_beside(target) as new:
        say("downloading Debian's compiler for arm64 (50 MB)")
        packages = tomllib.loads((SOURCES / PACKAGES).read_text(encoding="utf-8"))
        unpack_pinned(packages, new, _is_needed, say)
        shutil.copyfile(SOURCES / TOOLCHAIN, new / TOOLCHAIN)
        _link_tools(new / "bin")
        shutil.copytree(headers, new / ORT / HEADER.parent)
        _link_library(folder, new / ORT / "lib")
        (new / STAMP).write_text(digest(SOURCES.iterdir()))
        take_place(new, target)


def not_ready(folder: Path | None = None) -> str:
    """Return the reason that nothing can be compiled for arm64 here, or "".

    Args:
        folder: The folder of all runtimes. Default: `home`.
    """
    return missing(NAME, (folder or home()) / NAME / TOOLCHAIN, SOURCES.iterdir())


def _is_needed(path: str) -> bool:
    return not any(part in path for part in UNUSED)


def _link_tools(folder: Path) -> None:
    folder.mkdir()
    shutil.copyfile(SOURCES / TOOL, folder / TOOL)
    (folder / TOOL).chmod(0o755)
    for name in TOOLS:
        (folder / f"{PREFIX}{name}").symlink_to(TOOL)


def _link_library(runtimes: Path, folder: Path) -> None:
    """Link the library of the wheel for ARM, so that the folder of all runtimes may be moved."""
    capi = Path(CPUS, ARM, "site", "onnxruntime", "capi")
    found = sorted((runtimes / capi).glob(f"{LIBRARY}.*"))
    if not found:
        raise InstallError(f"{runtimes / capi} has no {LIBRARY}; remove {runtimes / CPUS}")
    folder.mkdir()
    for name in LINKS:
        (folder / name).symlink_to(Path("..", "..", "..", capi, found[-1].name))
