"""Releases of a runtime other than the installed one, such as ``ort-cpu==1.25.1``.

Each release is installed in a folder of its own. Its worker process has that folder first in
Python's path.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from attn_export.errors import UsageError
from attn_export.parts.installing import STAMP, home, setup_command
from attn_export.runtimes.catalogue import all_names, packages, runtime
from attn_export.runtimes.protocol import Engine, Options, Runtime, distribution

MARK: Final = "=="
FOLDER: Final = "releases"

NPM: Final[Mapping[str, str]] = {
    "node": "onnxruntime-node",
    "wasm": "onnxruntime-web",
    "webgpu": "onnxruntime-web",
}
"""The npm package of each runtime whose releases can be installed with npm."""

VERSION: Final = re.compile(r"\d{1,5}(\.\d{1,5}){1,3}")


def wheels() -> dict[str, list[str]]:
    """Return the PyPI packages of each runtime whose releases can be installed with pip."""
    return {name: [distribution(each) for each in needed] for name, needed in packages().items()}


class Release(Runtime):
    """One release of a runtime.

    It has no table of known limits: every graph is tried.

    Attributes:
        name: ``"ort-cpu==1.25.1"``.
        npm_package: The npm package, or "".
    """

    in_turn = True

    def __init__(self, base: Runtime, version: str) -> None:
        if base.name not in {*wheels(), *NPM}:
            raise UsageError(
                f"{base.name} has no releases beside the installed one; choose from "
                f"{', '.join([*wheels(), *NPM])}"
            )
        if not VERSION.fullmatch(version):
            raise UsageError(f"{version[:40]!r} is not a version of {base.name}; give 1.25.1")
        self.npm_package = NPM.get(base.name, "")
        self.wheels = wheels().get(base.name, [])
        self.measured = version
        self._folder = f"{FOLDER}/{self.npm_package or base.name}-{version}"
        self._base = _in_folder(base, self._folder) if self.npm_package else base
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
        return self._base.unavailable() if self.npm_package else ""

    def launch_command(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, str] | None]:
        """Return the command that runs Python, and an environment that puts this release first."""
        if self.npm_package:
            return super().launch_command(arguments)
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(self.folder), *([inherited] if inherited else [])])
        return [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path}

    def prepare(self) -> None:
        """Import the SDK of the release."""
        self._base.prepare()

    def _load(self, graph: Path, threads: int, options: Options) -> Engine:
        return self._base.load(graph, threads, options)


def _in_folder(base: Runtime, folder: str) -> Runtime:
    """Return a JavaScript runtime whose packages are in another folder."""
    from attn_export.parts.kits.javascript import Node

    assert isinstance(base, Node)
    release = type(base)()
    release.folder = folder
    return release


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
    for base in (*wheels(), *NPM):
        prefix = f"{NPM.get(base, base)}-"
        for path in (home() / FOLDER).glob(f"{prefix}*/{STAMP}"):
            version = path.parent.name.removeprefix(prefix)
            if VERSION.fullmatch(version):
                names.append(f"{base}{MARK}{version}")
    return sorted(names, key=release_of)


def release_of(name: str) -> tuple[str, tuple[int, ...]]:
    """Split the name of a release into the runtime and the version; the version may be ()."""
    base, mark, version = name.partition(MARK)
    return base, tuple(map(int, version.split("."))) if mark else ()
