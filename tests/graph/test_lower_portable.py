"""Foreign `Attention` nodes lowered to opset 18, compared with the ONNX reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_forms import FORMS, IN_PLACE, SIZES, Form, session
from onnx import helper
from onnx.reference import ReferenceEvaluator

from attn_export.errors import GraphError
from attn_export.graph.lower import lower


def lowered(form: Form) -> ir.Model:
    return lower(ir.from_proto(form.model()), "portable")[""].model


@pytest.mark.parametrize("name", FORMS | IN_PLACE)
@pytest.mark.every(3)
def test_a_form_gives_what_the_reference_gives(name: str):
    form = (FORMS | IN_PLACE)[name]
    model = lowered(form)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    engine, reference = session(model), ReferenceEvaluator(form.model())
    tolerance = 4e-3 if form.half else 2e-6
    for B, L, N, P in SIZES:
        if "short" in form.mask and N + P * form.past < 2:
            continue
        inputs = form.draw(B, L, N, P)
        with np.errstate(all="ignore"):
            wanted = reference.run(None, inputs)
        for one, other in zip(engine.run(None, inputs), wanted, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_only_operators_of_opset_18_are_left():
    for form in (Form(), Form(heads=(4, 4), past=True, outputs=3, mask=("B", 1, 1, "S"))):
        model = lowered(form)
        assert model.graph.opset_imports == {"": 18}
        assert model.ir_version == 8
        used = {node.op_type for node in model.graph}
        assert not used & {"Attention", "Expand", "Shape", "IsNaN"}


OPERATORS = {
    "mha": (Form(heads=(4, 4)), {"Mul": 1, "Transpose": 1, "MatMul": 2, "Softmax": 1}),
    "gqa": (Form(), {"Mul": 1, "Transpose": 1, "Reshape": 2, "Unsqueeze": 2, "MatMul": 2,
                     "Softmax": 1}),
    "mqa, past, padding": (
        Form(heads=(4, 1), past=True, outputs=3, mask=("B", 1, 1, "S")),
        {"Concat": 2, "Mul": 1, "Transpose": 1, "Reshape": 2, "Unsqueeze": 3, "MatMul": 2,
         "Where": 2, "Softmax": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_the_number_of_nodes_is_known(name: str):
    form, wanted = OPERATORS[name]
    found: dict[str, int] = {}
    for node in lowered(form).graph:
        found[node.op_type] = found.get(node.op_type, 0) + 1
    assert found == wanted


def test_a_mask_that_is_expanded_from_a_scalar_is_kept():
    """Such a mask has no axis of keys before its Expand."""
    form = Form(mask=("L", "N"))
    model = form.model()
    names = [value.name for value in model.graph.input]
    del model.graph.input[names.index("mask")]
    yes = onnx.numpy_helper.from_array(np.array(True), "yes")
    model.graph.initializer.append(yes)
    makers = [
        helper.make_node("Shape", ["Q"], ["l"], "l", start=2, end=3),
        helper.make_node("Shape", ["K"], ["n"], "n", start=2, end=3),
        helper.make_node("Concat", ["l", "n"], ["shape"], "shape", axis=0),
        helper.make_node("Expand", ["yes", "shape"], ["mask"], "mask"),
    ]
    for index, node in enumerate(makers):
        model.graph.node.insert(index, node)
    engine = session(lower(ir.from_proto(model), "portable")[""].model)
    inputs = {name: array for name, array in form.draw(2, 3, 4, 0).items() if name != "mask"}
    np.testing.assert_allclose(
        engine.run(None, inputs)[0],
        ReferenceEvaluator(model).run(None, inputs)[0],
        rtol=1e-5,
        atol=1e-6,
    )


def test_the_graph_that_is_lowered_is_left_alone():
    model = ir.from_proto(Form().model())
    before = ir.to_proto(model).SerializeToString()
    lower(model, "portable")
    assert ir.to_proto(model).SerializeToString() == before


def test_several_nodes_in_one_graph_are_all_lowered():
    form = Form(heads=(2, 2), widths=(4, 4))
    model = form.model()
    second = helper.make_node("Attention", ["Y", "K", "V"], ["Z"], "second")
    model.graph.node[0].output[0] = "Y"
    model.graph.node.append(second)
    model.graph.output[0].name = "Z"
    reference = ReferenceEvaluator(model)
    engine = session(lower(ir.from_proto(model), "portable")[""].model)
    inputs = form.draw(2, 3, 4, 0)
    np.testing.assert_allclose(
        engine.run(None, inputs)[0], reference.run(None, inputs)[0], rtol=1e-5, atol=1e-6
    )


def refused(change: Any) -> onnx.ModelProto:
    model = Form().model()
    change(model)
    return model


def unknown_heads(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "heads"


def foreign_operator(model: onnx.ModelProto) -> None:
    model.graph.node.append(
        helper.make_node("FusedMatMul", ["Y", "Y"], ["Z"], domain="com.microsoft")
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def newer_operator(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("AffineGrid", ["Y", "Y"], ["Z"], "grid"))
    model.opset_import[0].version = 24


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unknown_heads, "axis 1 of Q, heads or their width, is 'heads'; give it a size"),
        (foreign_operator, "FusedMatMul of com.microsoft is not in the portable dialect"),
        (newer_operator, "grid: AffineGrid has no form in opset 18; keep the standard dialect"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_inexpressible_feature_is_refused_by_name(change: Any, message: str):
    with pytest.raises(GraphError, match=message):
        lower(ir.from_proto(refused(change)), "portable")
