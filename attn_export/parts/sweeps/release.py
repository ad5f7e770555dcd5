"""Releases of a runtime other than the installed one, such as ``ort-cpu==1.25.1``.

Each release is installed in a folder of its own. Its worker process has that folder first in
Python's path.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from attn_export.errors import UsageError
from attn_export.parts.installing import (
    STAMP,
    Say,
    home,
    new_installation,
    run_command,
    setup_command,
)
from attn_export.runtimes.catalogue import all_names, all_runtimes, packages, runtime
from attn_export.runtimes.install import pip, pip_command
from attn_export.runtimes.protocol import Engine, Options, Runtime, distribution

MARK: Final = "=="
FOLDER: Final = "releases"

VERSION: Final = re.compile(r"\d{1,5}(\.\d{1,5}){1,3}")


def wheels() -> dict[str, list[str]]:
    """Return the PyPI packages of each runtime whose releases can be installed with pip."""
    return {name: [distribution(each) for each in needed] for name, needed in packages().items()}


def _npm_packages() -> dict[str, str]:
    """Return the npm package of each runtime whose releases can be installed with npm."""
    return {kind.name: kind.npm_package for kind in all_runtimes() if kind.npm_package}


class Release(Runtime):
    """One release of a runtime.

    It has no table of known limits: every graph is tried.
    """

    in_turn = True

    def __init__(self, base: Runtime, version: str) -> None:
        if base.name not in all_names() or not (base.packages or base.npm_package):
            raise UsageError(
                f"{base.name} has no releases beside the installed one; choose from "
                f"{', '.join((*wheels(), *_npm_packages()))}"
            )
        if not VERSION.fullmatch(version):
            raise UsageError(f"{version[:40]!r} is not a version of {base.name}; give 1.25.1")
        self.npm_package = base.npm_package
        self.wheels = [distribution(each) for each in base.packages]
        self.measured = version
        self._folder = f"{FOLDER}/{self.npm_package or base.name}-{version}"
        self.base = copy.copy(base)
        if self.npm_package:
            self.base.folder = self._folder  # type: ignore[attr-defined]
        self.name = f"{base.name}{MARK}{version}"
        self.device, self.dialects = base.device, base.dialects
        self.counter_options = base.counter_options

    @property
    def folder(self) -> Path:
        """The folder of the installed packages."""
        return home() / self._folder

    def version(self) -> str | None:
        """Return the version of the release, or None if it is not installed."""
        return self.measured if (self.folder / STAMP).is_file() else None

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        if self.version() is None:
            return f"it is not installed; run {setup_command(self.name)}"
        return self.base.unavailable() if self.npm_package else ""

    def launch_command(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, str] | None]:
        """Return the command that runs Python, and an environment that puts this release first."""
        if self.npm_package:
            return super().launch_command(arguments)
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(self.folder), *([inherited] if inherited else [])])
        return [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path}

    def prepare(self) -> None:
        """Import the SDK of the release."""
        self.base.prepare()

    def _load(self, graph: Path, threads: int, options: Options) -> Engine:
        return self.base.load(graph, threads, options)


def runtimes_of(name: str) -> Sequence[Runtime]:
    """Return the runtime of a name such as ``ort-cpu==1.25.1``."""
    base, _, version = name.partition(MARK)
    return [Release(runtime(base), version)]


def listed() -> Iterator[tuple[Runtime, str]]:
    """Yield the installed releases of runtimes that are there."""
    for name in installed():
        if release_of(name)[0] in all_names():
            yield runtime(name), "another release"


def installed() -> list[str]:
    """Return the names of the installed releases, sorted by runtime and version."""
    names = []
    npm = _npm_packages()
    for base in (*wheels(), *npm):
        prefix = f"{npm.get(base, base)}-"
        for path in (home() / FOLDER).glob(f"{prefix}*/{STAMP}"):
            version = path.parent.name.removeprefix(prefix)
            if VERSION.fullmatch(version):
                names.append(f"{base}{MARK}{version}")
    return sorted(names, key=release_of)


def release_of(name: str) -> tuple[str, tuple[int, ...]]:
    """Split the name of a release into the runtime and the version; the version may be ()."""
    base, mark, version = name.partition(MARK)
    return base, tuple(map(int, version.split("."))) if mark else ()


# -- installation -------------------------------------------------------------------------------


def install(name: str, say: Say) -> None:
    """Install a release if it is missing."""
    release = runtime(name)
    if not isinstance(release, Release):
        raise UsageError(f"{name!r} is not a release of a runtime; give ort-cpu{MARK}1.25.1")
    if not release.unavailable():
        return
    if release.npm_package:
        release.base.install_release(release.measured, say)  # type: ignore[attr-defined]
        return
    wheels = [f"{package}=={release.measured}" for package in release.wheels]
    say(f"installing {', '.join(wheels)} …")
    with new_installation(release.folder, " ".join(wheels)) as new:
        # Without dependencies: numpy and others are those of this environment.
        options = ("--quiet", "--target", str(new), "--no-deps", "--only-binary=:all:")
        pip("install", *options, *wheels)


def published(base: str) -> list[str]:
    """Return the published releases of a runtime without previews, the oldest first."""
    npm = _npm_packages()
    if base in npm:
        versions = json.loads(_output("npm", "view", npm[base], "versions", "--json"))
    elif base in wheels():
        index = ("--python", sys.executable, "index", "versions", wheels()[base][0])
        listed = _output(*pip_command(*index)).partition("Available versions:")[2]
        versions = re.findall(r"[^\s,]+", listed.partition("\n")[0])
    else:
        raise UsageError(f"{base} has no releases; choose from {', '.join([*wheels(), *npm])}")
    names = [f"{base}{MARK}{version}" for version in versions if VERSION.fullmatch(version)]
    return sorted(names, key=release_of)


def _output(*command: str) -> str:
    return run_command(command, f"{' '.join(command[-4:])} failed", "^.+")
