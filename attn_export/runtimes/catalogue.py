"""Every runtime, by name."""

from __future__ import annotations

from attn_export.errors import UsageError
from attn_export.runtimes.iree import Iree
from attn_export.runtimes.javascript import Node, Wasm, WebGpu
from attn_export.runtimes.mnn import Mnn
from attn_export.runtimes.native import C, Cpp
from attn_export.runtimes.onnx_reference import OnnxReference
from attn_export.runtimes.opencv import OpenCv
from attn_export.runtimes.openvino import OpenVino
from attn_export.runtimes.ort_cpu import OrtCpu
from attn_export.runtimes.ort_cuda import OrtCuda
from attn_export.runtimes.protocol import Runtime
from attn_export.runtimes.tract import Tract

RUNTIMES: tuple[Runtime, ...] = (
    OrtCpu(), OrtCuda(), C(), Cpp(), Node(), Wasm(), WebGpu(), OnnxReference(), OpenVino(),
    Tract(), OpenCv(), Iree(), Mnn(),
)  # fmt: skip

DEFAULT = ("ort-cpu", "ort-cuda")
"""What a job uses where no runtime is named; without a GPU, ort-cuda is reported as not run."""


def runtime(name: str) -> Runtime:
    """Return the runtime of this name.

    Raises:
        UsageError: If there is none.
    """
    for candidate in RUNTIMES:
        if candidate.name == name:
            return candidate
    known = ", ".join(candidate.name for candidate in RUNTIMES)
    raise UsageError(f"unknown runtime {name!r}; choose from {known}, all")
