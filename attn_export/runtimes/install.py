"""`python -m attn_export.runtimes.install [--system-packages] [NAME …]`: runtimes beyond pip.

Debian 12 is what it is tried on. Without names: the runtimes that the tests need. Only with
`--system-packages` does it use the rights of root.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

from attn_export.errors import UsageError, one_line
from attn_export.interruption import end_on_signal
from attn_export.runtimes import (
    install_arm64_compiler,
    install_cpus,
    install_cuda_stand_in,
    install_javascript,
    install_ort_native,
)
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.install_folder import InstallError, home
from attn_export.runtimes.install_releases import install_release, pip
from attn_export.runtimes.release import MARK

CPUS = "cpus"
NATIVE, JAVASCRIPT = ("c", "cpp"), ("node", "wasm", "webgpu")
ARM64_COMPILER = install_arm64_compiler.NAME
DRY_RUN = install_cuda_stand_in.NAME
RELEASES = ("ort-cpu==1.27.0", "ort-cpu==1.28.0")
"""The last release of ONNX Runtime that computes fully masked rows wrong, and the first that does
not: sweeps over releases are tried on them."""
REQUIRED = ("openvino", "tract", *NATIVE, "node", "wasm", CPUS, DRY_RUN, *RELEASES)
WHEELS: Mapping[str, tuple[str, ...]] = {
    "openvino": ("openvino",),
    "tract": ("tract",),
    "opencv": ("opencv-python-headless>=5,<6",),
    "iree": ("iree-base-compiler[onnx]", "iree-base-runtime"),
    "mnn": ("MNN",),
}
ALL = "all"
SYSTEM_PACKAGES = "--system-packages"
EVERY = (*WHEELS, *NATIVE, *JAVASCRIPT, CPUS, ARM64_COMPILER, DRY_RUN)


def main() -> int:
    """Install the named runtimes and return the exit code."""
    end_on_signal()
    named = tuple(name for name in sys.argv[1:] if name != SYSTEM_PACKAGES)
    names = EVERY if named == (ALL,) else named or REQUIRED
    unknown = [name for name in names if name not in EVERY and MARK not in name]
    if unknown:
        say(f"unknown runtime {unknown[0]!r}; choose from {', '.join(EVERY)}, all, NAME==VERSION")
        return 2
    try:
        install(names, system_packages=SYSTEM_PACKAGES in sys.argv[1:])
    except UsageError as error:
        say(one_line(error))
        return 2
    except (InstallError, OSError) as error:
        say(one_line(error))
        return 1
    return 0


def install(names: Collection[str], *, system_packages: bool = False) -> None:
    """Install runtimes; quick where they are there.

    Args:
        names: Of the runtimes.
        system_packages: Let apt-get install Chromium, as root, where there is none.

    Raises:
        InstallError: If one cannot be installed; the message gives the remedy.
        UsageError: If a name is no release of a runtime.
    """
    wheels = [
        wheel
        for name, wheels in WHEELS.items()
        if name in names and runtime(name).unavailable()
        for wheel in wheels
    ]
    if wheels:
        say(f"installing {', '.join(wheels)} …")
        pip("install", "--quiet", *wheels)
    if set(names) & set(NATIVE):
        install_ort_native.install(home(), say)
    if CPUS in names:
        install_cpus.install(home(), say)
    if ARM64_COMPILER in names:
        install_arm64_compiler.install(home(), say)
    scripts = set(names) & set(JAVASCRIPT)
    if scripts:
        install_javascript.install(home(), scripts, say, system_packages=system_packages)
    for name in names:
        if MARK in name:
            install_release(name, say)
    if DRY_RUN in names:
        install_cuda_stand_in.install(home(), say)


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"attn-export: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
