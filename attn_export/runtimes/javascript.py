"""ONNX Runtime in JavaScript: Node.js, and WebAssembly and WebGPU in headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.runtimes.install_folder import home, missing
from attn_export.runtimes.install_javascript import (
    NODE,
    NODE_MISSING,
    NODE_PACKAGE,
    WEB,
    WEB_PACKAGE,
    chromium,
    package_version,
    program_files,
)
from attn_export.runtimes.program import ProgramRuntime
from attn_export.runtimes.protocol import unsupported

if TYPE_CHECKING:
    from attn_export.runtimes.protocol import Unsupported

NO_CHROMIUM = "there is no Chromium; apt-get install chromium, or name one in CHROME_PATH"


class Node(ProgramRuntime):
    """The runtime `node`: onnxruntime-node.

    Args:
        folder: The name of the folder of its program and packages, within that of the runtimes.
    """

    name = "node"
    device = "cpu"
    measured = "1.30.0"
    unsupported: Sequence[Unsupported] = ()
    package, program = NODE_PACKAGE, "serve.mjs"

    def __init__(self, folder: str = NODE) -> None:
        self._folder = folder

    def version(self) -> str | None:
        """Return the version of the npm package."""
        return package_version(home() / self._folder, self.package)

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        if shutil.which("node") is None:
            return NODE_MISSING
        return missing(self.name, self._program_file(), program_files(self.package).values())

    def command(self) -> list[str | Path]:
        """Return the command line of the program."""
        return ["node", self._program_file()]

    def _program_file(self) -> Path:
        return home() / self._folder / self.program


class Wasm(Node):
    """The runtime `wasm`: onnxruntime-web on WebAssembly, in headless Chromium.

    Node.js runs the program that starts the browser.

    Args:
        folder: The name of the folder of its program and packages, within that of the runtimes.
    """

    name = "wasm"
    device = "browser"
    unsupported: Sequence[Unsupported] = (
        # Opset 24 means a cache in place. The graph for one query needs a buffer that an output
        # shares with an input, which is impossible here: see `lib/model.mjs`.
        unsupported(
            "com.microsoft.GroupQueryAttention",
            "opset 24",
            says="what a cache in place held before is 0 afterwards",
        ),
        unsupported(
            "com.microsoft.MatMulNBits(accuracy_level 4)",
            says="inputs of products are not rounded to 8 bits",
        ),
    )
    package, program = WEB_PACKAGE, "serve_web.mjs"

    def __init__(self, folder: str = WEB) -> None:
        super().__init__(folder)

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        if shutil.which("node") and chromium() is None:
            return NO_CHROMIUM
        return super().unavailable()

    def command(self) -> list[str | Path]:
        """Return the command line of the program, which starts a browser."""
        return [*super().command(), chromium() or "chromium", self.name]


class WebGpu(Wasm):
    """The runtime `webgpu`: onnxruntime-web on WebGPU, in headless Chromium.

    Without a GPU, SwiftShader emulates one in software; the facts of a run state it.
    """

    name = "webgpu"
    unsupported: Sequence[Unsupported] = (
        unsupported(
            "com.microsoft.MultiHeadAttention",
            says="wrong numbers at 40 queries, seen on SwiftShader",
        ),
        unsupported(
            "com.microsoft.GroupQueryAttention",
            says="wrong numbers for more than 32 queries without a past, seen on SwiftShader",
        ),
        unsupported(
            "com.microsoft.MatMulNBits(accuracy_level 4)",
            says="inputs of products are not rounded to 8 bits, seen on SwiftShader",
        ),
        unsupported("value DOUBLE", says="WebGPU has no float64"),
    )
