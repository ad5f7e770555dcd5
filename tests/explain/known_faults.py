"""Faults for kinds of known mistakes, planted in graphs and named without a runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from graph_faults import Planted
from graph_surgery import Graph

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
)
"""A spec of `SPECS`, the kind of the first cause, and the edit of its standard graph."""

KNOWN_FAULTS = (
    *(Planted(kind, spec, edit, (kind,)) for spec, kind, edit in ROWS),
    Planted("softmax base", "plain", powers_of_two, ("softmax base",), dialect="portable"),
)
