"""Faults in how a cache in float16 is written and read."""

from __future__ import annotations

import onnx
from graph_surgery import Graph
from mutants.planting import Make, Planter, behind, feed
from onnx import TensorProto
from planted_faults import Edit, Faults


def casts(graph: Graph, to: int) -> list[onnx.NodeProto]:
    """Return the casts of keys and of values: to float16, before they are written, or back."""
    found = [node for node in graph.all("Cast") if node.attribute[0].i == to]
    if to == TensorProto.FLOAT:
        found = [node for node in found if node.input[0].startswith("present_")]
    assert len(found) == 2
    return found


def before_rounding(make: Make, part: int) -> Edit:
    return lambda graph: feed(graph, casts(graph, TensorProto.FLOAT16)[part], 0, make)


def where_it_is_read(make: Make, part: int) -> Edit:
    return lambda graph: behind(graph, casts(graph, TensorProto.FLOAT)[part].output[0], make)


def unrounded(_: Make, part: int) -> Edit:
    """Let the attention read new rows that were not rounded: the cache alone is in float16."""

    def edit(graph: Graph) -> None:
        cast = casts(graph, TensorProto.FLOAT16)[part]
        (scatter,) = (n for n in graph.all("TensorScatter") if n.input[1] == cast.output[0])

        def whole(p: Planter, _: str) -> str:
            past = p("Cast", scatter.input[0], to=TensorProto.FLOAT)
            return p("TensorScatter", past, cast.input[0], scatter.input[2], axis=-2)

        behind(graph, casts(graph, TensorProto.FLOAT)[part].output[0], whole)

    return edit


def exchanged(graph: Graph) -> None:
    """Write values as keys, and keys as values."""
    first, second = casts(graph, TensorProto.FLOAT16)
    first.input[0], second.input[0] = second.input[0], first.input[0]


def times(factor: float) -> Make:
    return lambda p, x: p("Mul", x, factor)


def to_bfloat16(p: Planter, x: str) -> str:
    return p("Cast", p("Cast", x, to=TensorProto.BFLOAT16), to=TensorProto.FLOAT)


ROUNDING = "cache rounding"
OF_FLOAT16: Faults = {
    f"{name}, {part}": (cause, plant(make, number))
    for number, part in enumerate(("keys", "values"))
    for name, cause, plant, make in (
        ("new rows read before they are rounded", ROUNDING, unrounded, times(1)),
        # half a unit in the last place less, or nearly
        ("rounded towards 0", None, before_rounding, times(1 - 2.0**-12)),
        ("rounded away from 0", None, before_rounding, times(1 + 2.0**-12)),
        ("rounded to bfloat16 first", ROUNDING, before_rounding, to_bfloat16),
        ("clipped at 1", None, before_rounding, lambda p, x: p("Min", x, 1.0)),
        ("scaled by a step as it is written", None, before_rounding, times(1 + 2.0**-10)),
        ("scaled by a step as it is read", None, where_it_is_read, times(1 + 2.0**-10)),
        ("moved by a step of 1", None, before_rounding, lambda p, x: p("Add", x, 2.0**-10)),
    )
} | {"keys and values exchanged": ("keys and values exchanged", exchanged)}
