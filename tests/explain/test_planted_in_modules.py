"""Graphs of wrong modules, exported by torch alone, compared with the bundle of the right one."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import pytest
import torch
from conftest import on
from shared import extended, once
from torch import Tensor, nn

from attn_export import Axis, Subject, build
from attn_export.commands.explain_bundle import explain

B, L, E, H, HKV, D = 2, 5, 32, 4, 2, 8
WRONG_LAYERS = {4: 2, 12: 7}
"""The index of the wrong layer, by the number of layers."""
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


class Stack(nn.Module):
    """Stack of attention layers with a norm before each, one of which may be wrong."""

    def __init__(self, layers: int, wrong: str = "") -> None:
        super().__init__()
        of_one = {WRONG_LAYERS[layers]: wrong}
        self.layers = nn.ModuleList(Layer(of_one.get(i, "")) for i in range(layers))
        self.norm = nn.LayerNorm(E)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x


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


def stack(layers: int) -> Path:
    return built(f"stack of {layers}", Stack(layers))


@pytest.mark.parametrize("layers", extended(WRONG_LAYERS, lambda layers: layers == 4))
@pytest.mark.extended
def test_a_fault_in_one_of_many_layers_is_found_at_its_node(layers: int, tmp_path: Path):
    right = stack(layers)
    model = onnx.load(right / "model.onnx")
    node = [n for n in model.graph.node if n.op_type == "Attention"][WRONG_LAYERS[layers]]
    scale = next(a for a in node.attribute if a.name == "scale")
    scale.f *= 1.3
    path = tmp_path / "planted.onnx"
    onnx.save(model, path)
    found = explain(right, on("ort-cpu"), graph=path)
    assert found.fault == "graph"
    assert found.first is not None
    assert (found.first.node, found.first.operator) == (node.name, "Attention")
    assert "scale is 0.459" in found.first.says
    assert found.first.line.endswith(f".py:{line_of_attention()}")
    assert (found.causes[0].kind, found.causes[0].node) == ("scale", node.name), found.sentence
    assert found.seconds < 60


@pytest.mark.extended
def test_so_is_one_in_a_module_that_torch_exported(tmp_path: Path):
    right = stack(12)
    theirs = exported(Stack(12, "causal dropped"), tmp_path)
    names = [n.name for n in onnx.load(right / "model.onnx").graph.node if n.op_type == "Attention"]
    found = explain(right, on("ort-cpu"), graph=theirs)
    first = found.causes[0]
    assert (first.kind, first.node) == ("causal dropped", names[WRONG_LAYERS[12]]), found.sentence


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


def line_of_attention() -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if "scaled_dot_product_attention(" in line)
