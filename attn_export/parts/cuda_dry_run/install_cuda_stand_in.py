"""Build of stand-in libraries, with which the CUDA provider loads on a machine without a GPU.

They must fit the provider in the installed wheel: they must define each function to which it links,
in libraries of the same names and versions.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from attn_export.errors import RuntimeFailure
from attn_export.parts.installing import (
    SETUP,
    Say,
    digest,
    download_wheels,
    home,
    new_installation,
    run_command,
    stamp_of,
)
from attn_export.runtimes.protocol import installed_version
from attn_export.temp_folders import scratch

CUDA_STAND_IN = "cuda-dry-run"
"""The folder of the libraries for dry runs of CUDA, and the name for installing them."""

_PROVIDER_LIBRARY = "libonnxruntime_providers_cuda.so"
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

_INCLUDE = "nvidia/cu13/include/"
MOST_BYTES = 64 << 20
ERROR = ".*rror.*"

_OF_CUDA = re.compile(r"lib(cu|nv)\w+\.so")
_SYMBOL = re.compile(r"(?P<name>(?:__)?cu\w+)(?:@+(?P<version>\S+))?\Z")


def install(_name: str, say: Say) -> None:
    """Build the libraries, unless they are up to date. `say` receives messages."""
    if not not_ready():
        return
    provider = _provider()
    if provider is None:
        raise RuntimeFailure(f"there is no {_PROVIDER_LIBRARY} here; pip install onnxruntime-gpu")
    for program in (_compiler(), "nm", "readelf"):
        if shutil.which(program) is None:
            raise RuntimeFailure(f"there is no {program}; {APT}")
    _check_libraries(_linked_libraries(provider))
    required = _required_symbols(provider)
    stand_ins = new_installation(home() / CUDA_STAND_IN, _stamp(provider))
    with stand_ins as new, scratch() as work:
        say("downloading CUDA's headers")
        _download_headers(work)
        say("building the stand-in libraries of CUDA")
        for library, source in LIBRARIES.items():
            _build(new, library, source, work)
            _check_symbols(library, required, _defined_symbols(new / library))
        for name in REFUSED:
            (new / name).write_text("no library: a dry run has no cuDNN\n")


def not_ready(_name: str = "") -> str:
    """Return the reason that no dry run is possible here, with the remedy, or ""."""
    provider = _provider()
    if provider is None:
        return f"there is no {_PROVIDER_LIBRARY} here; on x86-64 Linux, pip install onnxruntime-gpu"
    stamp, remedy = stamp_of(home() / CUDA_STAND_IN), f"run {SETUP} {CUDA_STAND_IN}"
    if not stamp:
        return f"the stand-in libraries of CUDA are not built here; {remedy}"
    if stamp != _stamp(provider):
        return f"the stand-in libraries were built for another onnxruntime; {remedy}"
    return ""


def _provider() -> Path | None:
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    provider = Path(spec.origin).parent / "capi" / _PROVIDER_LIBRARY
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
    """Raise RuntimeFailure for a provider that is linked to a library without a stand-in."""
    for name in linked:
        if name not in LIBRARIES:
            raise RuntimeFailure(
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
    """Raise RuntimeFailure for a provider that requires a function which a stand-in lacks."""
    missing = sorted({name for name, source in required.items() if source == library} - defined)
    if missing:
        raise RuntimeFailure(
            f"the stand-in for {library} lacks {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + f", which the CUDA provider of onnxruntime {installed_version('onnxruntime-gpu')} "
            f"asks for; add it to {LIBRARIES[library]}, or install onnxruntime-gpu 1.31.1"
        )


def _download_headers(folder: Path) -> None:
    """Download CUDA's headers into `folder`, below `_INCLUDE`."""
    for wheel in download_wheels(HEADERS, folder, "--platform", "manylinux2014_x86_64"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                inside = member.filename.startswith(_INCLUDE) and ".." not in member.filename
                if inside and member.file_size <= MOST_BYTES:
                    archive.extract(member, folder)


def _build(new: Path, library: str, source: str, work: Path) -> None:
    versions = work / "versions.map"
    versions.write_text(f"{library} {{ global: *; }};\n")
    record, *_ = LIBRARIES
    # The functions of the driver library have no version.
    versioned = [] if source == "cuda.c" else [f"-Wl,--version-script={versions}"]
    needed = [new / record] if library != record else []
    command: list[str | Path] = [
        _compiler(), "-O1", "-w", "-shared", "-fPIC", f"-I{work / _INCLUDE}",
        f"-Wl,-soname,{library}", *versioned, "-o", new / library, SOURCES / source, *needed,
    ]  # fmt: skip
    run_command(command, "the compiler failed", ERROR)


def _output(*command: str | Path) -> str:
    return run_command(command, f"{command[0]} failed", ERROR)
