"""Installation for emulated CPUs: qemu, Python with ONNX Runtime for ARM, and a compiler for ARM.

The compiler builds kits for arm64. CTest runs these on an emulated CPU, with the library in ONNX
Runtime's wheel.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from attn_export.errors import RuntimeFailure
from attn_export.parts.debian_packages import download_headers, unpack_pinned
from attn_export.parts.installing import (
    HEADER,
    LIBRARY,
    LINKS,
    ORT,
    Say,
    digest,
    download_wheels,
    home,
    missing,
    new_installation,
    stamp_of,
)
from attn_export.parts.other_cpus.emulated_cpu import CPUS, PYTHON, TABLE, table
from attn_export.temp_folders import scratch

ARM64_COMPILER = "arm64-compiler"
"""The folder of the compiler within that of the runtimes, and the name for installing it."""


def install(name: str, say: Say) -> None:
    """Install the emulated CPUs, and the compiler if it is named, unless they are up to date.

    All files are written below `home()`, and root is not needed.
    """
    _install_cpus(say)
    if name == ARM64_COMPILER and not_ready():
        _install_compiler(say)


# -- qemu, and Python with ONNX Runtime for ARM -------------------------------------------------

_EMULATORS = ("qemu-aarch64", "qemu-x86_64")
ARM = "aarch64"
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def _install_cpus(say: Say) -> None:
    target, sources = home() / CPUS, digest([TABLE])
    if stamp_of(target) == sources:
        return
    with new_installation(target, sources) as new:
        say("downloading qemu (70 MB), and Python and ONNX Runtime for ARM (45 MB)")
        unpack_pinned(table()["qemu"], new, _is_needed, say)
        for name in _EMULATORS:
            (new / "usr" / "bin" / name).rename(new / name)
        shutil.rmtree(new / "usr")
        root = new / ARM
        unpack_pinned(table()[ARM], root, _is_needed, say)
        _install_wheels(table()[ARM]["wheels"], root / "site")
        _check(new)


def _is_needed(path: str) -> bool:
    if path.startswith("usr/bin/qemu-"):
        return Path(path).name in _EMULATORS
    return path.startswith(("lib/", "usr/lib/", "usr/bin/python"))


def _install_wheels(wheels: Mapping[str, str], folder: Path) -> None:
    with scratch() as work:
        options = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
        for name in _PLATFORMS:
            options += ["--platform", f"{name}_{ARM}"]
        for wheel in download_wheels(wheels, work, *options):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def _check(folder: Path) -> None:
    """Raise RuntimeFailure unless Python starts on an emulated ARM CPU."""
    root = folder / ARM
    command = [str(folder / _EMULATORS[0]), "-L", str(root), str(root / PYTHON), "-S", "-c", ""]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if completed.returncode:
        lines = completed.stderr.strip().splitlines()[-1:] or [f"exit code {completed.returncode}"]
        raise RuntimeFailure(f"Python for ARM does not start under qemu: {lines[0]}")


# -- Debian's C and C++ compiler for arm64, with a toolchain file for CMake ---------------------

SOURCES = Path(__file__).resolve().parent / "arm64_compiler"
PACKAGES, TOOLCHAIN, TOOL = "packages.toml", "toolchain.cmake", "tool"
TOOLS = ("gcc", "g++", "ar", "ranlib")
PREFIX = "aarch64-linux-gnu-"
_UNUSED = ("lto1", "lto-", "san.", "gcov", "doc/", "share/")
"""Parts of the paths of files that are not needed, which are half of all bytes."""


def _install_compiler(say: Say) -> None:
    headers = home() / ORT / HEADER.parent
    if not (home() / ORT / HEADER).is_file():
        download_headers(headers, say)
    with new_installation(home() / ARM64_COMPILER, digest(SOURCES.iterdir())) as new:
        say("downloading Debian's compiler for arm64 (50 MB)")
        packages = tomllib.loads((SOURCES / PACKAGES).read_text(encoding="utf-8"))
        unpack_pinned(packages, new, _is_compiler_file, say)
        shutil.copyfile(SOURCES / TOOLCHAIN, new / TOOLCHAIN)
        _link_tools(new / "bin")
        shutil.copytree(headers, new / ORT / HEADER.parent)
        _link_library(new / ORT / "lib")


def not_ready(_name: str = "") -> str:
    """Return the reason that the compiler for arm64 is not installed, or ""."""
    return missing(ARM64_COMPILER, home() / ARM64_COMPILER / TOOLCHAIN, SOURCES.iterdir())


def _is_compiler_file(path: str) -> bool:
    return not any(part in path for part in _UNUSED)


def _link_tools(folder: Path) -> None:
    folder.mkdir()
    shutil.copyfile(SOURCES / TOOL, folder / TOOL)
    (folder / TOOL).chmod(0o755)
    for name in TOOLS:
        (folder / f"{PREFIX}{name}").symlink_to(TOOL)


def _link_library(folder: Path) -> None:
    """Link the library in the wheel for ARM by relative paths, so that `home()` may be moved."""
    capi = Path(CPUS, ARM, "site", "onnxruntime", "capi")
    libraries = sorted((home() / capi).glob(f"{LIBRARY}.*"))
    if not libraries:
        raise RuntimeFailure(f"{home() / capi} has no {LIBRARY}; remove {home() / CPUS}")
    folder.mkdir()
    for name in LINKS:
        (folder / name).symlink_to(Path("..", "..", "..", capi, libraries[-1].name))
