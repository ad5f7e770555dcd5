"""Build of stand-in libraries, with which the CUDA provider loads on a machine without a GPU.

They must fit the provider in the installed wheel: they must define each function to which it links,
in libraries of the same names and versions.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from attn_export.output_folder import take_place
from attn_export.runtimes.install_folder import (
    CUDA_STAND_IN,
    SETUP,
    STAMP,
    InstallError,
    digest,
    home,
)
from attn_export.runtimes.protocol import installed_version
from attn_export.temp_folders import folder_beside, held_locks, scratch

NAME = CUDA_STAND_IN

PROVIDER = "libonnxruntime_providers_cuda.so"
SOURCES = Path(__file__).resolve().parent / "cuda_stand_in"
APT = "apt-get install gcc binutils"

LIBRARIES: Mapping[str, str] = {
    "libcudart.so.13": "cudart.c",
    "libcublas.so.13": "cublas.c",
    "libcublasLt.so.13": "cublasLt.c",
    "libcurand.so.10": "curand.c",
    "libcuda.so.1": "cuda.c",
}
"""The source file of each library. The first library holds the record to which the others write."""

REFUSED = ("libcudnn.so", "libcudnn.so.9")
"""File names of cuDNN. Files that are no libraries are written under these names, so that the
provider does not load a real cuDNN of the machine."""

HEADERS: Mapping[str, str] = {
    "nvidia-cuda-runtime==13.0.88": (
        "422a38f7c739ecbdd3a4b6ec7ed0a1d74db43d8e9bc26685f3d845638922b178"
    ),
    "nvidia-cuda-crt==13.0.88": "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
}
"""The PyPI packages with CUDA's headers, and the SHA-256 of their wheels."""

INCLUDE = "nvidia/cu13/include/"
MOST_BYTES = 64 << 20

_OF_CUDA = re.compile(r"lib(cu|nv)\w+\.so")
_SYMBOL = re.compile(r"(?P<name>(?:__)?cu\w+)(?:@+(?P<version>\S+))?\Z")


def install(folder: Path, say: Callable[[str], None]) -> None:
    """Build the libraries, unless they are up to date.

    Args:
        folder: The folder of built runtimes.
        say: Receives a message before each long step.

    Raises:
        InstallError: If something is missing, or the installed provider asks for a function or a
            library without a stand-in. The message names it.
    """
    if not not_ready(folder):
        return
    provider = _provider()
    if provider is None:
        raise InstallError(f"there is no {PROVIDER} here; pip install onnxruntime-gpu")
    for program in (_compiler(), "nm", "readelf"):
        if shutil.which(program) is None:
            raise InstallError(f"there is no {program}; {APT}")
    _check_libraries(_linked_libraries(provider))
    required = _required_symbols(provider)
    with folder_beside(folder / NAME) as new, scratch() as work:
        say("downloading CUDA's headers")
        _download_headers(work)
        say("building the stand-in libraries of CUDA")
        for library, source in LIBRARIES.items():
            _build(new, library, source, work)
            _check_symbols(library, required, _defined_symbols(new / library))
        for name in REFUSED:
            (new / name).write_text("no library: a dry run has no cuDNN\n")
        (new / STAMP).write_text(_stamp(provider))
        take_place(new, folder / NAME)


def not_ready(folder: Path | None = None) -> str:
    """Return the reason that no dry run is possible here, with the remedy, or "".

    Args:
        folder: The folder of built runtimes. Default: `home()`.
    """
    provider = _provider()
    if provider is None:
        return f"there is no {PROVIDER} here; on x86-64 Linux, pip install onnxruntime-gpu"
    stamp = (folder or home()) / NAME / STAMP
    if not stamp.is_file():
        return f"the stand-in libraries of CUDA are not built here; run {SETUP} {NAME}"
    if stamp.read_text() != _stamp(provider):
        return f"the stand-in libraries were built for another onnxruntime; run {SETUP} {NAME}"
    return ""


def _provider() -> Path | None:
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    provider = Path(spec.origin).parent / "capi" / PROVIDER
    return provider if provider.is_file() else None


def _stamp(provider: Path) -> str:
    """Return a text that identifies the sources of the libraries, and the provider."""
    version = installed_version("onnxruntime-gpu", "onnxruntime")
    return f"{digest(SOURCES.iterdir())} {version} {provider.stat().st_size}"


def _compiler() -> str:
    return os.environ.get("CC", "cc").split()[0]


def _linked_libraries(provider: Path) -> list[str]:
    """Return the CUDA libraries to which the provider is linked."""
    names = re.findall(r"\(NEEDED\).*\[(\S+)\]", _output("readelf", "-d", provider))
    return [name for name in names if _OF_CUDA.match(name)]


def _check_libraries(linked: list[str]) -> None:
    """Refuse a provider for another release of CUDA.

    Raises:
        InstallError: If the provider is linked to a library without a stand-in.
    """
    for name in linked:
        if name not in LIBRARIES:
            raise InstallError(
                f"the CUDA provider of onnxruntime {installed_version('onnxruntime-gpu')} is "
                f"linked to {name}, and there are stand-ins for {', '.join(LIBRARIES)} only; "
                "install an onnxruntime-gpu for CUDA 13"
            )


def _required_symbols(provider: Path) -> dict[str, str]:
    """Return the library of each CUDA function to which the provider links, by function."""
    required = {}
    for line in _output("nm", "-D", "--undefined-only", provider).splitlines():
        symbol = _SYMBOL.match(line.split()[-1]) if line.split() else None
        if symbol:
            required[symbol["name"]] = symbol["version"] or "libcuda.so.1"
    return required


def _defined_symbols(library: Path) -> set[str]:
    lines = _output("nm", "-D", "--defined-only", library).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.split()}


def _check_symbols(library: str, required: Mapping[str, str], defined: set[str]) -> None:
    """Refuse a provider that requires a function which a stand-in lacks.

    Raises:
        InstallError: If there is such a function.
    """
    missing = sorted({name for name, source in required.items() if source == library} - defined)
    if missing:
        raise InstallError(
            f"the stand-in for {library} lacks {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + f", which the CUDA provider of onnxruntime {installed_version('onnxruntime-gpu')} "
            f"asks for; add it to {LIBRARIES[library]}, or install onnxruntime-gpu 1.31.1"
        )


def _download_headers(folder: Path) -> None:
    """Download CUDA's headers into `folder`, below `INCLUDE`. Each wheel must have its digest.

    Raises:
        InstallError: If a wheel cannot be downloaded, or has another digest.
    """
    pins = folder / "wanted.txt"
    pins.write_text("".join(f"{package} --hash=sha256:{sha}\n" for package, sha in HEADERS.items()))
    base = getattr(sys, "_base_executable", sys.executable)
    _run(
        "pip", base, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--platform", "manylinux2014_x86_64", "--require-hashes", "--dest", folder, "-r", pins,
    )  # fmt: skip
    for wheel in folder.glob("*.whl"):
        if hashlib.sha256(wheel.read_bytes()).hexdigest() not in HEADERS.values():
            raise InstallError(f"{wheel.name} has not the digest that was expected; try again")
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                inside = member.filename.startswith(INCLUDE) and ".." not in member.filename
                if inside and member.file_size <= MOST_BYTES:
                    archive.extract(member, folder)


def _build(new: Path, library: str, source: str, work: Path) -> None:
    versions = work / "versions.map"
    versions.write_text(f"{library} {{ global: *; }};\n")
    record, *_ = LIBRARIES
    # The functions of the driver library have no version.
    versioned = [] if source == "cuda.c" else [f"-Wl,--version-script={versions}"]
    needed = [new / record] if library != record else []
    _run(
        "the compiler", _compiler(), "-O1", "-w", "-shared", "-fPIC", f"-I{work / INCLUDE}",
        f"-Wl,-soname,{library}", *versioned, "-o", new / library, SOURCES / source, *needed,
    )  # fmt: skip


def _output(*command: str | Path) -> str:
    return _run(str(command[0]), *command)


def _run(program: str, *command: str | Path) -> str:
    completed = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, pass_fds=held_locks()
    )
    if completed.returncode:
        lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line] or lines or ["it said nothing"]
        raise InstallError(f"{program} failed: {errors[0]}")
    return completed.stdout
