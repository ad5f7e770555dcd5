"""Other releases of a runtime than the one that is installed: ``ort-cpu==1.25.1``.

A release lies in a folder of its own, and runs in a process that finds it there first.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attn_export.errors import UsageError
from attn_export.runtimes.install_folder import STAMP, home, setup_command
from attn_export.runtimes.protocol import Engine, Options, Runtime, Tunable

if TYPE_CHECKING:
    from attn_export.runtimes.protocol import Unsupported

MARK: Final = "=="
FOLDER: Final = "releases"

WHEELS: Final[Mapping[str, Sequence[str]]] = {
    "ort-cpu": ("onnxruntime",),
    "openvino": ("openvino",),
    "tract": ("tract",),
    "opencv": ("opencv-python-headless",),
    "iree": ("iree-base-compiler", "iree-base-runtime"),
    "mnn": ("MNN",),
}
"""The packages on PyPI of each runtime that has releases there."""

NPM: Final[Mapping[str, str]] = {
    "node": "onnxruntime-node",
    "wasm": "onnxruntime-web",
    "webgpu": "onnxruntime-web",
}
"""The package on npm of each runtime that has releases there."""

VERSION: Final = re.compile(r"\d{1,5}(\.\d{1,5}){1,3}")


class Release:
    """One release of a runtime.

    Nothing is known of it beforehand: what it does is found out by running it.

    Args:
        base: The runtime.
        version: The release.

    Attributes:
        name: ``"ort-cpu==1.25.1"``.
        time_factor: Factor on the time limits.
        launcher_mib: Memory for what starts it, in MiB.

    Raises:
        UsageError: If the runtime has no releases that can be installed, or it is no version.
    """

    unsupported: Sequence[Unsupported] = ()
    time_factor = 1.0
    launcher_mib = 0

    def __init__(self, base: Runtime, version: str) -> None:
        if base.name not in {*WHEELS, *NPM}:
            raise UsageError(
                f"{base.name} has no releases beside the installed one; choose from "
                f"{', '.join([*WHEELS, *NPM])}"
            )
        if not VERSION.fullmatch(version):
            raise UsageError(f"{version[:40]!r} is no version of {base.name}; give 1.25.1")
        self.measured = version
        self._base = _placed(base, self._place(base.name)) if base.name in NPM else base
        self.name = f"{base.name}{MARK}{version}"
        self.device, self.dialects = base.device, base.dialects
        self.counter_options = base.counter_options if isinstance(base, Tunable) else {}

    def _place(self, base: str) -> str:
        return f"{FOLDER}/{NPM.get(base, base)}-{self.measured}"

    @property
    def folder(self) -> Path:
        """The folder of its packages."""
        return home() / self._place(self._base.name)

    @property
    def npm_package(self) -> str:
        """Its package on npm, or ""."""
        return NPM.get(self._base.name, "")

    @property
    def wheels(self) -> Sequence[str]:
        """Its packages on PyPI."""
        return WHEELS.get(self._base.name, ())

    def version(self) -> str | None:
        """Return its version, or None if it is not installed."""
        return self.measured if (self.folder / STAMP).is_file() else None

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        if self.version() is None:
            return f"it is not installed; run {setup_command(self.name)}"
        return self._base.unavailable() if self.npm_package else ""

    def launch_command(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, str] | None]:
        """Return a command, and its environment, that finds this release first.

        Args:
            arguments: The arguments after the path of the interpreter.
        """
        if self.npm_package:
            return [sys.executable, *arguments], None
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(self.folder), *([before] if before else [])])
        return [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path}

    def prepare(self) -> None:
        """Import its SDK."""
        self._base.prepare()

    def load(self, graph: Path, threads: int) -> Engine:
        """Load a graph.

        Args:
            graph: The file of the graph.
            threads: The number of threads.
        """
        return self._base.load(graph, threads)

    def load_with(self, graph: Path, threads: int, options: Options) -> Engine:
        """Load a graph with options.

        Args:
            graph: The file of the graph.
            threads: The number of threads.
            options: Options of the engine, by name.

        Raises:
            ValueError: If the runtime has no options.
        """
        if not isinstance(self._base, Tunable):
            raise ValueError(f"{self.name} has no options")
        return self._base.load_with(graph, threads, options)


def _placed(base: Runtime, place: str) -> Runtime:
    """Return a runtime in JavaScript whose packages are in another folder."""
    from attn_export.runtimes.javascript import Node, Wasm

    assert isinstance(base, Node | Wasm)
    return type(base)(place)


def installed() -> list[str]:
    """Return the names of the releases that are installed, in order."""
    found = []
    for base in (*WHEELS, *NPM):
        start = f"{NPM.get(base, base)}-"
        for path in (home() / FOLDER).glob(f"{start}*/{STAMP}"):
            version = path.parent.name.removeprefix(start)
            if VERSION.fullmatch(version):
                found.append((base, version))
    return sorted((f"{base}{MARK}{version}" for base, version in found), key=release_of)


def release_of(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the name of a runtime without its release, and the release as numbers, or none."""
    base, mark, version = name.partition(MARK)
    return base, tuple(map(int, version.split("."))) if mark else ()
