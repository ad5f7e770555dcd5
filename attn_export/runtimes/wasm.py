"""ONNX Runtime in a browser's WebAssembly: onnxruntime-web in headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.runtimes.install.javascript import (
    NODE_MISSING,
    WEB,
    chromium,
    package_version,
    web_sources,
)
from attn_export.runtimes.install_folder import home, missing
from attn_export.runtimes.program import ProgramEngine
from attn_export.runtimes.support import unsupported

if TYPE_CHECKING:
    from attn_export.runtimes.protocol import Engine
    from attn_export.runtimes.support import Unsupported

NO_CHROMIUM = "there is no Chromium; apt-get install chromium, or name one in CHROME_PATH"


class Wasm:
    """`wasm`."""

    name = "wasm"
    device = "browser"
    dialects = frozenset({"standard", "portable", "ort"})
    measured = "1.30.0"
    unsupported: Sequence[Unsupported] = (
        # Opset 24 is that of caches in place. The decode form relies on a shared buffer, and an
        # output cannot be put into that of an input: see `lib/model.mjs`.
        unsupported(
            "com.microsoft.GroupQueryAttention",
            "opset 24",
            says="what a cache in place held before is 0 afterwards",
        ),
    )

    def version(self) -> str | None:
        """Return the version of onnxruntime-web."""
        return package_version(home() / WEB, "onnxruntime-web")

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        if shutil.which("node") is None:
            return NODE_MISSING
        if chromium() is None:
            return NO_CHROMIUM
        return missing(self.name, self._program(), web_sources())

    def prepare(self) -> None:
        """Do nothing: the browser is started with its graph."""

    def load(self, graph: Path, threads: int) -> Engine:
        """Start a page that holds the graph."""
        browser = str(chromium() or "chromium")
        command = ["node", str(self._program()), browser, self.name]
        return ProgramEngine(command, graph, threads)

    def _program(self) -> Path:
        return home() / WEB / "serve_web.mjs"
