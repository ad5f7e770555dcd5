"""Whole foreign graphs, whose outputs must stay the same in every dialect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_forms import session
from conftest import Cli
from foreign_modules import FOREIGN, exported
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from attn_export.dialect_names import ORT, PORTABLE
from attn_export.errors import GraphError
from attn_export.graph.lower import DECODE, lower

pytestmark = pytest.mark.xdist_group("test_lower_foreign")  # what it exports is shared

SIZES = ((2, 3, 4), (1, 1, 0), (2, 1, 7))  # B, L, P

KERNELS = {
    "MultiheadAttention": {"MultiHeadAttention": 1},
    "grouped with a cache": {"GroupQueryAttention": 1, "Attention": 1},
    "two layers": {"GroupQueryAttention": 2, "Attention": 2},
    "float16": {"GroupQueryAttention": 1},
}
"""In the prefill graph of the `ort` dialect, those of branches too."""


@pytest.mark.parametrize("dialect", [PORTABLE, ORT])
@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.every(4)
def test_a_module_of_others_gives_what_its_graph_gave(name: str, dialect: str):
    foreign, original = FOREIGN[name], exported(name)
    reference = ReferenceEvaluator(ir.to_proto(original))
    tolerance = 4e-3 if name == "float16" else 4e-6
    for phase, form in lower(original, dialect).items():
        onnx.checker.check_model(ir.to_proto(form.model), full_check=dialect != "ort")
        engine = session(form.model)
        for B, L, P in SIZES:
            inputs = foreign.draw(B, 1 if phase == DECODE else L, P)
            with np.errstate(all="ignore"):
                wanted = reference.run(None, inputs)
            got = engine.run([value.name for value in original.graph.outputs], inputs)
            for one, other in zip(got, wanted, strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FOREIGN)
def test_the_kernels_of_the_ort_dialect_are_used(name: str):
    model = lower(exported(name), "ort")[""].model
    found = [node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph)]
    assert {op: found.count(op) for op in KERNELS[name]} == KERNELS[name]


def test_layers_share_what_follows_from_sizes():
    one, two = (lower(exported(name), "ort")[""].model.graph
                for name in ("grouped with a cache", "two layers"))  # fmt: skip
    sizes = {"Shape", "Equal", "Or", "Squeeze"}
    counts = [[n.op_type for n in graph if n.op_type in sizes] for graph in (one, two)]
    assert sorted(counts[0]) == sorted(counts[1])


def test_the_command_line_takes_a_foreign_graph(tmp_path: Path, cli: Cli):
    ir.save(exported("two layers"), tmp_path / "theirs.onnx")
    done = cli("lower", "theirs.onnx", "--dialect", "ort", "--output", "ours.onnx")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("ours*")} == {"ours.onnx", "ours.decode.onnx"}


def one_softmax(opset: int) -> onnx.ModelProto:
    node = helper.make_node("Softmax", ["x"], ["y"])
    return node_model(node, {"x": (TensorProto.FLOAT, ["batch", 8])}, opset)


def test_a_graph_without_attention_is_refused_in_one_line(tmp_path: Path, cli: Cli):
    onnx.save(one_softmax(18), tmp_path / "old.onnx")
    for dialect in ("portable", "ort"):
        done = cli("lower", "old.onnx", "--dialect", dialect, "--output", "new.onnx")
        assert done.returncode == 4
        assert "the graph has no Attention node; there is nothing to lower" in done.stderr
        assert not (tmp_path / "new.onnx").exists()


def node_model(
    node: onnx.NodeProto, inputs: dict[str, tuple[int, list[str | int]]], opset: int = 24
) -> onnx.ModelProto:
    """Return a graph of one node, whose first input and output have the same shape."""
    kind, shape = next(iter(inputs.values()))
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(name, *what) for name, what in inputs.items()],
        [helper.make_tensor_value_info("y", kind, shape)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16], ids=["float", "half"])
@pytest.mark.parametrize("positions", [False, True], ids=["caches", "position_ids"])
@pytest.mark.parametrize("rotated", [0, 4, 8])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rank", [3, 4])
def test_rotary_embedding(rank: int, interleaved: int, rotated: int, positions: bool, kind: int):
    shape = ["B", "L", 24] if rank == 3 else ["B", 3, "L", 8]
    half = (rotated or 8) // 2
    cache = [16, half] if positions else ["B", "L", half]
    inputs = {"x": (kind, shape), "cos": (kind, cache), "sin": (kind, cache)}
    if positions:
        inputs["ids"] = (TensorProto.INT64, ["B", "L"])
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": rotated}
    if rank == 3:
        attributes["num_heads"] = 3
    original = node_model(
        helper.make_node("RotaryEmbedding", list(inputs), ["y"], "turn", **attributes), inputs
    )
    assert_portable(original)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16], ids=["float", "half"])
@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Gelu", ["x"], ["y"]),
        helper.make_node("Gelu", ["x"], ["y"], approximate="tanh"),
        helper.make_node("Swish", ["x"], ["y"]),
        helper.make_node("Swish", ["x"], ["y"], alpha=0.5),
        helper.make_node("RMSNormalization", ["x", "weight"], ["y"]),
        helper.make_node("LayerNormalization", ["x", "weight"], ["y"]),
    ],
    ids=lambda node: f"{node.op_type} {[a.name for a in node.attribute]}",
)
def test_attention_between_other_nodes(node: onnx.NodeProto, kind: int):
    inputs = {"x": (kind, ["B", "L", 8]), "weight": (kind, [8])}
    assert_portable(node_model(node, {name: inputs[name] for name in node.input}))


def assert_portable(original: onnx.ModelProto) -> None:
    lowered = lower(ir.from_proto(original), "portable")[""].model
    onnx.checker.check_model(ir.to_proto(lowered), full_check=True)
    assert lowered.graph.opset_imports == {"": 18}
    engine, reference = session(lowered), ReferenceEvaluator(original)
    for B, L in ((2, 3), (1, 1), (3, 5)):
        random, sizes = np.random.default_rng(L), {"B": B, "L": L}
        inputs = {}
        for value in original.graph.input:
            kind = value.type.tensor_type
            shape = [d.dim_value or sizes[d.dim_param] for d in kind.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            drawn = random.integers(16, size=shape), random.standard_normal(shape)
            inputs[value.name] = drawn[dtype.kind == "f"].astype(dtype)
        tolerance = 1e-2 if inputs["x"].dtype == np.float16 else 2e-6
        np.testing.assert_allclose(
            engine.run(None, inputs)[0], reference.run(None, inputs)[0],
            rtol=tolerance, atol=tolerance,
        )  # fmt: skip


def rotary(*shape: str | int) -> onnx.ModelProto:
    inputs = {
        "x": (TensorProto.FLOAT, list(shape)), "cos": (TensorProto.FLOAT, ["B", "L", 4]),
    }  # fmt: skip
    return node_model(
        helper.make_node("RotaryEmbedding", ["x", "cos", "cos"], ["y"], "turn"), inputs
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("B", 2, "L", "W"), "turn: the width of its heads is not known; declare it"),
        (("B", "L", 16), "turn: 16 is not 0 heads; give num_heads"),
    ],
)
def test_a_rotary_embedding_of_unknown_widths_is_refused_by_name(
    shape: tuple[str | int, ...], message: str
):
    with pytest.raises(GraphError, match=message):
        lower(ir.from_proto(rotary(*shape)), "portable")
