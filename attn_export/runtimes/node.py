"""ONNX Runtime in Node.js: onnxruntime-node."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.runtimes.install.javascript import NODE_MISSING, node_sources, package_version
from attn_export.runtimes.install_folder import home, missing
from attn_export.runtimes.program import ProgramEngine

if TYPE_CHECKING:
    from attn_export.runtimes.protocol import Engine
    from attn_export.runtimes.support import Unsupported


class Node:
    """`node`."""

    name = "node"
    device = "cpu"
    dialects = frozenset({"standard", "portable", "ort"})
    measured = "1.30.0"
    unsupported: Sequence[Unsupported] = ()

    def version(self) -> str | None:
        """Return the version of onnxruntime-node."""
        return package_version(home() / self.name, "onnxruntime-node")

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        if shutil.which("node") is None:
            return NODE_MISSING
        return missing(self.name, self._program(), node_sources())

    def prepare(self) -> None:
        """Do nothing: the program is started with its graph."""

    def load(self, graph: Path, threads: int) -> Engine:
        """Start the program."""
        return ProgramEngine(["node", self._program()], graph, threads)

    def _program(self) -> Path:
        return home() / self.name / "serve.mjs"
