"""Installation of runtimes: `python -m attn_export.runtimes.install [--system-packages] [NAME …]`.

Without names, it installs the runtimes that the tests need. Only with `--system-packages` may it
change the system, as root. It is tested on Debian 12.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from importlib import import_module

from attn_export.errors import UsageError, one_line
from attn_export.interruption import end_on_signal
from attn_export.parts import parts
from attn_export.runtimes import install_cpus, javascript, native
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.emulated_cpu import CPUS
from attn_export.runtimes.install_cpus import ARM64_COMPILER
from attn_export.runtimes.install_folder import (
    InstallError,
    Say,
    new_installation,
    pip_command,
    run_command,
)
from attn_export.runtimes.native import NATIVE
from attn_export.runtimes.release import MARK, NPM, VERSION, WHEELS, Release, release_of

RELEASES = ("ort-cpu==1.27.0", "ort-cpu==1.28.0")
"""The releases of ONNX Runtime that tests of sweeps need: the last one that computes fully masked
rows wrong, and the first one that does not."""

REQUIRED = ("openvino", "tract", *NATIVE, "node", "wasm", CPUS, *RELEASES)
"""The names that are installed by default, beside those that the tests of parts need."""

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "openvino": ("openvino",),
    "tract": ("tract",),
    "opencv": ("opencv-python-headless>=5,<6",),
    "iree": ("iree-base-compiler[onnx]", "iree-base-runtime"),
    "mnn": ("MNN",),
}
"""The PyPI packages of the runtimes that pip installs."""

ALL = "all"
SYSTEM_PACKAGES = "--system-packages"
EVERY = (*PACKAGES, *NATIVE, *NPM, CPUS, ARM64_COMPILER)

OF_PARTS = {name: module for part in parts() for name, module in part.installs.items()}
"""The module that installs what a part adds, by its name."""


def main() -> int:
    """Install the named runtimes and return the exit code."""
    end_on_signal()
    named = tuple(name for name in sys.argv[1:] if name != SYSTEM_PACKAGES)
    names = named or (*REQUIRED, *(name for part in parts() for name in part.tests_need))
    if named == (ALL,):
        names = (*EVERY, *OF_PARTS)
    known = (*EVERY, *OF_PARTS)
    unknown = [name for name in names if name not in known and MARK not in name]
    if unknown:
        say(f"unknown runtime {unknown[0]!r}; choose from {', '.join(known)}, all, NAME==VERSION")
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
    """Install runtimes that are missing or outdated."""
    wheels = [
        wheel
        for name, wheels in PACKAGES.items()
        if name in names and runtime(name).unavailable()
        for wheel in wheels
    ]
    if wheels:
        say(f"installing {', '.join(wheels)} …")
        pip("install", "--quiet", *wheels)
    if set(names) & set(NATIVE):
        native.install(say)
    if CPUS in names:
        install_cpus.install(say)
    if ARM64_COMPILER in names:
        install_cpus.install_compiler(say)
    in_javascript = set(names) & set(NPM)
    if in_javascript:
        javascript.install(in_javascript, say, system_packages=system_packages)
    for name in names:
        if MARK in name:
            install_release(name, say)
    for name in names:
        if name in OF_PARTS:
            import_module(OF_PARTS[name]).install(name, say)


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"attn-export: {text}\n")
    sys.stderr.flush()


# -- other releases of runtimes, each in a folder of its own ------------------------------------


def install_release(name: str, say: Say) -> None:
    """Install a release if it is missing."""
    release = runtime(name)
    if not isinstance(release, Release):
        raise UsageError(f"{name!r} is not a release of a runtime; give ort-cpu{MARK}1.25.1")
    if not release.unavailable():
        return
    if release.npm_package:
        version = release.measured
        javascript.install_release(release.folder, release.npm_package, version, say)
        return
    wheels = [f"{package}=={release.measured}" for package in release.wheels]
    say(f"installing {', '.join(wheels)} …")
    with new_installation(release.folder, " ".join(wheels)) as new:
        # Without dependencies: numpy and others are those of this environment.
        options = ("--quiet", "--target", str(new), "--no-deps", "--only-binary=:all:")
        pip("install", *options, *wheels)


def published(base: str) -> list[str]:
    """Return the published releases of a runtime without previews, the oldest first."""
    if base in NPM:
        versions = json.loads(_output("npm", "view", NPM[base], "versions", "--json"))
    elif base in WHEELS:
        text = _output(*_pip("index", "versions", WHEELS[base][0]))
        listed = text.partition("Available versions:")[2].partition("\n")[0]
        versions = re.findall(r"[^\s,]+", listed)
    else:
        raise UsageError(f"{base} has no releases; choose from {', '.join([*WHEELS, *NPM])}")
    names = [f"{base}{MARK}{version}" for version in versions if VERSION.fullmatch(version)]
    return sorted(names, key=release_of)


def pip(*arguments: str) -> None:
    """Run pip of the base interpreter for this environment, which may have no pip."""
    completed = subprocess.run(_pip(*arguments), stdout=sys.stderr, check=False)
    if completed.returncode:
        raise InstallError(f"pip {' '.join(arguments)} failed; what it said is above")


def _pip(*arguments: str) -> list[str]:
    return pip_command("--python", sys.executable, *arguments)


def _output(*command: str) -> str:
    return run_command(command, f"{' '.join(command[-4:])} failed", "^.+")


if __name__ == "__main__":
    sys.exit(main())
