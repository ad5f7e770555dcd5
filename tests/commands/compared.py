"""A cross-attention module of a user, with correct and wrong graphs of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from shared import once
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Axis, Subject

E, H = 16, 2
INPUTS = {"x": torch.randn(2, 5, E), "y": torch.randn(2, 7, E)}
AXES = {
    "x": {0: "batch", 1: Axis("query_len", max=21)},
    "y": {0: "batch", 1: Axis("key_len", max=17)},
}
"""Bounds leave the cases of short sequences."""


def split(x: Tensor) -> Tensor:
    """Split [B, L, E] into [B, H, L, D]."""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def tiled(x: Tensor) -> Tensor:
    """Split [B, L, E] into [B, H, L, D], with the heads as the inner axis."""
    return x.unflatten(-1, (-1, H)).permute(0, 3, 1, 2)


class Cross(nn.Module):
    """Cross-attention; `split` and `scale` may be faults."""

    def __init__(self, split: Callable[[Tensor], Tensor] = split, scale: float | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(E, E) for _ in range(4))
        self.split, self.scale = split, scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(y)), self.split(self.v(y))
        return self.out(attend(q, k, v, scale=self.scale).transpose(1, 2).flatten(2))


def subject(axes: Mapping[str, Any] = AXES) -> Subject:
    return Subject(Cross().eval(), INPUTS, axes, ["z"])


def export(*arguments: object, **options: object) -> None:
    with warnings.catch_warnings():  # PyTorch's exporters warn of themselves
        warnings.simplefilter("ignore")
        torch.onnx.export(*arguments, verbose=False, **options)


def exported(
    path: Path,
    module: nn.Module | None = None,
    *,
    opset: int = 18,
    dynamo: bool = True,
    dynamic: bool = True,
    names: str = "x y z",
) -> Path:
    """Export as users do, with PyTorch's own exporter."""
    a, b, out = names.split()
    options: dict[str, object] = {}
    if dynamic and dynamo:
        batch, queries, keys = (torch.export.Dim(name) for name in ("n", "l", "s"))
        options["dynamic_shapes"] = {"x": {0: batch, 1: queries}, "y": {0: batch, 1: keys}}
    elif dynamic:
        options["dynamic_axes"] = {a: {0: "n", 1: "l"}, b: {0: "n", 1: "s"}, out: {0: "n", 1: "l"}}
    export(
        module or Cross().eval(), tuple(INPUTS.values()), str(path), opset_version=opset,
        dynamo=dynamo, input_names=[a, b], output_names=[out], **options,
    )  # fmt: skip
    return path


def good_graph(*, dynamic: bool = True) -> Path:
    """Return a right graph with all its weights in the file."""
    return _shared("good", Cross().eval(), dynamic=dynamic)


def scaled_graph(*, dynamic: bool = True) -> Path:
    """Return a graph with a wrong scale."""
    return _shared("scaled", Cross(scale=0.3).eval(), dynamic=dynamic)


def _shared(name: str, module: nn.Module, *, dynamic: bool) -> Path:
    def make(folder: Path) -> None:
        folder.mkdir()
        path = exported(folder / f"{name}.onnx", module, dynamic=dynamic)
        onnx.save(onnx.load(path), path)

    return once(f"compared/{name} {dynamic=}", make) / f"{name}.onnx"


def changed(good: Path, target: Path, change: Callable[[onnx.GraphProto], None]) -> Path:
    model = onnx.load(good)
    change(model.graph)
    onnx.save(model, target)
    return target
