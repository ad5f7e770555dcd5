"""The reference evaluator of the package `onnx`, which computes in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.dialect_names import PORTABLE, STANDARD
from attn_export.runtimes.protocol import (
    Engine,
    Facts,
    PackagedRuntime,
)

if TYPE_CHECKING:
    import numpy as np


class ReferenceEngine(Engine):
    """A graph that the reference evaluator has loaded."""

    def __init__(self, graph: Path, threads: int) -> None:  # noqa: ARG002 (numpy has no such limit)
        from onnx.reference import ReferenceEvaluator

        from attn_export.graph.load import load_model

        self._evaluator = ReferenceEvaluator(load_model(graph))

    def _run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        # Fully masked rows divide 0 by 0, which would print warnings.
        import numpy as np

        with np.errstate(all="ignore"):
            outputs = self._evaluator.run(None, dict(inputs))
        names = self._evaluator.output_names
        return {name: np.asarray(out) for name, out in zip(names, outputs, strict=True)}

    def facts(self) -> Facts:
        """Return the facts: it runs on the CPU, in numpy."""
        return {"computes in": "numpy"}


class OnnxReference(PackagedRuntime):
    """The runtime `onnx-reference`."""

    name = "onnx-reference"
    keeps_non_finite = True
    about = "the ONNX reference evaluator"
    distributions = ("onnx",)  # which this package needs anyway
    required = True
    modules = ("onnx", "onnx.reference")
    engine = ReferenceEngine
    dialects = frozenset({STANDARD, PORTABLE})
    measured = "1.23.2"
    unsupported: Mapping[str, str] = {
        "DequantizeLinear with opset 18": (
            "No implementation for operator 'DequantizeLinear' and version 18, found 19, 21"
        ),
    }


RUNTIME = OnnxReference
