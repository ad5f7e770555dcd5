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
    node_files,
    package_version,
    web_files,
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

    def __init__(self, folder: str = NODE) -> None:
        self._folder = folder

    def version(self) -> str | None:
        """Return the version of onnxruntime-node."""
        return package_version(home() / self._folder, NODE_PACKAGE)

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        if shutil.which("node") is None:
            return NODE_MISSING
        return missing(self.name, self._program(), node_files().values())

    def command(self) -> list[str | Path]:
        """Return the command line of the program."""
        return ["node", self._program()]

    def _program(self) -> Path:
        return home() / self._folder / "serve.mjs"


class Wasm(ProgramRuntime):
    """The runtime `wasm`: onnxruntime-web in headless Chromium, on WebAssembly.

    Args:
        folder: The name of the folder of its program and packages, within that of the runtimes.
    """

    name = "wasm"
    device = "browser"
    measured = "1.30.0"
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

    def __init__(self, folder: str = WEB) -> None:
        self._folder = folder

    def version(self) -> str | None:
        """Return the version of onnxruntime-web."""
        return package_version(home() / self._folder, WEB_PACKAGE)

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        if shutil.which("node") is None:
            return NODE_MISSING
        if chromium() is None:
            return NO_CHROMIUM
        return missing(self.name, self._program(), web_files().values())

    def command(self) -> list[str | Path]:
        """Return the command line of the program, which starts a browser."""
        return ["node", self._program(), chromium() or "chromium", self.name]

    def _program(self) -> Path:
        return home() / self._folder / "serve_web.mjs"


class WebGpu(Wasm):
    """The runtime `webgpu`: onnxruntime-web in headless Chromium, on WebGPU.

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
