"""Faults planted into the graphs of bundles, with the causes that `explain` must name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from graph_surgery import Graph
from onnx import TensorProto, helper
from shared import passed_bundle

from attn_export.spec import AttentionSpec

GQA = AttentionSpec.from_dict(
    {
        "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "bias": "all", "causal": True,
        "attn_mask": "bool[B,1,1,S]", "cache": "append",
    }
)  # fmt: skip
PLAIN = AttentionSpec.from_dict(
    {"embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "attn_mask": "float[B,1,L,S]"}
)
RICH = AttentionSpec.from_dict(
    {
        "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "bias": "none", "causal": True,
        "window_left": 3, "attn_mask": "bool[B,1,1,S]", "cache": "append", "rotary": "half",
        "qk_norm": "rms", "sinks": True, "softcap": 3.0,
    }
)  # fmt: skip
CACHED = {"embed_dim": 32, "num_heads": 4, "causal": True, "cache": "append"}
SPECS = {
    "gqa": GQA, "plain": PLAIN, "rich": RICH,
    "mqa": AttentionSpec.from_dict({**CACHED, "num_kv_heads": 1}),
    "masked": AttentionSpec.from_dict(
        {**CACHED, "num_kv_heads": 2, "attn_mask": "float[B,H,L,S]"}
    ),
    "rotary": AttentionSpec.from_dict({**CACHED, "num_kv_heads": 2, "rotary": "half"}),
    "in-place": AttentionSpec.from_dict(
        {**CACHED, "num_kv_heads": 2, "cache": "in-place", "rotary": "half"}
    ),
    "alibi": AttentionSpec.from_dict({**CACHED, "alibi": True}),
    "cross": AttentionSpec.from_dict(
        {"embed_dim": 32, "num_heads": 4, "cross": True, "kdim": 16, "vdim": 24}
    ),
}  # fmt: skip


def bundle_of(name: str) -> Path:
    """Return the bundle of a spec, built once."""
    return passed_bundle(SPECS[name])


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault in a graph.

    Attributes:
        spec: Whose bundle.
        dialect: Which of its graphs is changed.
        change: How.
        kinds: What the first cause may be called.
        says: A part of its sentence.
        runtime: The runtime. ONNX Runtime's CPU provider computes in float32 what is cast down.
    """

    name: str
    spec: str
    change: Callable[[Graph], None]
    kinds: tuple[str, ...]
    says: str = ""
    dialect: str = "standard"
    runtime: str = "ort-cpu"


def scale_times(factor: float) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        node = graph.one("Attention")
        graph.set_attribute(node, "scale", graph.attribute(node, "scale") * factor)

    return change


def scale_of_width(of: Callable[[int], float]) -> Callable[[Graph], None]:
    return lambda graph: graph.set_attribute(graph.one("Attention"), "scale", of(8))


def not_causal(graph: Graph) -> None:
    graph.set_attribute(graph.one("Attention"), "is_causal", 0)


def mask_inverted(graph: Graph) -> None:
    graph.after_input("attn_mask", "Not")


def mask_ignored(graph: Graph) -> None:
    graph.after_input("attn_mask", "Or", graph.constant(True, "planted_true"))


def mask_of_first_row(graph: Graph) -> None:
    node = graph.one("Expand")
    graph.before(node, 0, "Gather", graph.constant(np.array([0]), "planted_row"), axis=0)


def bias_left_out(name: str) -> Callable[[Graph], None]:
    return lambda graph: graph.set_initializer(f"{name}.bias", np.zeros_like)


def bias_of_last_head(graph: Graph) -> None:
    def without(bias: np.ndarray) -> np.ndarray:
        return np.concatenate([bias[:-8], np.zeros(8, bias.dtype)])

    graph.set_initializer("v_proj.bias", without)


def weight_transposed(graph: Graph) -> None:
    graph.set_initializer("q_proj.weight", np.transpose)


def heads_swapped(graph: Graph) -> None:
    order = graph.constant(np.array([0, 3, 2, 1]), "planted_order")
    graph.after(graph.one("Attention"), "Gather", order, axis=1)


def heads_not_moved(graph: Graph) -> None:
    node = graph.one("Transpose", at=-1)
    shape = graph.constant(np.array([0, -1, 4, 8]), "planted_shape")
    node.op_type, node.input[:] = "Reshape", [node.input[0], shape]
    del node.attribute[:]


def heads_tiled(graph: Graph) -> None:
    node = graph.one("Attention")
    order = graph.constant(np.array([0, 1, 0, 1]), "planted_order")
    graph.before(node, 1, "Gather", order, axis=1)
    graph.before(node, 2, "Gather", order, axis=1)


def keys_for_values(graph: Graph) -> None:
    node = graph.one("Attention")
    node.input[1], node.input[2] = node.input[2], node.input[1]


def past_is_zero(graph: Graph) -> None:
    graph.before(graph.one("Attention"), 4, "Mul", graph.constant(np.float32(0), "planted_zero"))


def positions_one_late(graph: Graph) -> None:
    one = graph.constant(np.array(1, np.int64), "planted_one")
    graph.before(graph.one("Cast"), 0, "Add", one)


def positions_from_zero(graph: Graph) -> None:
    zero = graph.constant(np.array(0, np.int64), "planted_zero")
    cast = graph.one("Cast")
    length = graph.one("Squeeze").output[0]
    at = graph.nodes.index(cast)
    one = graph.constant(np.array(1, np.int64), "planted_one")
    axis = graph.constant(np.array([1], np.int64), "planted_axis")
    graph.model.graph.node.insert(
        at, helper.make_node("Range", [zero, length, one], ["planted_range"], "planted_Range")
    )
    graph.model.graph.node.insert(
        at + 1,
        helper.make_node("Unsqueeze", ["planted_range", axis], ["planted_positions"], "planted_U"),
    )
    cast.input[0] = "planted_positions"


def rotated_backwards(graph: Graph) -> None:
    graph.after(graph.one("Sin"), "Neg")


def frequencies_of_another_base(graph: Graph) -> None:
    graph.set_initializer(
        "rotary.inv_freq", lambda f: (5e5 ** (-np.arange(len(f)) / len(f))).astype(f.dtype)
    )


def window_one_wider(graph: Graph) -> None:
    node = graph.one("GreaterOrEqual")
    node.input[1] = graph.constant(np.array(-4, np.int64), "planted_edge")


def causal_one_ahead(graph: Graph) -> None:
    one = graph.constant(np.array(1, np.int64), "planted_one")
    graph.before(graph.one("Trilu"), 1, "Add", one)


def causal_without_past(graph: Graph) -> None:
    graph.before(graph.one("Trilu"), 1, "Mul", graph.constant(np.array(0), "planted_zero"))


def sinks_are_zero(graph: Graph) -> None:
    graph.set_initializer("sinks", np.zeros_like)


def norm_left_out(graph: Graph) -> None:
    graph.skip(graph.one("RMSNormalization", "q_norm"))


def softcap_times(factor: float) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        graph.set_attribute(graph.one("Attention"), "softcap", 3.0 * factor)

    return change


def hidden_score(value: float) -> Callable[[Graph], None]:
    """Replace the -inf of masks in a portable graph."""

    def change(graph: Graph) -> None:
        names = [t.name for t in graph.model.graph.initializer if t.name.endswith("-inf")]
        assert names
        for name in names:
            graph.set_initializer(name, lambda a: np.full_like(a, value))
        for node in graph.all("Where"):  # rows that see nothing stay as they are
            if node.name.endswith("Where_2"):
                node.input[2] = node.input[1]

    return change


def alibi_not_negated(graph: Graph) -> None:
    graph.skip(graph.one("Neg"))


def softmax_over_queries(graph: Graph) -> None:
    graph.set_attribute(graph.one("Softmax"), "axis", -2)


def softmax_in(kind: int) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        node = graph.one("Softmax")
        graph.before(node, 0, "Cast", to=kind)
        graph.after(node, "Cast", to=TensorProto.FLOAT)

    return change


def initializer(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Graph], None]:
    return lambda graph: graph.set_initializer(name, change)


def added_in_first_part(graph: Graph) -> None:
    for node in graph.all("Sub", "rotary"):
        node.op_type = "Add"


def sines_for_cosines(graph: Graph) -> None:
    cosine, sine = graph.one("Mul", "Mul_2").output[0], graph.one("Mul", "Mul_3").output[0]
    other = {cosine: sine, sine: cosine}
    for node in graph.all("Mul", "rotary"):
        node.input[1] = other[node.input[1]]


FAULTS = (
    Planted("scale_of_wider_head", "gqa", scale_of_width(lambda D: (D + 1) ** -0.5), ("scale",),
            "head_dim + 1"),
    Planted("scale_missing", "gqa", scale_of_width(lambda _: 1.0), ("scale",), "missing"),
    Planted("scale_twice", "gqa", scale_of_width(lambda D: 1 / D), ("scale",), "twice"),
    Planted("scale_3_percent_less", "gqa", scale_times(0.97), ("scale",), "0.97 times"),
    Planted("scale_in_the_rich_layer", "rich", scale_times(1.5), ("scale",), "1.5 times"),
    Planted("causal_dropped", "gqa", not_causal, ("causal dropped",)),
    Planted("causal_one_ahead", "rich", causal_one_ahead, ("causal offset",), "late"),
    Planted("causal_without_past", "rich", causal_without_past, ("causal offset",), "no past"),
    Planted("mask_inverted", "gqa", mask_inverted, ("mask inverted",), "attn_mask"),
    Planted("mask_dropped", "gqa", mask_ignored, ("mask dropped",), "attn_mask"),
    Planted("mask_of_first_row", "gqa", mask_of_first_row, ("mask of one batch row",)),
    Planted("no_q_bias", "gqa", bias_left_out("q_proj"), ("missing bias",), "q_proj.bias"),
    Planted("no_k_bias", "gqa", bias_left_out("k_proj"), ("missing bias",), "k_proj.bias"),
    Planted("no_v_bias", "gqa", bias_left_out("v_proj"), ("missing bias",), "v_proj.bias"),
    Planted("no_output_bias", "gqa", bias_left_out("out_proj"), ("missing bias",), "out_proj.bias"),
    Planted("bias_of_last_head", "gqa", bias_of_last_head, ("changed node",), "v_proj.bias"),
    Planted("weight_transposed", "gqa", weight_transposed, ("changed node",), "q_proj.weight"),
    Planted("heads_swapped", "gqa", heads_swapped, ("changed node",), "has heads 1 and 3 swapped"),
    Planted("heads_not_moved", "gqa", heads_not_moved, ("heads not moved",)),
    Planted("heads_tiled", "plain", heads_tiled, ("tiled heads",)),
    Planted("keys_for_values", "plain", keys_for_values, ("keys and values swapped",)),
    Planted("past_is_zero", "gqa", past_is_zero, ("past dropped",), "past_key"),
    Planted("positions_one_late", "rich", positions_one_late, ("position offset",), "too high"),
    Planted("positions_from_zero", "rich", positions_from_zero, ("position offset",), "start at 0"),
    Planted("rotated_backwards", "rich", rotated_backwards, ("rotation reversed",)),
    Planted("sine_added", "rich", added_in_first_part, ("rotation sign",)),
    Planted("sines_for_cosines", "rich", sines_for_cosines, ("rotation swapped",)),
    Planted("another_rotary_base", "rich", frequencies_of_another_base, ("rotary frequencies",),
            "500000"),
    Planted("window_one_wider", "rich", window_one_wider, ("window offset",)),
    Planted("sinks_are_zero", "rich", sinks_are_zero, ("wrong sinks",)),
    Planted("norm_left_out", "rich", norm_left_out, ("norm left out",), "q_norm"),
    Planted("softcap_20_percent_more", "rich", softcap_times(1.2), ("softcap",), "1.2 times"),
    Planted("no_softcap", "rich", softcap_times(0.0), ("softcap",), "no softcap"),
    Planted("hidden_scores_minus_10", "gqa", hidden_score(-10.0), ("weak mask",), "-10",
            "portable"),
    Planted("masked_rows_are_means", "gqa", hidden_score(-1e30), ("fully masked rows",), "",
            "portable"),
    Planted("alibi_of_the_other_sign", "alibi", alibi_not_negated, ("bias sign",)),
    Planted("softmax_over_queries", "gqa", softmax_over_queries, ("softmax over queries",), "",
            "portable"),
    Planted("softmax_in_float16", "gqa", softmax_in(TensorProto.FLOAT16),
            ("softmax in low precision",), "float16", "portable", "onnx-reference"),
)  # fmt: skip
