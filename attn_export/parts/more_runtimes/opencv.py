"""OpenCV's dnn module, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.dialect_names import PORTABLE, STANDARD
from attn_export.runtimes.protocol import Engine, PackagedRuntime

if TYPE_CHECKING:
    import numpy as np


class _OpenCv(PackagedRuntime):
    """The runtime `opencv`."""

    name = "opencv"
    about = "OpenCV's newer engine for networks, CPU"
    packages = ("opencv-python-headless>=5,<6",)
    distributions = (
        "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python",
    )  # fmt: skip
    modules = ("cv2",)
    dialects = frozenset({STANDARD, PORTABLE})
    measured = "5.0.0.93"
    unsupported: Mapping[str, str] = {
        "Abs": "ElementWiseLayer: unsupported input/output type; expected CV_32F or CV_64F",
        "Attention(given mask: BOOL)": "wrong in rows of which all keys are masked",
        "Attention(given mask: FLOAT)": "NaN in rows of which all keys are masked",
        "Attention(past)": "past key and past value are not supported yet",
        "Attention(qk_matmul_output)": "Assertion failed: outShapes.size() == outTypes.size()",
        "ConstantOfShape": "Assertion failed: blobs.size() == 1",
        "DynamicQuantizeLinear": "Unsupported operations: DynamicQuantizeLinear MatMulInteger",
        "Tanh": "NaN where scores are large",
        "TensorScatter": "Unsupported operations: TensorScatter",
        "input BFLOAT16": "blob data type = bfloat16 is not supported",
        "input FLOAT16": "its outputs are float32",
    }

    def engine(self, graph: Path, threads: int) -> Engine:
        """Return a graph that OpenCV has read as a net."""
        import cv2

        cv2.setNumThreads(threads)
        # The default falls back to the classic engine, which has no dynamic axes, without an error.
        net = cv2.dnn.readNetFromONNX(str(graph), cv2.dnn.ENGINE_NEW)
        if net.empty():  # OpenCV raises no error for graphs that it cannot read
            raise RuntimeError("OpenCV's newer engine does not read the graph")
        names = list(net.getUnconnectedOutLayersNames())

        def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            for name, array in inputs.items():
                net.setInput(array, name)
            # Copies: the next run overwrites them.
            arrays = [array.copy() for array in net.forward(names)]
            return dict(zip(names, arrays, strict=True))

        return Engine(run, {"device": "CPU", "precision": "f32", "engine": "new"})


RUNTIME = _OpenCv
