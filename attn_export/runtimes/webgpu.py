"""ONNX Runtime on a browser's WebGPU: onnxruntime-web in headless Chromium.

Where there is no GPU, SwiftShader computes in software, which the facts of a run say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_export.runtimes.support import unsupported
from attn_export.runtimes.wasm import Wasm

if TYPE_CHECKING:
    from attn_export.runtimes.support import Unsupported


class WebGpu(Wasm):
    """`webgpu`."""

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
    )
