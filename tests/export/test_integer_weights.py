"""Modules of users whose linear layers get weights of integers."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import pytest
import torch
from agreement import right_graphs
from conftest import Cli
from torch import Tensor, nn

from attn_export import Subject, verify
from attn_export.errors import ExportError, UsageError, WeightsError

MINE = """
import torch
from torch import nn
from attn_export import Subject

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32, bias=False))

    def forward(self, x):
        return x + self.mlp(self.attention(x, x, x, need_weights=False)[0])

def block():
    axes = {"x": {0: "batch", 1: "query_len"}}
    return Subject(Block().eval(), {"x": torch.randn(2, 5, 32)}, axes, ["y"])
"""
STORED = {"attention.in_proj_weight", "attention.out_proj.weight", "mlp.0.weight", "mlp.2.weight"}


def test_the_graph_holds_integers_that_are_judged_twice_and_recomputed(cli: Cli, tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)
    module, out = f"{tmp_path / 'mine.py'}:block", tmp_path / "out"
    few = ("--dialect", "standard", "--dialect", "ort", "--runtime", "ort-cpu")
    done = cli("build", "--module", module, "--weights-dtype", "int4", *few, "--output", out)
    assert done.returncode == 0, done.stderr
    graph = onnx.load(out / "model.onnx", load_external_data=False).graph
    wanted = onnx.TensorProto.DataType.Value("INT4")
    assert {t.name for t in graph.initializer if t.data_type == wanted} == STORED
    products = [n.op_type for n in onnx.load(out / "model.ort.onnx").graph.node]
    assert products.count("MatMulNBits") == 4
    report = verify(out, runtimes=["ort-cpu"], recompute=True, module=module)
    assert report.passed, str(report)
    assert report.quality.outputs[0].part == "y"
    assert not verify(out, runtimes=["ort-cpu"], budgets=["sqnr>=90"]).passed


class Odd(nn.Module):
    """A layer whose weight is read as its transpose as well, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x) @ self.first.weight))


def odd() -> Subject:
    return Subject(Odd().eval(), {"x": torch.randn(2, 16)}, {"x": {0: "batch"}}, ["y"])


def test_shared_weights_stay_floating_and_the_users_module_as_it_was():
    subject = odd()
    before = subject.module.first.weight.clone()
    rounded = subject.with_weights("int8")
    assert torch.equal(subject.module.first.weight, before)
    assert not torch.equal(rounded.module.first.weight, before)
    assert [*rounded.linears.places] == ["first"]
    right_graphs(rounded)


class Narrow(nn.Module):
    def __init__(self, width: int, dtype=torch.float32, value: float = 0.5) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4, dtype=dtype)
        nn.init.constant_(self.inner.weight[2:], value)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("module", "dtype", "error", "message"),
    [
        (Narrow(16), "int3", UsageError, "weights_dtype is int4, int8 or none; got 'int3'"),
        (Narrow(10), "int4", ExportError, "inner.weight has 10 inputs, no multiple of 16"),
        (Narrow(16, torch.float16), "int4", ExportError, "no linear layers in float32"),
        (nn.Identity(), "int8", ExportError, "no linear layers in float32"),
        (
            Narrow(16, value=math.nan),
            "int8",
            WeightsError,
            "inner.weight cannot be .*NaN or inf",
        ),
        (
            Narrow(16, value=math.inf),
            "int4",
            WeightsError,
            "inner.weight cannot be .*NaN or inf",
        ),
    ],
)
def test_what_cannot_be_rounded_is_refused(module: nn.Module, dtype: str, error, message: str):
    x = torch.randn(2, 16)
    if isinstance(module, Narrow):
        x = x.new_zeros(2, module.inner.in_features, dtype=module.inner.weight.dtype)
    name = "x" if isinstance(module, Narrow) else "input"
    subject = Subject(module.eval(), {name: x}, {name: {0: "batch"}}, ["y"])
    with pytest.raises(error, match=message):
        subject.with_weights(dtype)


def test_weights_are_rounded_only_once():
    with pytest.raises(UsageError, match="weights are rounded once"):
        odd().with_weights("int8").with_weights("int8")
