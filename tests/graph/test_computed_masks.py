"""Masks that a graph computes: causal ones become an attribute, similar ones stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from attention_forms import session
from mask_modules import USUAL, subject
from mask_texts import (
    CAUSAL,
    GONE,
    PADDING,
    SIZES,
    SPLIT,
    STAYS,
    TEXTS,
    in_place,
    parsed,
    with_constants,
)
from onnx.reference import ReferenceEvaluator

from attn_export.export.export import export
from attn_export.graph.lower import DECODE, lower
from attn_export.graph.lower.computed_masks import recognise_masks


def verdict(node: ir.Node, before: ir.Node) -> str:
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    causal, was = (x.attributes.get_int("is_causal", 0) for x in (node, before))
    if mask is None:
        return CAUSAL if causal > was else GONE
    return SPLIT if causal > was else STAYS


def attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "Attention"]


def verdicts(model: ir.Model) -> list[str]:
    found = model.clone()
    recognise_masks(found)
    return [verdict(*pair) for pair in zip(attentions(found), attentions(model), strict=True)]


def draw(model: onnx.ModelProto, B: int, L: int, P: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([B, L, P])
    sizes = {"B": B, "L": L, "P": P, "S": L + P}
    drawn = {}
    for value in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        array = random.standard_normal(shape).astype(np.float32)
        if value.type.tensor_type.elem_type == onnx.TensorProto.BOOL:
            array = array > -0.5
        elif value.name == "bias":
            array[random.random(shape) < 0.3] = -np.inf
        drawn[value.name] = array
    return drawn


def assert_same(original: onnx.ModelProto, sizes: list[tuple[int, int, int]]) -> None:
    """Assert that the `ort` dialect gives the same outputs as the graph."""
    reference = ReferenceEvaluator(original)
    for phase, form in lower(ir.from_proto(original), "ort").items():
        engine = session(form.model)
        for B, L, P in sizes:
            inputs = draw(original, B, 1 if phase == DECODE else L, P)
            with np.errstate(all="ignore"):
                wanted = reference.run(None, inputs)
            for one, other in zip(engine.run(None, inputs), wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", TEXTS)
def test_a_mask_is_known_by_its_values(name: str):
    wanted, body, options = TEXTS[name]
    original = parsed(body, **options)
    assert verdicts(ir.from_proto(original)) == [wanted]
    if name != "chance":
        past = options.get("past", True)
        table = 12 if "table" in name else 44  # keys before, beyond a window of 40
        assert_same(original, [(2, 3, 4), (1, 1, 0), (3, 5, 0), (1, 2, table)] if past else
                    [(2, 4, 0), (1, 1, 0), (1, 45, 0)])  # fmt: skip


@pytest.mark.parametrize("name", [n for n, (wanted, *_) in TEXTS.items() if wanted == CAUSAL])
def test_a_causal_mask_gets_the_causal_kernel(name: str):
    _, body, options = TEXTS[name]
    forms = lower(ir.from_proto(parsed(body, **options)), "ort")
    inner = [n.op_type for n in ir.traversal.RecursiveGraphIterator(forms[""].model.graph)]
    assert "GroupQueryAttention" in inner
    assert not {"Range", "Trilu", "LessOrEqual"} & {node.op_type for node in forms[""].model.graph}


def test_keys_of_another_length_have_no_causal_of_their_own():
    model = parsed("mask = LessOrEqual (keys, column)", past=False)
    assert verdicts(ir.from_proto(model)) == [CAUSAL]
    for value in model.graph.input[1:3]:
        value.type.tensor_type.shape.dim[2].dim_param = "N"
    for node in model.graph.node:
        if node.name == "P":  # so that S is N
            node.op_type, node.input[0] = "Sub", "N"
            node.input.append("L")
    length = onnx.helper.make_node("Shape", ["K"], ["N"], start=2, end=3)
    model.graph.node.insert(0, length)
    assert verdicts(ir.from_proto(model)) == [STAYS]


def test_a_mask_of_two_layers_is_tried_once():
    body = "near = And (before, padding) mask = Where (near, nothing, hidden)"
    model = parsed(body, given=PADDING)
    second = onnx.helper.make_node(
        "Attention", ["Y", "K", "V", "mask", "past_key", "past_value"], ["Z", "k", "v"], "second"
    )
    model.graph.node.append(second)
    model.graph.output[0].name = "Z"
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    recognise_masks(graph)
    first, last = attentions(graph)
    assert first.inputs[3] is last.inputs[3]
    assert Counter(node.op_type for node in graph.graph) == {"Where": 1, "Attention": 2}
    assert_same(model, [(2, 3, 4), (1, 1, 0)])


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        ("LessOrEqual (keys, place)", CAUSAL), ("Less (keys, place)", STAYS),
        ("LessOrEqual (keys, column)", STAYS), ("Less (keys, end)", GONE),
        ("LessOrEqual (keys, furthest)", STAYS),
    ],
)  # fmt: skip
def test_a_mask_of_the_length_of_a_cache_in_place(mask: str, wanted: str):
    model = ir.from_proto(in_place(mask))
    assert verdicts(model) == [wanted]
    decode = {node.op_type for node in lower(model, "ort")[DECODE].model.graph}
    assert ("GroupQueryAttention" in decode) == (wanted != STAYS)


def test_an_unknown_mask_is_left_alone():
    for body in ("mask = Relu (V)", "mask = Sub (before, before)", "mask = Identity (table)"):
        assert verdicts(ir.from_proto(parsed(body))) == [STAYS]


@pytest.mark.parametrize("past", [False, True], ids=["no past", "past"])
def test_masks_as_they_are_usually_written_in_pytorch(past: bool):
    made = subject({name: mask for name, (_, mask) in USUAL.items()}, past=past)
    model = export(made).model
    assert verdicts(model) == [CAUSAL if causal else STAYS for causal, _ in USUAL.values()]
    forms = lower(model, "ort")
    kernels = Counter(n.op_type for n in ir.traversal.RecursiveGraphIterator(forms[""].model.graph))
    assert kernels["GroupQueryAttention"] == sum(causal for causal, _ in USUAL.values())
    for B, L, P in ((2, 3, 4), (1, 1, 0), (1, 5, 1), (3, 1, 6)):
        random = torch.Generator().manual_seed(L)
        given = {
            "q": torch.randn(B, 4, L, 8, generator=random),
            "past": [torch.randn(B, 2, P, 8, generator=random) for _ in range(2 * len(USUAL))],
        }
        arrays = {"q": given["q"].numpy()}
        if past:
            arrays |= {f"past.{i}": x.numpy() for i, x in enumerate(given["past"])}
        wanted = made.module(**(given if past else {"q": given["q"]}))
        for phase, form in forms.items():
            if phase == DECODE and L > 1:
                continue
            got = session(form.model).run([v.name for v in model.graph.outputs], arrays)
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one, other.numpy(), rtol=2e-6, atol=2e-6)


def test_a_mask_that_depends_on_other_axes_than_those_of_the_node_stays():
    sizes = SIZES.replace("(past_key)", "(memory)").replace(
        "S = Add (L, P)", "S = Shape <start: int = 2, end: int = 3> (K)"
    )
    text = f"""<ir_version: 11, opset_import: ["" : 23]>
    g (float[B,4,L,8] Q, float[B,1,P,8] memory, float[B,4,C,8] K) => (float[B,4,L,8] Y) {{
      {sizes}
      Y = Attention (Q, K, K, before)
    }}"""
    model = ir.from_proto(with_constants(onnx.parser.parse_model(text)))
    assert verdicts(model) == [STAYS]


def test_a_mask_that_is_a_constant_of_one_size_stays():
    text = """<ir_version: 11, opset_import: ["" : 23]>
    g (float[1,4,6,8] Q) => (float[1,4,6,8] Y) { Y = Attention (Q, Q, Q, mask) }"""
    proto = with_constants(onnx.parser.parse_model(text))
    blocks = np.kron(np.eye(3), np.ones((2, 2))).astype(bool)
    mask = np.broadcast_to(blocks, (1, 4, 6, 6)).copy()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(mask, "mask"))
    assert verdicts(ir.from_proto(proto)) == [STAYS]
