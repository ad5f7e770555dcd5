"""`lower` on graphs of other exporters, which `scripts/exported_graphs` made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conftest import Cli
from onnx import TensorProto, helper, numpy_helper
from shared import extended

from attn_export.commands.lower_here import lower_here
from attn_export.errors import GraphError
from attn_export.float64.evaluate import Evaluation

FOLDER = Path(__file__).parents[2] / "exported"
NAMES = sorted(path.stem for path in FOLDER.glob("*.onnx"))
DEFAULT = frozenset({
    "dynamo18.sdpa_gqa", "dynamo18.sdpa_bool", "dynamo18.cached", "torchscript14.timm",
    "torchscript14.opt", "torchscript17.length_first", "torchscript17.channels",
    "torchscript17.cross", "optimum.bert", "transformers.llama", "torchscript11.opt",
    "torchscript17.padded", "torchscript17.windows", "dynamo18.rows", "torchscript17.latents",
    "dynamo18.softmax_one", "torchscript17.sdpa_free",
})  # fmt: skip
KERNELS = {"Attention", "GroupQueryAttention", "MultiHeadAttention"}


@pytest.mark.parametrize("name", extended(NAMES, DEFAULT.__contains__))
def test_attention_is_one_node(name: str, tmp_path: Path):
    """Look at the nodes alone: `lower` has compared both graphs, at several sizes."""
    target = str(tmp_path / "lowered.onnx")
    found = lower_here(str(FOLDER / f"{name}.onnx"), target, "ort")
    operators = found["operators"][target]
    assert KERNELS & set(operators)
    assert "Softmax" not in operators
    assert "opset" not in found["note"]


def test_there_are_graphs_of_seven_exporters():
    exporters = {name.partition(".")[0] for name in NAMES}
    assert exporters == {
        "dynamo18", "dynamo23", "torchscript11", "torchscript14", "torchscript17", "optimum",
        "transformers",
    }  # fmt: skip
    assert len(NAMES) >= 40
    assert set(NAMES) >= DEFAULT


@pytest.mark.parametrize(("dialect", "operator"), [("standard", "Attention"), ("portable", "")])
def test_other_dialects_find_it_too(dialect: str, operator: str, tmp_path: Path, cli: Cli):
    source = FOLDER / "torchscript14.bert.onnx"
    done = cli("lower", str(source), "--dialect", dialect, "--output", "x.onnx")
    assert done.returncode == 0, done.stderr
    assert "1 attention written out in operators became a node" in done.stdout
    assert "only the opset" not in done.stdout
    model = onnx.load(tmp_path / "x.onnx")
    onnx.checker.check_model(model, full_check=True)
    names = {node.op_type for node in model.graph.node}
    assert ("Softmax" not in names) if operator else ("Attention" not in names)
    assert {o.version for o in model.opset_import} == {23 if operator else 18}


def test_keys_and_values_of_shared_heads_are_not_repeated(tmp_path: Path):
    target = tmp_path / "x.onnx"
    lower_here(str(FOLDER / "dynamo18.sdpa_gqa.onnx"), str(target), "standard")
    (node,) = (node for node in ir.load(target).graph if node.op_type == "Attention")
    query, key, value = (x.shape for x in node.inputs[:3] if x is not None)
    assert (query[1], key[1], value[1]) == (4, 2, 2)


@pytest.mark.parametrize("name", ["torchscript14.timm", "dynamo18.sdpa_gqa_causal"])
@pytest.mark.parametrize("dialect", ["standard", "portable"])
def test_contrib_operators_go_back(name: str, dialect: str, tmp_path: Path):
    there, back = tmp_path / "ort.onnx", tmp_path / "back.onnx"
    lower_here(str(FOLDER / f"{name}.onnx"), str(there), "ort")
    assert any(node.domain == "com.microsoft" for node in onnx.load(there).graph.node)
    lower_here(str(there), str(back), dialect)
    model = onnx.load(back)
    assert not any(node.domain for node in model.graph.node)
    onnx.checker.check_model(model, full_check=True)


def test_functions_are_looked_into(tmp_path: Path):
    model = onnx.load(FOLDER / "torchscript17.timm.onnx")
    graph, source = model.graph, tmp_path / "function.onnx"
    inputs = [x.name for x in (*graph.input, *graph.initializer)]
    outputs, opsets = [x.name for x in graph.output], [*model.opset_import]
    function = helper.make_function("local", "Block", inputs, outputs, graph.node, opsets)
    del graph.node[:]
    graph.node.append(helper.make_node("Block", inputs, outputs, domain="local"))
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    onnx.save(model, source)
    found = lower_here(str(source), str(tmp_path / "x.onnx"), "standard")
    assert "1 attention written out in operators became a node" in found["note"]
    x = np.random.default_rng(0).standard_normal((2, 5, 16))
    y = Evaluation.load(source).values({"x": x})[graph.output[0].name]
    assert y.shape == x.shape


def attention_graph(path: Path, *, opset: int, low: float = 0.0, axis: int = -1) -> Path:
    """Write attention with scores of which a number is filled in beyond the diagonal."""
    shape = ["batch", 2, "length", 8]
    seen, fill = ([helper.make_tensor(name, kind, [], [value])] for name, kind, value in (
        ("three", TensorProto.INT64, 3), ("low", TensorProto.FLOAT, low)))  # fmt: skip
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["product"]),
        helper.make_node("Less", ["order", "three"], ["seen"]),
        helper.make_node("Where", ["seen", "product", "low"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=axis),
        helper.make_node("MatMul", ["weights", "v"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "qkv"]
    inputs.append(helper.make_tensor_value_info("order", TensorProto.INT64, ["length"]))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [*seen, *fill])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"opset": 17, "low": -100.0}, "nothing to lower"),
        ({"opset": 17, "low": -1e30, "axis": -2}, "nothing to lower"),
        ({"opset": 12, "low": -1e30, "axis": 1}, "nothing to lower"),
        ({"opset": 10, "low": -1e30, "axis": 3}, "opset 10; export it at opset 11 or later"),
    ],
)
def test_a_graph_that_cannot_be_lowered_is_refused_in_one_line(
    options, says: str, tmp_path: Path, cli: Cli
):
    attention_graph(tmp_path / "a.onnx", **options)
    done = cli("lower", "a.onnx", "--dialect", "ort", "--output", "x.onnx")
    assert done.returncode == 4
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x.onnx").exists()


FILLED = """<ir_version: 9, opset_import: ["": 18]>
g (float[B, 2, L, 8] q, float[B, 2, L, 8] k, float[B, 2, L, 8] v, bool[B, 1, L, L] mask)
=> (float[B, 2, L, 8] y) <float low = {LOW}> {
    turned = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, turned)
    kept = Where(mask, scores, low)
    weights = Softmax<axis = -1>(kept)
    y = MatMul(weights, v)
}"""


@pytest.mark.parametrize(("low", "says"), [("-inf", True), ("-1e9", False)])
def test_a_note_says_that_queries_without_a_key_are_no_longer_nan(
    low: str, says: bool, tmp_path: Path
):
    model = onnx.parser.parse_model(FILLED.replace("{LOW}", "{0}"))
    low_tensor = numpy_helper.from_array(np.array(low, np.float32), "low")
    model.graph.initializer[0].CopyFrom(low_tensor)
    onnx.save(model, tmp_path / "a.onnx")
    found = lower_here(str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx"), "standard")
    assert ("is NaN in it, and gets 0 in its place" in found["note"]) == says


GUARDED = """<ir_version: 9, opset_import: ["": 18]>
g (float[B, 2, L, 8] q, float[B, 2, L, 8] k, float[B, 2, L, 8] v, bool[B, 1, L, L] mask)
=> (float[B, 2, L, 8] y)
<float low = {-inf}, float zero = {0.0}, float tenth = {0.1}, int64[1] over = {OVER}> {
    turned = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, turned)
    kept = Where(mask, scores, low)
    largest = ReduceMax(kept, over)
    below = Sub(kept, largest)
    weights = Softmax<axis = -1>(below)
    odd = CONDITION
    guarded = Where(odd, zero, weights)
    y = MatMul(guarded, v)
}"""


@pytest.mark.parametrize(
    ("over", "condition", "refused"),
    [
        ("-1", "IsNaN(weights)", ""),
        ("-1", "Less(weights, tenth)", "gives other numbers"),
        ("-2", "IsNaN(weights)", "gives other numbers"),
    ],
)
def test_what_is_read_as_a_guard_against_nan_is_compared(
    over: str, condition: str, refused: str, tmp_path: Path
):
    text = GUARDED.replace("OVER", over).replace("CONDITION", condition)
    onnx.save(onnx.parser.parse_model(text), tmp_path / "a.onnx")
    source, target = str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx")
    if refused:
        with pytest.raises(GraphError, match=refused):
            lower_here(source, target, "standard")
    else:
        assert lower_here(source, target, "standard")["operators"][target]["Attention"] == 1


FIXED = """<ir_version: 9, opset_import: ["": 18]>
g (float[n] x, float[m] z, float[n + m] w) => (float[L] y) <int64[1] three = {3}> {
    only = Reshape(x, three)
    both = Concat<axis = 0>(only, z)
    sum = Add(both, w)
    y = Softmax<axis = -1>(sum)
}"""


def test_an_axis_that_is_fixed_may_be_part_of_a_sum(tmp_path: Path):
    model = onnx.parser.parse_model(FIXED.replace("n + m", "total"))
    model.graph.input[2].type.tensor_type.shape.dim[0].dim_param = "n + m"
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(GraphError, match="no Attention node"):
        lower_here(str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx"), "ort")
