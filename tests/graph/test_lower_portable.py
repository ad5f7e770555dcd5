"""`Attention` nodes that others made, in opset 18: what the ONNX reference evaluator gives."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from attn_export.errors import GraphError
from attn_export.graph.lower import lower

OUTPUTS = ("Y", "present_key", "present_value", "scores")


@dataclasses.dataclass(frozen=True)
class Form:
    """One `Attention` node with symbolic batch and lengths."""

    heads: tuple[int, int] = (4, 2)
    packed: bool = False
    mask: tuple[str | int, ...] = ()
    mask_type: str = "bool"
    past: bool = False
    valid_keys: bool = False
    half: bool = False
    widths: tuple[int, int] = (8, 6)
    outputs: int = 1
    attributes: tuple[tuple[str, Any], ...] = ()

    @property
    def float_type(self) -> int:
        return TensorProto.FLOAT16 if self.half else TensorProto.FLOAT

    def inputs(self) -> dict[str, tuple[int, tuple[str | int, ...]]]:
        (H, Hkv), (D, Dv) = self.heads, self.widths
        if self.packed:
            shapes = {"Q": ("B", "L", H * D), "K": ("B", "N", Hkv * D), "V": ("B", "N", Hkv * Dv)}
        else:
            shapes = {"Q": ("B", H, "L", D), "K": ("B", Hkv, "N", D), "V": ("B", Hkv, "N", Dv)}
        found = {name: (self.float_type, shape) for name, shape in shapes.items()}
        if self.mask:
            kind = TensorProto.BOOL if self.mask_type == "bool" else self.float_type
            keys = "S" if self.past else "N"
            found["mask"] = (kind, tuple(keys if axis == "S" else axis for axis in self.mask))
        if self.past:
            found["past_key"] = (self.float_type, ("B", Hkv, "P", D))
            found["past_value"] = (self.float_type, ("B", Hkv, "P", Dv))
        if self.valid_keys:
            found["valid"] = (TensorProto.INT64, ("B",))
        return found

    def output_shapes(self) -> tuple[tuple[str | int, ...], ...]:
        (H, Hkv), (D, Dv) = self.heads, self.widths
        keys = "S" if self.past else "N"
        attended = ("B", "L", H * Dv) if self.packed else ("B", H, "L", Dv)
        return attended, ("B", Hkv, keys, D), ("B", Hkv, keys, Dv), ("B", H, "L", keys)

    def model(self) -> onnx.ModelProto:
        given = self.inputs()
        names = ["Q", "K", "V", "mask", "past_key", "past_value", "valid"]
        names = [name if name in given else "" for name in names]
        while not names[-1]:
            names.pop()
        attributes = dict(self.attributes)
        if self.packed:
            attributes |= {"q_num_heads": self.heads[0], "kv_num_heads": self.heads[1]}
        node = helper.make_node(
            "Attention", names, list(OUTPUTS[: self.outputs]), "attention",
            **attributes,
        )  # fmt: skip
        inputs = [helper.make_tensor_value_info(n, *what) for n, what in given.items()]
        outputs = [
            helper.make_tensor_value_info(name, self.float_type, shape)
            for name, shape in zip(node.output, self.output_shapes(), strict=False)
        ]
        graph = helper.make_graph([node], "g", inputs, outputs)
        opset = helper.make_opsetid("", 24 if self.valid_keys else 23)
        return helper.make_model(graph, opset_imports=[opset], ir_version=11)

    def draw(self, B: int, L: int, N: int, P: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng([B, L, N, P])
        S = N + P if self.past else N
        sizes = {"B": B, "L": L, "N": N, "P": P, "S": S, "short": max(1, S - 1)}
        drawn = {}
        for name, (kind, shape) in self.inputs().items():
            size = tuple(sizes.get(axis, axis) for axis in shape)
            if kind == TensorProto.BOOL:
                drawn[name] = random.random(size) < 0.7
            elif kind == TensorProto.INT64:
                drawn[name] = random.integers(min(L, N), N, size, endpoint=True)
            else:
                drawn[name] = random.standard_normal(size).astype(
                    np.float16 if self.half else np.float32
                )
                if name == "mask":
                    drawn[name][random.random(size) < 0.3] = -np.inf
        return drawn


def attributes(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


SHARING = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
MASKS: dict[str, tuple[str | int, ...]] = {
    "none": (), "[L,S]": ("L", "S"), "[1,S]": (1, "S"), "[1,L,S]": (1, "L", "S"),
    "[H,L,S]": (4, "L", "S"), "[B,1,1,S]": ("B", 1, 1, "S"), "[B,1,L,S]": ("B", 1, "L", "S"),
    "[B,H,L,S]": ("B", 4, "L", "S"), "[1,H,1,S]": (1, 4, 1, "S"), "[S]": ("S",),
    "short [L,S-1]": ("L", "short"), "short [B,H,L,S-1]": ("B", 4, "L", "short"),
}  # fmt: skip

FORMS = {
    f"{sharing}, mask {mask} {kind}, {'past' if past else 'no past'}": Form(
        heads=SHARING[sharing], mask=MASKS[mask], mask_type=kind, past=past,
        outputs=3 if past else 1,
    )
    for sharing, mask, kind, past in itertools.product(
        SHARING, MASKS, ("bool", "float"), (False, True)
    )
    if mask != "none" or kind == "bool"
} | {
    f"{sharing}, {rank}, {name}": Form(
        heads=SHARING[sharing], packed=rank == "3-D", **options  # type: ignore[arg-type]
    )
    for sharing, rank, (name, options) in itertools.product(
        SHARING,
        ("3-D", "4-D"),
        {
            "plain": {},
            "causal": {"attributes": attributes(is_causal=1)},
            "causal, past": {"attributes": attributes(is_causal=1), "past": True, "outputs": 3},
            "causal, mask": {
                "attributes": attributes(is_causal=1), "mask": ("B", 1, "L", "S"), "outputs": 1,
            },
            "causal, float mask of each head, past": {
                "attributes": attributes(is_causal=1), "mask": ("B", 4, "L", "S"),
                "mask_type": "float", "past": True, "outputs": 3,
            },
            "softcap, mask": {
                "attributes": attributes(softcap=0.7), "mask": ("L", "S"), "mask_type": "float",
            },
            "scale": {"attributes": attributes(scale=0.3)},
            "valid keys": {"valid_keys": True},
            "valid keys, mask": {"valid_keys": True, "mask": ("B", 4, "L", "S")},
            "half": {"half": True, "mask": ("B", 1, 1, "S")},
            "half, softmax in float": {
                "half": True, "attributes": attributes(softmax_precision=TensorProto.FLOAT),
            },
            **{
                f"scores of mode {mode}": {
                    "outputs": 4, "past": True, "mask": ("B", 1, "L", "S"),
                    "attributes": attributes(
                        # The evaluator gives scores of mode 0 after softcap, the text before.
                        qk_matmul_output_mode=mode, softcap=0.9 if mode else 0.0, is_causal=1
                    ),
                }
                for mode in range(4)
            },
        }.items(),
    )
}  # fmt: skip
SIZES = ((2, 3, 4, 2), (1, 1, 1, 0), (3, 5, 5, 1), (2, 1, 6, 7))  # B, L, new keys, past


def lowered(form: Form) -> ir.Model:
    return lower(ir.from_proto(form.model()), "portable")


def session(model: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("name", FORMS)
def test_a_form_gives_what_the_reference_gives(name: str):
    form = FORMS[name]
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
    engine = session(lower(ir.from_proto(model), "portable"))
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
    model.graph.node.append(helper.make_node("Swish", ["Y"], ["Z"], "swish"))
    model.opset_import[0].version = 24


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (unknown_heads, "axis 1 of Q, heads or their width, is 'heads'; give it a size"),
        (foreign_operator, "FusedMatMul of com.microsoft is not in the standard dialect"),
        (newer_operator, "swish: Swish has no form in opset 18; keep the standard dialect"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_dialect_cannot_say_is_refused_by_name(change: Any, told: str):
    with pytest.raises(GraphError, match=told):
        lower(ir.from_proto(refused(change)), "portable")
