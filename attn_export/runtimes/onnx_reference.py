"""The ONNX reference evaluator: the specification, written out in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.dialect_names import PORTABLE, STANDARD
from attn_export.runtimes.protocol import Engine, Facts, Unsupported, installed_version, unsupported
from attn_export.system_info import missing_package

if TYPE_CHECKING:
    import numpy as np


class OnnxReference:
    """`onnx-reference`."""

    name = "onnx-reference"
    device = "cpu"
    dialects = frozenset({STANDARD, PORTABLE})
    measured = "1.23.2"
    unsupported: Sequence[Unsupported] = (
        unsupported(
            "DequantizeLinear",
            "opset 18",
            says="No implementation for operator 'DequantizeLinear' and version 18, found 19, 21",
        ),
    )

    def version(self) -> str | None:
        """Return the version of onnx."""
        return installed_version("onnx")

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        return "" if find_spec("onnx") else missing_package("onnx")

    def prepare(self) -> None:
        """Import the SDK."""
        import onnx.reference  # noqa: F401

    def load(self, graph: Path, threads: int) -> Engine:  # noqa: ARG002 (numpy has no such limit)
        """Load the graph.

        Args:
            graph: The file of the graph.
            threads: The number of threads.
        """
        return ReferenceEngine(graph)


class ReferenceEngine(Engine):
    """A graph in the reference evaluator."""

    def __init__(self, graph: Path) -> None:
        from onnx.reference import ReferenceEvaluator

        from attn_export.graph.load import load_model

        self._evaluator = ReferenceEvaluator(load_model(graph))

    def run(
        self,
        inputs: Mapping[str, np.ndarray],
        bound: Mapping[str, str],  # noqa: ARG002 (numpy gives new arrays)
    ) -> dict[str, np.ndarray]:
        """Run once. Masked rows divide 0 by 0 inside; the result is what is judged.

        Args:
            inputs: The inputs, by name.
            bound: Names of outputs that share the buffer of an input, with that input.
        """
        import numpy as np

        with np.errstate(all="ignore"):
            outputs = self._evaluator.run(None, dict(inputs))
        names = self._evaluator.output_names
        return {name: np.asarray(out) for name, out in zip(names, outputs, strict=True)}

    def facts(self) -> Facts:
        """Return the facts: it runs on the CPU, in numpy."""
        return {"computes in": "numpy"}
