"""`compare --module … --budget`: quantised graphs of a user's module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from test_compare_models import RUN
from torch import nn

from attn_export import Subject, verify
from attn_export.commands.compare import compare_quantised
from attn_export.errors import UsageError
from attn_export.runtimes.run_options import RunOptions

SIZE = 32
BUDGET = RunOptions.of(runtimes=["ort-cpu"], budgets=["sqnr>=30"])


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE).eval()


def subject() -> Subject:
    return Subject(module(), {"input": torch.randn(2, 5, SIZE)}, {"input": {1: "length"}}, ["y"])


def graph(path: Path, scaled: float = 1.0, *, quantised: bool = True) -> Path:
    """Write the graph of the module with int8 weights, and another scale of them if wanted."""
    layer = module()
    weight, bias = (x.detach().numpy() for x in (layer.weight.T, layer.bias))
    scales = (np.abs(weight).max(0) / 127).astype("f4")
    integers = np.round(weight / scales).astype("i1")
    tensors = {"w": integers, "s": scales * np.float32(scaled), "b": bias}
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["weight"], axis=1)]
    if not quantised:
        tensors, nodes = {"weight": np.ascontiguousarray(weight), "b": bias}, []
    nodes += [
        helper.make_node("MatMul", ["input", "weight"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, "length", SIZE])
        for name in ("input", "y")
    ]
    stored = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, path)
    return path


def test_a_quantised_graph_is_judged_by_its_budget_and_by_its_integers(tmp_path):
    out = tmp_path / "out"
    report = compare_quantised(subject, graph(tmp_path / "g.onnx"), BUDGET, output=out)
    assert report.passed
    assert report.notes[0] == (
        "judged by the model with the integers of 1 weight of DequantizeLinear"
    )
    assert report.quality is not None
    assert not report.quality.missed
    assert {verdict.graph.split("/")[0] for verdict in report.verdicts} == {"g", "g-budget"}
    assert verify(out, RUN).passed


@pytest.mark.parametrize(("scaled", "budget"), [(1.0, "sqnr>=90"), (1.3, "sqnr>=30")])
@pytest.mark.every(2)
def test_a_graph_beyond_its_budget_fails(tmp_path, scaled, budget):
    run = RunOptions.of(runtimes=["ort-cpu"], budgets=[budget])
    report = compare_quantised(subject, graph(tmp_path / "g.onnx", scaled), run)
    assert not report.passed
    assert not {verdict.status for verdict in report.verdicts} - {"passed"}
    assert report.quality is not None
    assert any(budget in sentence for sentence in report.quality.missed)


def test_integers_that_the_graph_uses_wrongly_are_no_matter_of_budgets(tmp_path):
    """A budget of 1 dB lets a lost bias pass; the module with the integers does not."""
    path = graph(tmp_path / "g.onnx")
    model = onnx.load(path)
    tensor = next(x for x in model.graph.initializer if x.name == "b")
    tensor.CopyFrom(numpy_helper.from_array(np.zeros(SIZE, "f4"), "b"))
    onnx.save(model, path)
    run = RunOptions.of(runtimes=["ort-cpu"], budgets=["sqnr>=1"])
    report = compare_quantised(subject, path, run)
    wrong = {v.graph.split("/")[0] for v in report.verdicts if v.status == "failed"}
    assert wrong == {"g"}
    assert report.explanations


def test_a_float_graph_needs_no_budget(tmp_path):
    with pytest.raises(UsageError, match=r"g\.onnx is not quantised; leave it out"):
        compare_quantised(subject, graph(tmp_path / "g.onnx", quantised=False), BUDGET)
