"""Faults in how a cache with scales by block is written and read, as changes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from cache_faults import SWAPPED, Fault, Graph, both, packed_from, read_as, rounded_as
from onnx import helper

BLOCKS = 2
STEPS = "kv_scales.steps"
Table = Callable[[np.ndarray], np.ndarray]


def writers(graph: Graph, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in graph.linear(op_type) if node.output[0].startswith("kv_scales/")]


def readers(graph: Graph, op_type: str) -> list[onnx.NodeProto]:
    """Return the nodes of a type that read, of keys and of values."""
    return [node for node in graph.linear(op_type) if not node.output[0].startswith("kv_scales/")]


def of_scales(graph: Graph) -> list[onnx.NodeProto]:
    """Return the nodes that look scales up as they are read."""
    return [node for node in readers(graph, "Gather") if node.input[0] == STEPS]


def of_zeros(graph: Graph) -> list[onnx.NodeProto]:
    """Return the nodes that subtract from zero points as they are read."""
    held = {t.name for t in graph.proto.graph.initializer}
    added = [node for node in readers(graph, "Add") if node.input[1] in held]
    return [node for node in added if np.array_equal(graph.held(node.input[1]), -128)]


def before(graph: Graph, node: onnx.NodeProto, index: int, op_type: str, *more: np.ndarray) -> None:
    """Put an operator before an input of a node."""
    x = node.input[index]
    constants = [graph.constant(np.asarray(array)) for array in more]
    name = f"{x}_{op_type}_{len(graph.nodes)}"
    graph.insert(node, helper.make_node(op_type, [x, *constants], [name]))
    node.input[index] = name


def stored(place: int, by: int) -> Fault:
    """Return the fault that bytes are too large as they are stored: 1 scales, 2 zero points."""

    def fault(graph: Graph) -> None:
        for node in writers(graph, "Concat"):
            before(graph, node, place, "Add", np.array(by, np.int32))

    return fault


def scale_read(by: int) -> Fault:
    def fault(graph: Graph) -> None:
        for node in of_scales(graph):
            before(graph, node, 1, "Add", np.array(by, np.int32))
            before(graph, node, 1, "Max", np.array(0, np.int32))
            before(graph, node, 1, "Min", np.array(255, np.int32))

    return fault


def scales_rounded_down(graph: Graph) -> None:
    """Let bytes of scales stand for octaves alone as they are read."""
    for node in of_scales(graph):
        before(graph, node, 1, "Div", np.array(8, np.int32))
        before(graph, node, 1, "Mul", np.array(8, np.int32))


def zero_read(op_type: str, value: float) -> Fault:
    def fault(graph: Graph) -> None:
        for node in of_zeros(graph):
            after(graph, node, op_type, np.array(value, np.float32))

    return fault


def after(graph: Graph, node: onnx.NodeProto, op_type: str, constant: np.ndarray) -> None:
    """Put an operator behind a node."""
    name = node.output[0]
    node.output[0] = f"{name}_before"
    reader = next(n for n in graph.nodes if name in n.input)
    graph.insert(
        reader, helper.make_node(op_type, [node.output[0], graph.constant(constant)], [name])
    )


def zero_in_the_middle(graph: Graph) -> None:
    for node in of_zeros(graph):
        before(graph, node, 0, "Mul", np.array(0, np.float32))
        node.input[1] = graph.constant(np.array(-8, np.float32))


def taken(nodes: Callable[[Graph], Sequence[onnx.NodeProto]], place: int, axis: int) -> Fault:
    """Return the fault that what a node is given is that of the other block or head."""

    def fault(graph: Graph) -> None:
        for node in nodes(graph):
            x = node.input[place]
            name, order = f"{x}_other", graph.constant(np.array([1, 0]))
            graph.insert(node, helper.make_node("Gather", [x, order], [name], axis=axis))
            node.input[place] = name

    return fault


def stale(*parts: int) -> Fault:
    """Return the fault that bytes are read from the cache as it came in: 1 scales, 2 zeros."""

    def fault(graph: Graph) -> None:
        for split, scatter in zip(
            readers(graph, "Split"), graph.linear("TensorScatter"), strict=True
        ):
            outputs = [f"{name}_stale" for name in split.output]
            graph.insert(
                split,
                helper.make_node("Split", [scatter.input[0], split.input[1]], outputs, axis=-1),
            )
            for node in graph.nodes:
                for part in parts:
                    if node.op_type == "Cast" and node.input[0] == split.output[part]:
                        node.input[0] = outputs[part]

    return fault


def exchanged(graph: Graph) -> None:
    for split in readers(graph, "Split"):
        split.output[1], split.output[2] = split.output[2], split.output[1]


def table(change: Table, *, written: bool = True, read: bool = True) -> Fault:
    """Return the fault that bytes stand for other scales."""

    def fault(graph: Graph) -> None:
        other = graph.constant(change(graph.held(STEPS)).astype(np.float32))
        chosen = [*of_scales(graph)] if read else []
        for node in [*chosen, *(writers(graph, "Gather") if written else [])]:
            if node.input[0] == STEPS:
                node.input[0] = other

    return fault


def edges(change: Table) -> Fault:
    def fault(graph: Graph) -> None:
        for name in ("kv_scales.octaves", "kv_scales.eighths"):
            other = graph.constant(change(graph.held(name)).astype(np.float32))
            for node in graph.nodes:
                for index, given in enumerate(node.input):
                    if given == name:
                        node.input[index] = other

    return fault


def limit(old: int, new: int) -> Fault:
    """Return the fault that integers are clipped elsewhere."""

    def fault(graph: Graph) -> None:
        held = {t.name for t in graph.proto.graph.initializer}
        for node in writers(graph, "Min"):
            if node.input[1] in held and graph.held(node.input[1]) == old:
                node.input[1] = graph.constant(np.array(new, np.int32))

    return fault


def in_order(order: Callable[[int], np.ndarray], *, written: bool, read: bool) -> Fault:
    """Return the fault that blocks have other channels, in the order that a function gives."""

    def fault(graph: Graph) -> None:
        of_blocks = [
            n for n in writers(graph, "Reshape")
            if graph.held(n.input[1]).size == 5
        ]  # fmt: skip
        width = int(np.prod(graph.held(of_blocks[0].input[1])[-2:]))
        perm = order(width)
        for node in of_blocks if written else []:
            x = node.input[0]
            name = f"{x}_ordered"
            given = [x, graph.constant(perm)]
            graph.insert(node, helper.make_node("Gather", given, [name], axis=-1))
            node.input[0] = name
        (attention,) = graph.linear("Attention")
        for index in (1, 2) if read else ():
            x = attention.input[index]
            given = [x, graph.constant(np.argsort(perm))]
            graph.insert(attention, helper.make_node("Gather", given, [f"{x}_back"], axis=-1))
            attention.input[index] = f"{x}_back"

    return fault


def shifted(by: int) -> Callable[[int], np.ndarray]:
    return lambda width: np.roll(np.arange(width), -by)


def strided(width: int) -> np.ndarray:
    return np.arange(width).reshape(-1, BLOCKS).T.ravel()


def unmixed(place: int) -> Fault:
    """Return the fault that queries (0) or keys (1) are not multiplied by the matrix."""

    def fault(graph: Graph) -> None:
        node = [n for n in graph.linear("MatMul") if n.input[1] == "kv_scales.hadamard"][place]
        for other in graph.nodes:
            for index, given in enumerate(other.input):
                if given == node.output[0]:
                    other.input[index] = node.input[0]

    return fault


def matrix(change: Table, *places: int) -> Fault:
    def fault(graph: Graph) -> None:
        other = graph.constant(change(graph.held("kv_scales.hadamard")).astype(np.float32))
        nodes = [n for n in graph.linear("MatMul") if n.input[1] == "kv_scales.hadamard"]
        for place in places:
            nodes[place].input[1] = other

    return fault


def linear(steps: np.ndarray) -> np.ndarray:
    octaves, eighths = np.divmod(np.arange(steps.size), 8)
    return (steps.ravel()[0] * 2.0**octaves * (1 + eighths / 8)).reshape(steps.shape)


def bfloat16(x: np.ndarray) -> np.ndarray:
    return np.ldexp(np.rint(np.frexp(x)[0] * 256) / 256, np.frexp(x)[1])


OF_BLOCKS: dict[str, Fault] = {
    "scale byte 1 too large": stored(1, 1),
    "scale byte 1 too small": stored(1, -1),
    "scale byte 1 too large where it is read": scale_read(1),
    "scale byte 1 too small where it is read": scale_read(-1),
    "scale an octave too large where it is read": scale_read(8),
    "scale of octaves alone where it is read": scales_rounded_down,
    "block scale of the other block where it is read": taken(of_scales, 1, -1),
    "block scale of the other block": taken(lambda g: writers(g, "Concat"), 1, -1),
    "block scale of the other head where it is read": taken(of_scales, 1, 1),
    "block zero point of the other block where it is read": taken(of_zeros, 0, -2),
    "block zero point of the other block": taken(lambda g: writers(g, "Concat"), 2, -1),
    "stale scales when the cache grows": stale(1),
    "stale scales and zero points when the cache grows": stale(1, 2),
    "zero point 1 too large": stored(2, 1),
    "zero point 1 too small": stored(2, -1),
    "zero point 1 too large where it is read": zero_read("Add", 1),
    "zero point 1 too small where it is read": zero_read("Add", -1),
    "zero point left out": zero_read("Mul", 0),
    "zero point in the middle": zero_in_the_middle,
    "zero point of the other sign": zero_read("Mul", -1),
    "bytes of scales and zero points exchanged": exchanged,
    "halves swapped": both(SWAPPED, read_as(lambda n: n[:, ::-1])),
    "halves swapped where they are written": SWAPPED,
    "halves swapped where they are read": read_as(lambda n: n[:, ::-1]),
    "bounds 2 channels late": in_order(shifted(2), written=True, read=True),
    "bounds 16 channels early": in_order(shifted(-16), written=True, read=True),
    "bounds 1 channel late where they are written": in_order(shifted(1), written=True, read=False),
    "bounds of every second channel": in_order(strided, written=True, read=True),
    "scale table halved where it is read": table(lambda s: s / 2, written=False),
    "scale table squared": table(np.square),
    "scale table linear within octaves": table(linear),
    "scale table linear where it is read": table(linear, written=False),
    "scale table rounded to 8 digits where it is read": table(bfloat16, written=False),
    "scale table reversed": table(lambda s: s[::-1]),
    "scale edges 1 step too large": edges(lambda e: e * 2 ** (1 / 8)),
    "scale edges an octave too small": edges(lambda e: e / 2),
    "rounded down": rounded_as("Floor"),
    "rounded up": rounded_as("Ceil"),
    "clipped at 14": limit(15, 14),
    "clipped beyond a byte": limit(15, 2**30),
    "the first channel twice": packed_from((0, 2**31, 2), (0, 2**31, 2)),
    "mixing of queries left out": unmixed(0),
    "mixing of keys left out": unmixed(1),
    "mixing of queries not scaled": matrix(lambda m: m / np.abs(m).max(), 0),
    "mixing in another order": matrix(lambda m: m[:, ::-1], 1),
}
