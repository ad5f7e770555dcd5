"""Faults for kinds of known faults, planted in graphs and named without a runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from graph_faults import Planted
from graph_surgery import Graph
from mutants.in_inputs import of_one, shifted
from mutants.planting import Make, Planter, input_value, plant

Edit = Callable[[Graph], None]


def of_heads(order: Sequence[int], *, queries: bool = False) -> Edit:
    """Give the results of heads in another order, and read those of queries in it."""

    def edit(graph: Graph) -> None:
        heads, node = graph.constant(np.array(order), "planted_heads"), graph.one("Attention")
        if queries:
            graph.before(node, 0, "Gather", heads, axis=1)
        graph.after(node, "Gather", heads, axis=1)

    return edit


def first_kv_head(graph: Graph) -> None:
    heads = graph.constant(np.array([0, 0]), "planted_heads")
    for operand in (1, 2):
        graph.before(graph.one("Attention"), operand, "Gather", heads, axis=1)


def attribute(operator: str, name: str, value: object, which: str = "") -> Edit:
    return lambda graph: graph.set_attribute(graph.one(operator, which), name, value)


def initializer(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    return lambda graph: graph.set_initializer(name, change)


def mask_of_first_query(graph: Graph) -> None:
    first = graph.constant(np.array([0]), "planted_first")
    graph.before(graph.one("Attention"), 3, "Gather", first, axis=2)


def mask_times_scale(graph: Graph) -> None:
    node = graph.one("Attention")
    scale = graph.constant(np.float32(graph.attribute(node, "scale")), "planted_scale")
    graph.before(node, 3, "Mul", scale)


def only_infinities_of_mask(graph: Graph) -> None:
    node = graph.one("Attention")
    graph.before(node, 3, "Greater", graph.constant(np.float32(-1e29), "planted_least"))
    hidden = graph.constant(np.float32(-np.inf), "planted_infinity")
    graph.before(node, 3, "Where", graph.constant(np.float32(0), "planted_zero"), hidden)


def other_pairs(graph: Graph) -> None:
    """Rotate elements 2i and 2i + 1."""
    end = graph.constant(np.array([2**62]), "planted_end")
    start = [graph.constant(np.array([n]), f"planted_{n}") for n in (0, 1, 2)]
    for number, node in enumerate(graph.all("Slice", "rotary")):
        node.input[1:3] = [start[number % 2], end]
        node.input[4] = start[2]


def added_in_first_part(graph: Graph) -> None:
    for node in graph.all("Sub", "rotary"):
        node.op_type = "Add"


def sines_for_cosines(graph: Graph) -> None:
    cosine, sine = graph.one("Mul", "Mul_2").output[0], graph.one("Mul", "Mul_3").output[0]
    other = {cosine: sine, sine: cosine}
    for node in graph.all("Mul", "rotary"):
        node.input[1] = other[node.input[1]]


def without_window(graph: Graph) -> None:
    node = graph.one("GreaterOrEqual")
    node.input[1] = graph.constant(np.array(-(10**6)), "planted_edge")


def powers_of_two(graph: Graph) -> None:
    factor = graph.constant(np.float32(np.log(2)), "planted_log")
    graph.before(graph.one("Softmax"), 0, "Mul", factor)


# -- what nodes see ------------------------------------------------------------------------------

Seen = Callable[[Planter, str, str, str], str]
"""Returns which keys `[S]` each query `[L, 1]` sees, given these and the length of the past."""


def given(name: str, make: Make) -> Edit:
    """Give the graph another value of an input."""

    def edit(graph: Graph) -> None:
        value = input_value(graph.model, name)
        assert value is not None
        plant(graph.model, value, make)

    return edit


def rolled(by: int) -> Make:
    """Move the keys of a cache, which may be empty."""
    ends = (np.array([0]), np.array([by]), np.array([2**62]))

    def make(p: Planter, x: str) -> str:
        axis = np.array([2])
        return p("Concat", p("Slice", x, *ends[1:], axis), p("Slice", x, *ends[:2], axis), axis=2)

    return make


def positions(graph: Graph) -> tuple[Planter, str, str, str]:
    """Return what plants before the attention; keys, queries, and the length of the past."""
    p = Planter(graph, graph.nodes.index(graph.one("Attention")), np.dtype(np.float32))
    past, one = p.number("past_key", 2), np.int64(1)
    total = p("Add", past, p.number("query", 1))
    queries = p("Unsqueeze", p("Range", past, total, one), np.array([1]))
    return p, p("Range", np.int64(0), total, one), queries, past


def seen(keys: Seen, join: str = "And", *, causal: bool = True) -> Edit:
    """Join the mask with keys that are computed; leave the node's causal rule out if wanted."""

    def edit(graph: Graph) -> None:
        node = graph.one("Attention")
        node.input[3] = "both"
        if not causal:
            graph.set_attribute(node, "is_causal", 0)
        p, *at = positions(graph)
        p(join, "Expand.out", keys(p, *at), output="both")

    return edit


def new_before_past(graph: Graph) -> None:
    """Put new keys and values before those of the past; queries see as many as before."""
    node = graph.one("Attention")
    new, past, outputs = node.input[1:3], node.input[4:6], node.output[1:3]
    seen(lambda p, j, i, _: p("LessOrEqual", j, i), causal=False)(graph)
    p = Planter(graph, graph.nodes.index(node), np.dtype(np.float32))
    for tensors in zip(new, past, outputs, strict=True):
        p("Concat", *tensors[:2], output=tensors[2], axis=2)
    node.input[1:] = [*outputs, "both"]
    del node.output[1:]


def without_bias_of_scores(graph: Graph) -> None:
    graph.before(graph.one("Attention"), 3, "Mul", graph.constant(np.float32(0), "planted_zero"))


def causal_by_the_first_row(graph: Graph) -> None:
    """Compute the causal mask with the length of the first row of the batch."""
    node = graph.one("Attention")
    graph.set_attribute(node, "is_causal", 0)
    p = Planter(graph, graph.nodes.index(node), np.dtype(np.float32))
    first = p("Gather", "past_length", np.array([0]))
    last = p("Unsqueeze", p("Add", p.counted("query", 1), first), np.array([1]))
    p("LessOrEqual", p.counted("present_key", 2), last, output="planted_causal")
    node.input[3] = "planted_causal"


def rotated_by_the_first_row(graph: Graph) -> None:
    graph.before(
        graph.one("Cast"), 0, "Gather", graph.constant(np.array([0]), "planted_row"), axis=0
    )


def rotated_in_reverse(graph: Graph) -> None:
    ends = [graph.constant(np.array([n]), f"planted_{n}") for n in (-1, -(2**62), 0)]
    graph.before(graph.one("Cast"), 0, "Slice", *ends, ends[0])


def nothing_written(graph: Graph) -> None:
    for node in graph.all("TensorScatter"):
        node.op_type, node.input[:] = "Identity", node.input[:1]
        del node.attribute[:]


def sum_left_out(graph: Graph) -> None:
    node = graph.one("Softmax")
    p = Planter(graph, graph.nodes.index(node), np.dtype(np.float32))
    largest = p("ReduceMax", node.input[0], np.array([-1]))
    node.op_type, node.input[0] = "Exp", p("Sub", node.input[0], largest)
    del node.attribute[:]


def one_more_in_the_sum(graph: Graph) -> None:
    """Let the softmax see one more score of 0."""
    node = graph.one("Softmax")
    ends = [graph.constant(np.array([n]), f"planted_{n}") for n in (0, -1)]
    graph.before(node, 0, "Pad", graph.constant(np.array([0, 1]), "planted_pads"), "", ends[1])
    graph.after(node, "Slice", *ends, ends[1])


ROWS: Sequence[tuple[str, str, Edit]] = (
    ("gqa", "K/V heads reversed", of_heads([2, 3, 0, 1], queries=True)),
    ("plain", "one K/V head for all", first_kv_head),
    ("gqa", "heads reversed", of_heads([3, 2, 1, 0])),
    ("gqa", "heads shifted", of_heads([1, 2, 3, 0])),
    ("gqa", "heads interleaved", attribute("Transpose", "perm", [0, 2, 3, 1], "Transpose_4")),
    ("gqa", "bias added twice", initializer("k_proj.bias", lambda bias: 2 * bias)),
    ("plain", "causal added", attribute("Attention", "is_causal", 1)),
    ("plain", "mask of one query", mask_of_first_query),
    ("plain", "mask scaled", mask_times_scale),
    ("plain", "mask values dropped", only_infinities_of_mask),
    ("rich", "missing sinks", initializer("sinks", lambda x: np.full_like(x, -np.inf))),
    ("rich", "norm without weight", initializer("q_norm.weight", np.ones_like)),
    ("rich", "rotary pairs", other_pairs),
    ("rich", "rotation sign", added_in_first_part),
    ("rich", "rotation swapped", sines_for_cosines),
    ("rich", "window dropped", without_window),
    ("gqa", "mask shifted", given("attn_mask", shifted(1))),
    (
        "plain",
        "mask lowest is hidden",
        given("attn_mask", lambda p, m: p("Where", p("Less", m, -1e29), -np.inf, m)),
    ),
    ("masked", "mask of one head", given("attn_mask", of_one(1, 0))),
    ("gqa", "past of one batch row", given("past_key", of_one(0, 0))),
    ("gqa", "past shifted", given("past_value", rolled(1))),
    (
        "in-place",
        "cache length",
        given("past_length", lambda p, n: p("Max", p("Sub", n, np.int64(1)), np.int64(0))),
    ),
    ("in-place", "cache not written", nothing_written),
    ("in-place", "length of one batch row", causal_by_the_first_row),
    ("in-place", "positions of one batch row", rotated_by_the_first_row),
    ("rotary", "positions reversed", rotated_in_reverse),
    ("alibi", "mask dropped beside causal", without_bias_of_scores),
    ("gqa", "past ignored", seen(lambda p, j, _, P: p("GreaterOrEqual", j, P))),
    ("gqa", "past after new keys", new_before_past),
    ("gqa", "own key alone", seen(lambda p, j, i, _: p("Equal", j, i), causal=False)),
    ("gqa", "causal reversed", seen(lambda p, j, i, _: p("GreaterOrEqual", j, i), causal=False)),
    ("gqa", "mask or causal", seen(lambda p, j, i, _: p("LessOrEqual", j, i), "Or", causal=False)),
    ("gqa", "mask of some keys", seen(lambda p, j, _, P: p("Less", j, P), "Or")),
    ("gqa", "first key dropped", seen(lambda p, j, *_: p("Greater", j, np.int64(0)))),
    ("gqa", "last key dropped", seen(lambda p, j, *_: p("Less", j, p("ReduceMax", j, keepdims=0)))),
)
"""A spec of `SPECS`, the kind of the first cause, and the edit of its standard graph."""

KNOWN_FAULTS = (
    *(Planted(kind, spec, edit, (kind,)) for spec, kind, edit in ROWS),
    *(Planted(kind, "plain", edit, (kind,), dialect="portable") for kind, edit in (
        ("softmax base", powers_of_two), ("softmax not normalised", sum_left_out),
        ("softmax plus one", one_more_in_the_sum))),
)  # fmt: skip
