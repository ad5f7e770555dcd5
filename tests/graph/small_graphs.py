"""Shared parts of the tests of graphs: cached exports of small specs, and a tiny model."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import onnx
from conftest import small_spec
from onnx import TensorProto, helper

from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph import IrGraph
from attn_export.graph.save import save_graph

PLAIN = {"cache": "none", "attn_mask": "none"}
"""Changes to `small_spec` that leave query and output alone."""


@functools.cache
def exported(**changes: object) -> tuple[Subject, IrGraph]:
    """Return a small spec's subject and its canonical graph. Read them only."""
    subject = Subject.from_spec(small_spec(**changes))
    return subject, export(subject)


def saved(folder: Path, **changes: object) -> Path:
    """Save the canonical graph of a small spec as a file."""
    path = folder / "model.onnx"
    save_graph(exported(**changes)[1].model, path)
    return path


def operators(**changes: object) -> dict[str, int]:
    """Return the number of nodes of each operator in a small spec's graph."""
    return dict(Counter(node.op_type for node in exported(**changes)[1].model.graph))


def tiny_model(
    *nodes: onnx.NodeProto, initializers: tuple[TensorProto, ...] = ()
) -> onnx.ModelProto:
    """Return a model `x [n, 4] -> y [n, 4]`, float32, opset 23; one Relu by default."""
    graph = helper.make_graph(
        nodes or [helper.make_node("Relu", ["x"], ["y"])],
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        list(initializers),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    model.ir_version = 10
    return model
