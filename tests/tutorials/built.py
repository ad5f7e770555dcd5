"""A tutorial's module, built, and run in ONNX Runtime as a user of the graph would run it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from attn_export import Report, Subject, build


@dataclasses.dataclass(frozen=True)
class Built:
    """A bundle that passed."""

    folder: Path
    report: Report

    @property
    def file(self) -> Path:
        return self.folder / "model.onnx"

    @functools.cached_property
    def graph(self) -> onnx.GraphProto:
        return onnx.load(self.file).graph

    def count(self, operator: str) -> int:
        return sum(node.op_type == operator for node in self.graph.node)

    @functools.cached_property
    def _session(self) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(self.file, options, providers=["CPUExecutionProvider"])

    def run(self, **inputs: Tensor) -> list[Tensor]:
        """Return the graph's outputs. Unknown inputs are an error."""
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        return [torch.from_numpy(array) for array in self._session.run(None, arrays)]


def built(
    module: nn.Module,
    folder: Path,
    inputs: Mapping[str, Tensor],
    axes: Mapping[str, Mapping[int, str]],
    outputs: Sequence[str],
    **options: Any,
) -> Built:
    """Build it for ONNX Runtime, and fail with the first verdict that is not `passed`."""
    subject = Subject(module.eval(), inputs, axes, outputs, **options)
    report = build(subject, folder / "bundle", runtimes=["ort-cpu"], dialects=["standard"])
    wrong = [verdict for verdict in report.verdicts if verdict.status != "passed"]
    assert report.passed, wrong[:1] or report.runs
    return Built(folder / "bundle", report)


def close(actual: Tensor, expected: Tensor) -> None:
    """Assert equality within the rounding of float32 sums of some dozen terms of order 1."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=5e-6)
