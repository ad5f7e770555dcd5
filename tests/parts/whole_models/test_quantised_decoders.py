"""Decoders that are built with weights of integers."""

from __future__ import annotations

import onnx
import pytest
import torch
from tiny_decoders import tiny_decoder
from tiny_encoders import tiny_encoder

from attn_export import Subject, build, verify
from attn_export.commands.bundle_graphs import lower_all
from attn_export.errors import ExportError, UsageError, WeightsError
from attn_export.export.export import export


def test_weights_are_stored_as_integers_and_judged_twice(tmp_path):
    model = tiny_decoder("llama", num_hidden_layers=1)
    before = [parameter.clone() for parameter in model.parameters()]
    subject = Subject.from_model(model, weights_dtype="int4", max_len=16)
    report = build(subject, tmp_path / "out", dialects=("ort",), runtimes=["ort-cpu"])
    assert report.passed
    assert all(map(torch.equal, model.parameters(), before))  # the user's model
    graph = onnx.load(tmp_path / "out/model.ort.onnx", load_external_data=False).graph
    products = [node.op_type for node in graph.node if "MatMul" in node.op_type]
    assert products == ["MatMulNBits"] * 5  # q, k and v, the output, gate and up, down, logits
    logits = report.quality.outputs[0]
    assert logits.part == "logits"
    assert 6 < logits.sqnr < 40
    assert [str(budget) for budget in report.quality.budgets] == ["sqnr>=6"]
    assert verify(tmp_path / "out", runtimes=["ort-cpu"]).quality.outputs[0] == logits
    assert not verify(tmp_path / "out", runtimes=["ort-cpu"], budgets=["sqnr>=40"]).passed


def test_weights_that_are_stored_by_input_are_rounded_too():
    subject = Subject.from_model(tiny_decoder("gpt2", num_hidden_layers=1), weights_dtype="int8")
    graphs, _ = lower_all(export(subject), ("standard",))
    counts = [node.op_type for node in graphs[0].model.graph]
    # The output layer shares its weight with the embeddings, which stay floating.
    assert counts.count("DequantizeLinear") == 5


@pytest.mark.parametrize(
    ("model", "dtype", "error", "message"),
    [
        (tiny_decoder("llama"), "int3", UsageError, "is int4, int8 or none; got 'int3'"),
        (tiny_decoder("llama", intermediate_size=40), "int4", ExportError, "has 40 inputs"),
        (tiny_encoder("bert"), "int4", UsageError, "is for decoders; leave it out"),
    ],
)
def test_what_cannot_be_rounded_is_refused(model, dtype, error, message):
    with pytest.raises(error, match=message):
        Subject.from_model(model, weights_dtype=dtype)


def test_weights_that_are_not_finite_and_budgets_without_integers_are_refused(tmp_path):
    model = tiny_decoder("llama")
    with pytest.raises(UsageError, match="needs quantised weights"):
        build(Subject.from_model(model), tmp_path / "out", budgets=["sqnr>=9"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.inf
    with pytest.raises(WeightsError, match=r"layers.1.mlp.up_proj.weight cannot be quantised"):
        Subject.from_model(model, weights_dtype="int4")
