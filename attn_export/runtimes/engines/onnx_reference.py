"""The reference evaluator of the package `onnx`, which computes in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.dialect_names import PORTABLE, STANDARD
from attn_export.runtimes.protocol import Engine, PackagedRuntime

if TYPE_CHECKING:
    import numpy as np


class OnnxReference(PackagedRuntime):
    """The runtime `onnx-reference`."""

    name = "onnx-reference"
    keeps_non_finite = True
    about = "the ONNX reference evaluator"
    distributions = ("onnx",)  # which this package needs anyway
    required = True
    modules = ("onnx", "onnx.reference")
    dialects = frozenset({STANDARD, PORTABLE})
    measured = "1.23.2"
    unsupported: Mapping[str, str] = {
        "DequantizeLinear with opset 18": (
            "No implementation for operator 'DequantizeLinear' and version 18, found 19, 21"
        ),
    }

    def engine(self, graph: Path, threads: int) -> Engine:  # noqa: ARG002 (numpy has no such limit)
        """Return a graph that the reference evaluator has loaded."""
        import numpy as np
        from onnx.reference import ReferenceEvaluator

        from attn_export.graph.load import load_model

        evaluator = ReferenceEvaluator(load_model(graph))

        def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            # Fully masked rows divide 0 by 0, which would print warnings.
            with np.errstate(all="ignore"):
                outputs = evaluator.run(None, dict(inputs))
            names = evaluator.output_names
            return {name: np.asarray(out) for name, out in zip(names, outputs, strict=True)}

        return Engine(run, {"computes in": "numpy"})


RUNTIME = OnnxReference
