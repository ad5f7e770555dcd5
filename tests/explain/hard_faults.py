"""Faults that depend on sizes, affect few elements, lose precision, or come with other names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from graph_faults import Planted, initializer
from graph_surgery import Graph
from onnx import TensorProto, helper

Change = Callable[[Graph], None]
Step = tuple[str, Sequence[str], str]
CONSTANTS: dict[str, Any] = {
    "zero": np.int64(0), "one": np.int64(1), "axis1": np.array([1]), "axis2": np.array([2]),
    "start": np.array([0]), "last": np.array([-1]), "end": np.array([2**62]),
    "eight": np.array([8]), "floor": np.float32(-10), "split": np.float32(2**13 + 1),
    "position": np.int64(31), "window": np.int64(-2), "axis3": np.array([3]),
}  # fmt: skip


def put(graph: Graph, before: onnx.NodeProto, *steps: Step, **attributes: Any) -> None:
    """Put nodes before another; inputs named in `CONSTANTS` are made."""
    for operator, inputs, output in steps:
        for name in set(inputs) & CONSTANTS.keys():
            if name not in {t.name for t in graph.model.graph.initializer}:
                graph.constant(CONSTANTS[name], name)
        used = attributes if operator in {"Concat", "Gather"} else {}
        node = helper.make_node(operator, inputs, [output], f"planted_{output}", **used)
        graph.model.graph.node.insert(graph.nodes.index(before), node)


def through(graph: Graph, name: str, *steps: Step, **attributes: Any) -> None:
    """Insert nodes behind a value; they read it as `x`, and compute `y`."""
    (at, producer) = next((i, n) for i, n in enumerate(graph.nodes) if name in n.output)
    producer.output[list(producer.output).index(name)] = f"{name}.x"
    named = {"x": f"{name}.x", "y": name}
    steps = tuple((o, [named.get(i, i) for i in ins], named.get(out, out)) for o, ins, out in steps)
    if at + 1 < len(graph.nodes):
        put(graph, graph.nodes[at + 1], *steps, **attributes)


def named_anew(change: Change) -> Change:
    """Return a change that plants a fault, and renames values as another exporter would."""

    def of(graph: Graph) -> None:
        change(graph)
        ends = (*graph.model.graph.input, *graph.model.graph.output)
        names = {end.name: end.name for end in ends} | {"": ""}
        for number, node in enumerate(graph.nodes):
            node.name = f"n{number}"
            for values in (node.input, node.output):
                values[:] = [names.setdefault(name, f"v{len(names)}") for name in values]
        for tensor in graph.model.graph.initializer:
            tensor.name = names.get(tensor.name, tensor.name)
        del graph.model.graph.value_info[:]

    return of


def where(of: str, axis: int, test: str, size: int, name: str, factor: float) -> Change:
    """Multiply a value by a factor if the size of an input meets a condition."""

    def change(graph: Graph) -> None:
        graph.constant(np.array(size), "bound")
        graph.constant(np.float32(factor), "factor")
        graph.constant(np.float32(1), "unchanged")
        shape, index = ("Shape", [of], "shape"), graph.constant(np.int64(axis), "index")
        through(
            graph, name, shape, ("Gather", ["shape", index], "size"),
            (test, ["size", "bound"], "holds"),
            ("Where", ["holds", "factor", "unchanged"], "times"), ("Mul", ["x", "times"], "y"),
        )  # fmt: skip

    return change


SIZES: list[Step] = [
    ("Shape", ["query"], "q_shape"), ("Gather", ["q_shape", "one"], "L"),
    ("Shape", ["past_key"], "p_shape"), ("Gather", ["p_shape", "two"], "P"),
    ("Add", ["L", "P"], "S"),
]  # fmt: skip
"""Steps that compute L, P and S; the graph must have the constant "two"."""


def causal_from_the_top_left(graph: Graph) -> None:
    causal_up_to(graph, ("Range", ["zero", "L", "one"], "i"))


def causal_two_more(graph: Graph) -> None:
    graph.constant(np.int64(2), "two")
    causal_up_to(
        graph, ("Add", ["P", "two"], "from"), ("Add", ["S", "two"], "to"),
        ("Range", ["from", "to", "one"], "i"),
    )  # fmt: skip


def causal_up_to(graph: Graph, *last_key: Step) -> None:
    """Show each query the keys up to `i`, `[L]`."""
    node = graph.one("Attention")
    graph.set_attribute(node, "is_causal", 0)
    mask: list[Step] = [
        *SIZES, ("Range", ["zero", "S", "one"], "j"), *last_key,
        ("Unsqueeze", ["i", "axis1"], "row"), ("LessOrEqual", ["j", "row"], "seen"),
    ]  # fmt: skip
    if "two" not in {t.name for t in graph.model.graph.initializer}:
        graph.constant(np.int64(2), "two")
    put(graph, node, *mask)
    node.input.extend([""] * (4 - len(node.input)))
    if node.input[3]:
        graph.constant(np.float32(-np.inf), "minus_infinity")
        put(graph, node, ("Where", ["seen", node.input[3], "minus_infinity"], "both"))
    node.input[3] = "both" if node.input[3] else "seen"


def one_key_short_with_left_padding(graph: Graph) -> None:
    """Hide the own key of each query in rows whose mask hides key 0."""
    node = graph.one("Attention")
    graph.constant(np.int64(2), "two")
    steps: list[Step] = [
        *SIZES, ("Range", ["P", "S", "one"], "i"),
        ("Range", ["zero", "S", "one"], "j"), ("Unsqueeze", ["i", "axis1"], "row"),
        ("Less", ["j", "row"], "before"),
        ("Slice", ["attn_mask", "start", "axis1", "axis3"], "key_0"),
        ("Or", ["before", "key_0"], "seen"), ("And", [node.input[3], "seen"], "mask"),
    ]  # fmt: skip
    put(graph, node, *steps)
    node.input[3] = "mask"


def not_causal_with_a_past(graph: Graph) -> None:
    node = graph.one("Attention")
    graph.set_attribute(node, "is_causal", 0)
    graph.constant(np.int64(2), "two")
    steps: list[Step] = [
        *SIZES, ("Range", ["P", "S", "one"], "i"),
        ("Range", ["zero", "S", "one"], "j"), ("Unsqueeze", ["i", "axis1"], "row"),
        ("LessOrEqual", ["j", "row"], "before"), ("Greater", ["P", "zero"], "later"),
        ("Or", ["before", "later"], "seen"), ("And", [node.input[3], "seen"], "mask"),
    ]  # fmt: skip
    put(graph, node, *steps)
    node.input[3] = "mask"


def key_0_is_visible(graph: Graph) -> None:
    node = graph.one("Attention")
    graph.constant(np.int64(3), "three")
    put(
        graph, node, ("Shape", ["attn_mask"], "m_shape"), ("Gather", ["m_shape", "three"], "S"),
        ("Range", ["zero", "S", "one"], "j"), ("Equal", ["j", "zero"], "first"),
        ("Or", [node.input[3], "first"], "mask"),
    )  # fmt: skip
    node.input[3] = "mask"


def last_row_of(name: str) -> Change:
    def change(graph: Graph) -> None:
        graph.constant(np.float32(2), "twice")
        through(
            graph, name, ("Slice", ["x", "start", "last", "axis2"], "others"),
            ("Slice", ["x", "last", "end", "axis2"], "row"), ("Mul", ["row", "twice"], "wrong"),
            ("Concat", ["others", "wrong"], "y"), axis=2,
        )  # fmt: skip

    return change


def rounded_keys(graph: Graph) -> None:
    """Round to 10 bits by Veltkamp's split; in float64 it keeps far more bits."""
    steps: list[Step] = [
        ("Mul", ["x", "split"], "large"), ("Sub", ["large", "x"], "rest"),
        ("Sub", ["large", "rest"], "y"),
    ]  # fmt: skip
    through(graph, "Transpose_2.out", *steps)


def softmax_without_maximum(graph: Graph) -> None:
    node = graph.one("Softmax")
    x, y = node.input[0], node.output[0]
    steps: list[Step] = [
        ("Exp", [x], "raised"), ("ReduceSum", ["raised", "last"], "sum"),
        ("Div", ["raised", "sum"], y),
    ]  # fmt: skip
    put(graph, node, *steps)
    graph.model.graph.node.remove(node)


def row_beyond_the_end(graph: Graph) -> None:
    graph.constant(np.array([3]), "fourth")
    graph.constant(np.float32(0), "nothing")
    through(
        graph, "Reshape_4.out", ("Gather", ["x", "fourth"], "row"),
        ("Mul", ["row", "nothing"], "none"), ("Add", ["x", "none"], "y"), axis=1,
    )  # fmt: skip


def four_queries(graph: Graph) -> None:
    graph.constant(np.array([-1, 4, 32]), "four")
    steps: list[Step] = [
        ("Reshape", ["x", "four"], "cut"), ("Shape", ["x"], "whole"),
        ("Reshape", ["cut", "whole"], "y"),
    ]  # fmt: skip
    through(graph, "Reshape_4.out", *steps)


def eight_keys(graph: Graph) -> None:
    for name in ("start", "eight", "axis2"):
        graph.constant(CONSTANTS[name], name)
    for index in (1, 2):
        graph.before(graph.one("Attention"), index, "Slice", "start", "eight", "axis2")


def positions_up_to_31(graph: Graph) -> None:
    graph.before(graph.one("Cast"), 0, "Min", graph.constant(CONSTANTS["position"], "most"))


def sine_for_cosine(graph: Graph) -> None:
    graph.one("Mul", "rotary/Mul_6").input[1] = "Mul_2.out"


def keys_unrotated(graph: Graph) -> None:
    node = graph.one("Concat", "rotary/Concat_2")
    node.input[:] = ["rotary/Slice_3.out", "rotary/Slice_4.out"]


def window_one_narrower(graph: Graph) -> None:
    graph.one("GreaterOrEqual").input[1] = graph.constant(CONSTANTS["window"], "edge")


def own_key_hidden_in_branches(graph: Graph) -> None:
    branches = [a.g for node in graph.nodes for a in node.attribute if a.HasField("g")]
    for node in (node for branch in branches for node in branch.node):
        if node.op_type == "LessOrEqual":
            node.op_type = "Less"


def first_new_key_for_all(graph: Graph) -> None:
    graph.constant(np.array([0]), "first")
    steps: list[Step] = [
        ("Gather", ["x", "first"], "row"), ("Shape", ["x"], "shape"),
        ("Expand", ["row", "shape"], "y"),
    ]  # fmt: skip
    through(graph, "Transpose_2.out", *steps, axis=2)


def scale_in_branches(graph: Graph) -> None:
    branches = [a.g for node in graph.nodes for a in node.attribute if a.HasField("g")]
    for node in (node for branch in branches for node in branch.node):
        if node.op_type == "GroupQueryAttention":
            graph.set_attribute(node, "scale", 0.3)


def heads_of(count: int) -> Change:
    return lambda graph: graph.set_attribute(graph.one("MultiHeadAttention"), "num_heads", count)


def lowest_is_minus_10(graph: Graph) -> None:
    graph.one("Clip").input[1] = graph.constant(CONSTANTS["floor"], "floor")


def mask_added_twice(graph: Graph) -> None:
    node = graph.one("Attention")
    graph.before(node, 3, "Add", node.input[3])


def mask_times_35_hundredths(graph: Graph) -> None:
    """Scale a mask by almost 1/sqrt(head_dim)."""
    graph.before(graph.one("Attention"), 3, "Mul", graph.constant(np.float32(0.35), "factor"))


def everything_is_nan(graph: Graph) -> None:
    graph.after(graph.nodes[-1], "Mul", graph.constant(np.float32(np.nan), "nan"))


def values_in_bfloat16(graph: Graph) -> None:
    node = graph.one("Attention")
    graph.before(node, 2, "Cast", to=TensorProto.BFLOAT16)
    graph.before(node, 2, "Cast", to=TensorProto.FLOAT)


def halved_in_a_contrib_product(graph: Graph) -> None:
    """Use an operator that is not evaluated in float64."""
    node = graph.one("MatMul", "k_proj/MatMul")
    node.op_type, node.domain = "FusedMatMul", "com.microsoft"
    graph.set_attribute(node, "alpha", 0.5)
    graph.model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def in_float16(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16).astype(np.float32)


BATCH = where("query", 0, "GreaterOrEqual", 4, "Reshape_4.out", 1.01)
QUERIES = where("query", 1, "Greater", 16, "Transpose.out", 0.5)
NO_PAST = where("past_key", 2, "Equal", 0, "Reshape_4.out", 1.1)
FEW_KEYS = where("key", 1, "LessOrEqual", 8, "Reshape_4.out", 0.9)
CHANGED, STUCK = ("changed node",), ("cannot be computed",)

HARD_FAULTS = (
    Planted("top_left", "mqa", causal_from_the_top_left, ("causal offset",), "no past"),
    Planted("top_left_named_anew", "masked", named_anew(causal_from_the_top_left),
            ("causal offset",), "no past"),
    Planted("causal_two_more", "alibi", causal_two_more, ("causal offset",), "two keys too many"),
    Planted("slopes_are_zero", "alibi", initializer("score_bias.slopes", np.zeros_like), CHANGED,
            "score_bias.slopes is 0 everywhere", "portable"),
    Planted("contrib_product", "gqa", halved_in_a_contrib_product, CHANGED,
            "it is FusedMatMul, and should be MatMul", "portable"),
    Planted("short_with_left_padding", "gqa", one_key_short_with_left_padding, ("causal offset",),
            "one key too few: up to P + i - 1, but only in rows whose attn_mask hides key 0"),
    Planted("not_causal_with_a_past", "gqa", not_causal_with_a_past, ("causal dropped",),
            "not applied, but only from past_len"),
    Planted("first_new_key", "mqa", first_new_key_for_all, CHANGED,
            "Transpose_2.out, the key of Attention, is that of the first position for every"),
    Planted("own_key_hidden_in_a_branch", "gqa", own_key_hidden_in_branches, CHANGED,
            "Less Attention/LessOrEqual", "ort"),
    Planted("key_0_visible", "gqa", key_0_is_visible, ("key always visible",), "key 0"),
    Planted("key_0_visible_named_anew", "gqa", named_anew(key_0_is_visible),
            ("key always visible",), "key 0"),
    Planted("last_value", "gqa", last_row_of("present_value"), CHANGED,
            "present_value is wrong at the last total_len alone"),
    Planted("last_key_named_anew", "mqa", named_anew(last_row_of("present_key")), CHANGED,
            "present_key is wrong at the last total_len alone"),
    Planted("from_batch_4", "mqa", BATCH, CHANGED, "it fails from batch 4 up (batch 3 passes)"),
    Planted("from_batch_4_named_anew", "mqa", named_anew(BATCH), CHANGED, "from batch 4 up"),
    Planted("from_query_17", "masked", QUERIES, CHANGED, "from query_len 17 up"),
    Planted("without_a_past", "rotary", NO_PAST, CHANGED, "it fails where past_len is 0"),
    Planted("up_to_8_keys", "cross", FEW_KEYS, CHANGED, "up to key_len 8 (key_len 9 passes)"),
    Planted("first_8_keys", "cross", eight_keys, CHANGED, "planted_Slice"),
    Planted("rounded_keys", "gqa", rounded_keys, ("precision lost",), "Sub planted_"),
    Planted("rounded_keys_named_anew", "rotary", named_anew(rounded_keys), ("precision lost",),
            "Sub n"),
    Planted("softmax_overflows", "cross", softmax_without_maximum, (*CHANGED, "precision lost"),
            "Exp planted_raised", "portable"),
    Planted("row_beyond_the_end", "gqa", row_beyond_the_end, STUCK, "Gather planted_row cannot be"),
    Planted("four_queries", "cross", four_queries, STUCK, "Reshape planted_cut cannot be"),
    Planted("positions_up_to_31", "rotary", positions_up_to_31, CHANGED, "planted_Min"),
    Planted("sine_for_cosine", "rotary", sine_for_cosine, CHANGED, "rotary/Mul_6"),
    Planted("keys_unrotated", "rotary", keys_unrotated, ("rotation left out",), "rotary/Concat_2",
            "portable"),
    Planted("window_one_narrower", "rich", window_one_narrower, ("window offset",), "too late"),
    Planted("scale_in_a_branch", "gqa", scale_in_branches, CHANGED, "its scale is 0.3, and should",
            "ort"),
    Planted("two_heads_of_four", "cross", heads_of(2), CHANGED, "num_heads is 2", "ort"),
    Planted("lowest_is_minus_10", "masked", lowest_is_minus_10, CHANGED, "Clip Clip"),
    Planted("mask_added_twice", "masked", mask_added_twice, CHANGED, "planted_Add"),
    Planted("mask_times_0.35", "masked", mask_times_35_hundredths, CHANGED, "is 0.35 times what"),
    Planted("everything_is_nan", "gqa", everything_is_nan, CHANGED, "planted_Mul_out_proj"),
    Planted("values_in_bfloat16", "mqa", values_in_bfloat16, CHANGED, "planted_Cast",
            "standard", "onnx-reference"),
    Planted("weight_in_float16", "cross", initializer("k_proj.weight", in_float16), CHANGED,
            "k_proj.weight"),
    Planted("weight_reversed", "mqa", initializer("out_proj.weight", np.flipud), CHANGED,
            "out_proj.weight"),
    Planted("decode_scale", "mqa", initializer("float[]_0.353553", lambda a: a / 2), ("scale",),
            "1/sqrt(embed_dim)", "ort.decode"),
)  # fmt: skip
