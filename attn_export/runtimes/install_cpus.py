"""Installation for emulated CPUs: qemu, Python with ONNX Runtime for ARM, and a compiler for ARM.

The compiler builds kits for arm64. CTest runs these on an emulated CPU, with the library in ONNX
Runtime's wheel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from attn_export.output_folder import take_place
from attn_export.runtimes.debian_packages import Say, download_headers, unpack_pinned
from attn_export.runtimes.emulated_cpu import NAME, PYTHON, TABLE, table
from attn_export.runtimes.install_folder import STAMP, InstallError, digest, home, missing
from attn_export.runtimes.native import HEADER, LIBRARY, LINKS, ORT
from attn_export.temp_folders import folder_beside, scratch

# -- qemu, and Python with ONNX Runtime for ARM -------------------------------------------------

EMULATORS = ("qemu-aarch64", "qemu-x86_64")
ARM = "aarch64"
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def install(folder: Path, say: Say) -> None:
    """Download and unpack qemu, and Python with ONNX Runtime for ARM, unless they are up to date.

    All files are written below `folder`, and root is not needed.

    Args:
        folder: The folder of all runtimes.
        say: The receiver of progress messages.

    Raises:
        InstallError: If something cannot be downloaded.
    """
    target = folder / NAME
    stamp = target / STAMP
    if stamp.is_file() and stamp.read_text() == digest([TABLE]):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with folder_beside(target) as new:
        say("downloading qemu (70 MB), and Python and ONNX Runtime for ARM (45 MB)")
        unpack_pinned(table()["qemu"], new, _is_needed, say)
        for name in EMULATORS:
            (new / "usr" / "bin" / name).rename(new / name)
        shutil.rmtree(new / "usr")
        root = new / ARM
        unpack_pinned(table()[ARM], root, _is_needed, say)
        _install_wheels(table()[ARM]["wheels"], root / "site")
        _check(new)
        (new / STAMP).write_text(digest([TABLE]))
        take_place(new, target)


def _is_needed(path: str) -> bool:
    if path.startswith("usr/bin/qemu-"):
        return Path(path).name in EMULATORS
    return path.startswith(("lib/", "usr/lib/", "usr/bin/python"))


def _install_wheels(wheels: Mapping[str, str], folder: Path) -> None:
    with scratch() as work:
        pins = work / "requirements.txt"
        pins.write_text("".join(f"{w} --hash=sha256:{sha}\n" for w, sha in wheels.items()))
        base = getattr(sys, "_base_executable", sys.executable)
        command = [
            base, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
            "--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp",
            "--abi", "cp311", "--dest", str(work), "--requirement", str(pins),
        ]  # fmt: skip
        for name in PLATFORMS:
            command += ["--platform", f"{name}_{ARM}"]
        completed = subprocess.run(command, stdout=sys.stderr, check=False)
        if completed.returncode:
            raise InstallError(f"pip could not download {' '.join(wheels)}; see its output above")
        for wheel in sorted(work.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def _check(folder: Path) -> None:
    """Raise InstallError unless Python starts on an emulated ARM CPU."""
    root = folder / ARM
    command = [str(folder / EMULATORS[0]), "-L", str(root), str(root / PYTHON), "-S", "-c", ""]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if completed.returncode:
        lines = completed.stderr.strip().splitlines()[-1:] or [f"exit code {completed.returncode}"]
        raise InstallError(f"Python for ARM does not start under qemu: {lines[0]}")


# -- Debian's C and C++ compiler for arm64, with a toolchain file for CMake ---------------------

COMPILER = "arm64-compiler"
"""The folder of the compiler within that of the runtimes, and the name for installing it."""

SOURCES = Path(__file__).resolve().parent / "arm64_compiler"
PACKAGES, TOOLCHAIN, TOOL = "packages.toml", "toolchain.cmake", "tool"
TOOLS = ("gcc", "g++", "ar", "ranlib")
PREFIX = "aarch64-linux-gnu-"
UNUSED = ("lto1", "lto-", "san.", "gcov", "doc/", "share/")
"""Parts of the paths of files that are not needed, which are half of all bytes."""


def install_compiler(folder: Path, say: Say) -> None:
    """Download and unpack the compiler and the emulated CPUs, unless they are up to date.

    All files are written below `folder`, and root is not needed.

    Args:
        folder: The folder of all runtimes.
        say: The receiver of progress messages.

    Raises:
        InstallError: If something cannot be downloaded.
    """
    install(folder, say)
    if not not_ready(folder):
        return
    headers = folder / ORT / HEADER.parent
    if not (folder / ORT / HEADER).is_file():
        download_headers(headers, say)
    target = folder / COMPILER
    with folder_beside(target) as new:
        say("downloading Debian's compiler for arm64 (50 MB)")
        packages = tomllib.loads((SOURCES / PACKAGES).read_text(encoding="utf-8"))
        unpack_pinned(packages, new, _is_compiler_file, say)
        shutil.copyfile(SOURCES / TOOLCHAIN, new / TOOLCHAIN)
        _link_tools(new / "bin")
        shutil.copytree(headers, new / ORT / HEADER.parent)
        _link_library(folder, new / ORT / "lib")
        (new / STAMP).write_text(digest(SOURCES.iterdir()))
        take_place(new, target)


def not_ready(folder: Path | None = None) -> str:
    """Return the reason that the compiler for arm64 is not installed, or "".

    Args:
        folder: The folder of all runtimes. Default: `home`.
    """
    return missing(COMPILER, (folder or home()) / COMPILER / TOOLCHAIN, SOURCES.iterdir())


def _is_compiler_file(path: str) -> bool:
    return not any(part in path for part in UNUSED)


def _link_tools(folder: Path) -> None:
    folder.mkdir()
    shutil.copyfile(SOURCES / TOOL, folder / TOOL)
    (folder / TOOL).chmod(0o755)
    for name in TOOLS:
        (folder / f"{PREFIX}{name}").symlink_to(TOOL)


def _link_library(runtimes: Path, folder: Path) -> None:
    """Link the library in the wheel for ARM by relative paths, so that `runtimes` may be moved."""
    capi = Path(NAME, ARM, "site", "onnxruntime", "capi")
    libraries = sorted((runtimes / capi).glob(f"{LIBRARY}.*"))
    if not libraries:
        raise InstallError(f"{runtimes / capi} has no {LIBRARY}; remove {runtimes / NAME}")
    folder.mkdir()
    for name in LINKS:
        (folder / name).symlink_to(Path("..", "..", "..", capi, libraries[-1].name))
