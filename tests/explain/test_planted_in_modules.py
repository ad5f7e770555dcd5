"""Graphs of wrong modules, exported by torch alone, compared with the bundle of the right one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import on
from shared import once
from torch import Tensor, nn

from attn_export import Axis, Subject, build
from attn_export.commands.explain_bundle import explain

B, L, E, H, HKV, D = 2, 5, 32, 4, 2, 8
AXES = {"x": {0: "batch", 1: Axis("query_len", max=64)}}


class Layer(nn.Module):
    """Grouped-query attention in plain PyTorch, with an optional fault."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wrong = wrong
        self.q, self.k, self.v = (nn.Linear(E, n * D) for n in (H, HKV, HKV))
        self.o = nn.Linear(H * D, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (n, D)).transpose(1, 2)
            for p, n in ((self.q, H), (self.k, HKV), (self.v, HKV))
        )
        if self.wrong == "tiled heads":
            k, v = (t.repeat(1, H // HKV, 1, 1) for t in (k, v))
        else:
            k, v = (t.repeat_interleave(H // HKV, dim=1) for t in (k, v))
        scale = math.sqrt(D + 1) if self.wrong == "scale" else math.sqrt(D)
        causal = self.wrong != "causal dropped"
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1 / scale)
        if self.wrong == "heads not moved":
            return self.o(out.reshape(x.shape[0], x.shape[1], H * D))
        if self.wrong == "missing bias":
            return nn.functional.linear(out.transpose(1, 2).flatten(-2), self.o.weight)
        return self.o(out.transpose(1, 2).flatten(-2))


# torch's exporter warns of its own code.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

WRONG = ("scale", "tiled heads", "causal dropped", "heads not moved", "missing bias")


def built(name: str, module: nn.Module) -> Path:
    """Return a bundle of a right module."""

    def make(folder: Path) -> None:
        report = build(subject_of(module), folder, runtimes=["ort-cpu"], dialects=["standard"])
        assert report.passed

    return once(f"explained/{name}", make)


@pytest.fixture
def right() -> Path:
    return built("layer", Layer())


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.every(3)
def test_the_fault_of_a_module_is_named_first(wrong: str, right: Path, tmp_path: Path):
    found = explain(right, on("ort-cpu"), graph=exported(Layer(wrong), tmp_path), seconds=20)
    assert found.fault == "graph"
    assert found.causes[0].kind == wrong, found.sentence


def exported(module: nn.Module, folder: Path) -> Path:
    """Export a module with torch alone."""
    path = folder / "theirs.onnx"
    axes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("query_len")}}
    torch.onnx.export(
        module.eval(), (torch.randn(B, L, E),), path, input_names=["x"],
        output_names=["output"], dynamic_shapes=axes, dynamo=True, opset_version=23, verbose=False,
    )  # fmt: skip
    return path


def subject_of(module: nn.Module) -> Subject:
    return Subject(module.eval(), {"x": torch.randn(B, L, E)}, AXES, ["output"])
