"""Faults in how a cache of integers is written and read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from graph_surgery import Graph
from mutants.planting import Make, Planter, behind, feed
from planted_faults import Array, Edit, Faults, both, digits, neighbours

Change = Callable[[Array], Array]
BOTH, WRITTEN, READ = ("kw", "kr", "vw", "vr"), ("kw", "vw"), ("kr", "vr")
SCALES = "kv_scales.k_scale", "kv_scales.v_scale"


def writers(graph: Graph, operator: str) -> list[onnx.NodeProto]:
    """Return the nodes of a type that round and pack, of keys and of values."""
    return [node for node in graph.all(operator) if node.output[0].startswith("kv_scales/")]


def initializers(graph: Graph) -> set[str]:
    return {tensor.name for tensor in graph.proto.initializer}


def other_constant(graph: Graph, node: onnx.NodeProto, number: float) -> None:
    """Give a node another number, of the same type."""
    dtype = graph.initializer(node.input[1]).dtype
    node.input[1] = graph.constant(np.array(number, dtype))


def scaled(change: Change, *parts: str) -> Edit:
    """Return the fault that scales are others, of the keys or values, written or read."""

    def edit(graph: Graph) -> None:
        for part in parts:
            name = f"kv_scales.{part[0]}_scale"
            other = graph.constant(change(graph.initializer(name)).astype(np.float32))
            wanted = ("QuantizeLinear", "Div") if part[1] == "w" else ("DequantizeLinear", "Mul")
            for node in graph.nodes:
                if node.op_type in wanted:
                    node.input[:] = [other if given == name else given for given in node.input]

    return edit


def scales_exchanged(graph: Graph) -> None:
    """Write and read keys with the scale of values, and the other way round."""
    other = dict(zip(SCALES, reversed(SCALES), strict=True))
    for node in graph.nodes:
        node.input[:] = [other.get(name, name) for name in node.input]


def zero_point(value: int, *operators: str) -> Edit:
    def edit(graph: Graph) -> None:
        for node in (node for operator in operators for node in graph.all(operator)):
            node.input[2] = graph.constant(np.array(value, np.int8))

    return edit


def requantised(scale: float) -> Edit:
    """Return the fault that the whole cache is quantised anew with another scale."""

    def again(p: Planter, x: str) -> str:
        for by in (scale, 1.0):
            read = p("DequantizeLinear", x, 1.0 if by == scale else scale, np.int8(0))
            x = p("QuantizeLinear", read, by, np.int8(0))
        return x

    def edit(graph: Graph) -> None:
        for node in graph.all("TensorScatter"):
            behind(graph, node.output[0], again)

    return edit


def rounded_by(make: Make) -> Edit:
    """Return the fault that quotients are changed before they are rounded."""

    def edit(graph: Graph) -> None:
        for node in graph.all("QuantizeLinear"):
            scale = node.input[1]
            feed(graph, node, 0, lambda p, x: p("Mul", make(p, p("Div", x, scale)), scale))  # noqa: B023

    return edit


def read_before_rounding(graph: Graph) -> None:
    """Let attention read new keys and values as they were, not their integers."""
    attention = graph.one("Attention")
    for write, read in zip(graph.all("QuantizeLinear"), graph.all("DequantizeLinear"), strict=True):
        scatter = next(n for n in graph.all("TensorScatter") if n.output[0] == read.input[0])
        product = next(n for n in graph.all("Mul") if n.input[0] == read.output[0])
        p = Planter(graph, graph.nodes.index(attention), np.dtype(np.float32))
        past = p("DequantizeLinear", scatter.input[0], *read.input[1:])
        past = p("Mul", past, product.input[1])
        whole = p("TensorScatter", past, write.input[0], scatter.input[2], axis=-2)
        attention.input[list(attention.input).index(product.output[0])] = whole


def new_ones_exchanged(graph: Graph) -> None:
    """Swap neighbouring channels as they are written, as 4 bits of a byte may be."""
    order = neighbours(np.arange(8))
    for scatter in graph.all("TensorScatter"):
        feed(graph, scatter, 1, lambda p, x: p("Gather", x, order, axis=-1))


def halved(x: Array) -> Array:
    return x / 2


def shrunk(x: Array) -> Array:
    return x * 0.97


def of_type(kind: str) -> Make:
    return lambda p, x: p(kind, x)


OF_SCALES: Faults = {
    "scale halved": ("cache scale", scaled(halved, *BOTH)),
    "scale halved where it is read": ("cache scale", scaled(halved, *READ)),
    "scale halved where it is written": ("cache scale", scaled(halved, *WRITTEN)),
    "scale of keys halved": ("cache scale", scaled(halved, "kw", "kr")),
    "scale of values doubled where it is read": ("cache scale", scaled(lambda s: s * 2, "vr")),
    "scale by 128, not 127": ("cache scale", scaled(lambda s: s * 127 / 128, *BOTH)),
    "scale rounded to 8 digits": ("cache scale", scaled(digits(8), *READ)),
    "stale scales": ("cache scale", scaled(shrunk, *BOTH)),
    "stale scales where they are read": ("cache scale", scaled(shrunk, *READ)),
    "scales of keys and values exchanged": ("cache scale", scales_exchanged),
}
ANY: Faults = OF_SCALES | {
    "zero point of 1": ("zero point", zero_point(1, "QuantizeLinear", "DequantizeLinear")),
    "zero point of 1 where it is written": ("zero point", zero_point(1, "QuantizeLinear")),
    "zero point of -1 where it is read": ("zero point", zero_point(-1, "DequantizeLinear")),
    "zero point of -128": ("zero point", zero_point(-128, "QuantizeLinear", "DequantizeLinear")),
    "quantised twice": ("", requantised(1.03)),
    "quantised twice, to few bits": ("quantised twice", requantised(9.0)),
    "rounded down": ("rounding", rounded_by(of_type("Floor"))),
    "rounded up": ("rounding", rounded_by(of_type("Ceil"))),
    "rounded from 0.1 on, not 0.5": ("", rounded_by(lambda p, x: p("Add", x, 0.4))),
    "clipped at -127": ("clipped range", rounded_by(lambda p, x: p("Max", x, -127.0))),
    "clipped at 126": ("clipped range", rounded_by(lambda p, x: p("Min", x, 126.0))),
    "clipped at -8 and 7": ("clipped range", rounded_by(lambda p, x: p("Clip", x, -8.0, 7.0))),
    "neighbouring channels swapped": ("nibble order", new_ones_exchanged),
}
OF_TENSORS: Faults = {"new tokens read before they are rounded": ("rounding", read_before_rounding)}
OF_CHANNELS: Faults = {
    "scale of the wrong axis": ("scale axis", scaled(lambda s: s.transpose(2, 1, 0), *BOTH)),
    "scale of the wrong axis where it is read": (
        "scale axis", scaled(lambda s: s.transpose(2, 1, 0), *READ)),
    "scale of the next channel": ("scale axis", scaled(lambda s: np.roll(s, 1, -1), *BOTH)),
    "scale of the next head": ("scale axis", scaled(lambda s: np.roll(s, 1, 0), *BOTH)),
    "scale of the first head for all": ("scale axis", scaled(lambda s: s * 0 + s[:1], *BOTH)),
    "scale of the largest channel for all": (
        "scale axis", scaled(lambda s: s * 0 + s.max(), *BOTH)),
    "one scale of 64 stale": ("", scaled(
        lambda s: s * np.where(np.arange(s.size).reshape(s.shape) == 9, 1.02, 1), *READ)),
}  # fmt: skip


# -- two integers in a byte ---------------------------------------------------------------------


def packed_with(operator: str, number: float) -> Edit:
    """Return the fault that the constant of the nodes that round and pack is another one."""

    def edit(graph: Graph) -> None:
        held = initializers(graph)
        for node in writers(graph, operator):
            if node.input[1] in held:
                other_constant(graph, node, number)

    return edit


def held_as(name: str, change: Change) -> Edit:
    """Return the fault that a constant of the graph is another."""
    return lambda graph: graph.set_initializer(name, lambda x: change(x).astype(x.dtype))


def read_as(change: Change) -> Edit:
    """Return the fault that bytes stand for other numbers, `[256, 2]`."""
    return held_as("kv_scales.nibbles", change)


def rounded_as(operator: str) -> Edit:
    def edit(graph: Graph) -> None:
        for node in graph.all("Round"):
            node.op_type = operator

    return edit


def sign_lost(graph: Graph) -> None:
    for node in graph.all("Round"):
        feed(graph, node, 0, of_type("Abs"))


def packed_from(*halves: tuple[int, int, int]) -> Edit:
    """Return the fault that the halves are other channels: start, end and step of each slice."""

    def edit(graph: Graph) -> None:
        for number, node in enumerate(writers(graph, "Slice")):
            start, end, step = (graph.constant(np.array([n])) for n in halves[number % 2])
            node.input[1], node.input[2], node.input[4] = start, end, step

    return edit


def read_in_order(*perm: int) -> Edit:
    """Return the fault that halves, `[B, Hkv, S, D / 2, 2]`, are joined in another order."""

    def edit(graph: Graph) -> None:
        gathered = [node.output[0] for node in graph.all("Gather")]
        for node in [n for n in graph.all("Reshape") if n.input[0] in gathered]:
            shape = graph.initializer(node.input[1]).copy()
            shape[2] = -1
            node.input[1] = graph.constant(shape)
            feed(graph, node, 0, lambda p, x: p("Transpose", x, perm=perm))

    return edit


ALL = 2**31
SWAPPED = packed_from((1, ALL, 2), (0, ALL, 2))
OF_HALVES: Faults = {
    "halves swapped": ("nibble order", both(SWAPPED, read_as(lambda n: n[:, ::-1]))),
    "halves swapped where they are written": ("nibble order", SWAPPED),
    "halves swapped where they are read": ("nibble order", read_as(lambda n: n[:, ::-1])),
    "the first channel twice": ("cache layout", packed_from((0, ALL, 2), (0, ALL, 2))),
    "rounded down": ("rounding", rounded_as("Floor")),
    "rounded up": ("rounding", rounded_as("Ceil")),
}
OF_BYTES: Faults = OF_SCALES | OF_HALVES | {
    "zero of 7": ("zero point", both(packed_with("Add", 7), read_as(lambda n: n + 1))),
    "zero of 7 where it is written": ("zero point", packed_with("Add", 7)),
    "zero of 7 where it is read": ("zero point", read_as(lambda n: n + 1)),
    "zero of 9": ("zero point", both(packed_with("Add", 9), read_as(lambda n: n - 1))),
    "zero of 9 where it is written": ("zero point", packed_with("Add", 9)),
    "zero of 9 where it is read": ("zero point", read_as(lambda n: n - 1)),
    "scale of int8": ("cache scale", scaled(lambda s: s * 7 / 127, *BOTH)),
    "scale of int8 where it is read": ("cache scale", scaled(lambda s: s * 7 / 127, *READ)),
    "scale by 8, not 7": ("cache scale", scaled(lambda s: s * 7 / 8, *BOTH)),
    "sign lost": ("signedness", sign_lost),
    "sign lost where it is read": ("signedness", read_as(np.abs)),
    "read as two's complement": (
        "signedness", read_as(lambda n: np.where(n < 0, n + 8, n - 8))),
    "lower halves of all keys first": ("cache layout", read_in_order(0, 1, 4, 2, 3)),
    "read by channel, then by key": ("cache layout", read_in_order(0, 1, 3, 2, 4)),
    "lower halves of a key first": ("cache layout", read_in_order(0, 1, 2, 4, 3)),
    "halves of the row in a byte": ("cache layout", packed_from((0, 4, 1), (4, 8, 1))),
    "moved by 3 bits": ("cache layout", packed_with("Mul", 8)),
    "clipped at -7": ("clipped range", packed_with("Max", -7)),
    "clipped at 6": ("clipped range", packed_with("Min", 6)),
    "not clipped at -8": ("clipped range", packed_with("Max", -16)),
    "not clipped at 7": ("clipped range", packed_with("Min", 15)),
}  # fmt: skip
