"""Faults in how a cache with scales by block is written and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from cache_faults import OF_HALVES, Change, held_as, initializers, other_constant, writers
from graph_surgery import Graph
from mutants.planting import Make, Planter, behind, feed
from planted_faults import Array, Edit, Faults, both, digits

BLOCKS = 2
STEPS, HADAMARD = "kv_scales.steps", "kv_scales.hadamard"
Nodes = Callable[[Graph], Sequence[onnx.NodeProto]]


def readers(graph: Graph, operator: str) -> list[onnx.NodeProto]:
    """Return the nodes of a type that read, of keys and of values."""
    return [node for node in graph.all(operator) if not node.output[0].startswith("kv_scales/")]


def of_scales(graph: Graph) -> list[onnx.NodeProto]:
    """Return the nodes that look scales up as they are read."""
    return [node for node in readers(graph, "Gather") if node.input[0] == STEPS]


def of_zeros(graph: Graph) -> list[onnx.NodeProto]:
    """Return the nodes that subtract from zero points as they are read."""
    held = initializers(graph)
    added = [node for node in readers(graph, "Add") if node.input[1] in held]
    return [node for node in added if np.array_equal(graph.initializer(node.input[1]), -128)]


def joined(graph: Graph) -> list[onnx.NodeProto]:
    """Return the nodes that join the bytes of a token: integers, scales (1), zero points (2)."""
    return writers(graph, "Concat")


def given(nodes: Nodes, place: int, make: Make) -> Edit:
    """Return the fault that nodes are given something else."""

    def edit(graph: Graph) -> None:
        for node in nodes(graph):
            feed(graph, node, place, make)

    return edit


def plus(by: int) -> Make:
    return lambda p, x: p("Add", x, np.int32(by))


def scale_read(by: int) -> Edit:
    def make(p: Planter, x: str) -> str:
        return p("Min", p("Max", plus(by)(p, x), np.int32(0)), np.int32(255))

    return given(of_scales, 1, make)


def of_octaves_alone(p: Planter, x: str) -> str:
    return p("Mul", p("Div", x, np.int32(8)), np.int32(8))


def other_one(axis: int) -> Make:
    """Return what takes the other block or head."""
    return lambda p, x: p("Gather", x, np.array([1, 0]), axis=axis)


def zero_read(operator: str, value: float) -> Edit:
    def edit(graph: Graph) -> None:
        for node in of_zeros(graph):
            behind(graph, node.output[0], lambda p, x: p(operator, x, value))

    return edit


def zero_in_the_middle(graph: Graph) -> None:
    for node in of_zeros(graph):
        feed(graph, node, 0, lambda p, x: p("Mul", x, 0.0))
        other_constant(graph, node, -8)


def stale(*parts: int) -> Edit:
    """Return the fault that bytes are read from the cache as it came in: 1 scales, 2 zeros."""

    def edit(graph: Graph) -> None:
        for split, scatter in zip(readers(graph, "Split"), graph.all("TensorScatter"), strict=True):
            outputs = [f"{name}_stale" for name in split.output]
            inputs = [scatter.input[0], split.input[1]]
            old = onnx.helper.make_node("Split", inputs, outputs, axis=-1)
            graph.insert(graph.nodes.index(split), old)
            for node in graph.all("Cast"):
                for part in parts:
                    if node.input[0] == split.output[part]:
                        node.input[0] = outputs[part]

    return edit


def exchanged(graph: Graph) -> None:
    for split in readers(graph, "Split"):
        split.output[1], split.output[2] = split.output[2], split.output[1]


def table_read(change: Change) -> Edit:
    """Return the fault that bytes stand for other scales where they are read alone."""

    def edit(graph: Graph) -> None:
        other = graph.constant(change(graph.initializer(STEPS)).astype(np.float32))
        for node in of_scales(graph):
            node.input[0] = other

    return edit


def edges(by: float) -> Edit:
    names = ("kv_scales.octaves", "kv_scales.eighths")
    return both(*(held_as(name, lambda e: e * by) for name in names))


def limit(old: int, new: int) -> Edit:
    """Return the fault that integers are clipped elsewhere."""

    def edit(graph: Graph) -> None:
        held = initializers(graph)
        for node in writers(graph, "Min"):
            if node.input[1] in held and graph.initializer(node.input[1]) == old:
                other_constant(graph, node, new)

    return edit


def in_order(order: Callable[[int], Array], *, read: bool = True) -> Edit:
    """Return the fault that blocks have other channels, in the order that a function gives."""

    def edit(graph: Graph) -> None:
        of_blocks = [
            n for n in writers(graph, "Reshape") if graph.initializer(n.input[1]).size == 5
        ]
        perm = order(int(np.prod(graph.initializer(of_blocks[0].input[1])[-2:])))
        for node in of_blocks:
            feed(graph, node, 0, lambda p, x: p("Gather", x, perm, axis=-1))
        back = np.argsort(perm)
        for index in (1, 2) if read else ():
            feed(graph, graph.one("Attention"), index, lambda p, x: p("Gather", x, back, axis=-1))

    return edit


def shifted(by: int) -> Callable[[int], Array]:
    return lambda width: np.roll(np.arange(width), -by)


def strided(width: int) -> Array:
    return np.arange(width).reshape(-1, BLOCKS).T.ravel()


def mixing(place: int, change: Change) -> Edit:
    """Return the fault that queries (0) or keys (1) are multiplied by another matrix."""

    def edit(graph: Graph) -> None:
        node = [n for n in graph.all("MatMul") if n.input[1] == HADAMARD][place]
        node.input[1] = graph.constant(change(graph.initializer(HADAMARD)).astype(np.float32))

    return edit


def unit(matrix: Array) -> Array:
    return np.eye(len(matrix))


def linear(steps: Array) -> Array:
    octaves, eighths = np.divmod(np.arange(steps.size), 8)
    return (steps.ravel()[0] * 2.0**octaves * (1 + eighths / 8)).reshape(steps.shape)


SCALE, ZERO = "block scale", "zero point"
OF_BLOCKS: Faults = OF_HALVES | {
    "scale byte 1 too large": ("cache scale", given(joined, 1, plus(1))),
    "scale byte 1 too small": ("cache scale", given(joined, 1, plus(-1))),
    "scale byte 1 too large where it is read": ("cache scale", scale_read(1)),
    "scale byte 1 too small where it is read": ("cache scale", scale_read(-1)),
    "scale an octave too large where it is read": ("cache scale", scale_read(8)),
    "scale of octaves alone where it is read": (
        "cache scale", given(of_scales, 1, of_octaves_alone)),
    "block scale of the other block where it is read": (
        SCALE, given(of_scales, 1, other_one(-1))),
    "block scale of the other block": (SCALE, given(joined, 1, other_one(-1))),
    "block scale of the other head where it is read": (SCALE, given(of_scales, 1, other_one(1))),
    "block zero point of the other block where it is read": (
        SCALE, given(of_zeros, 0, other_one(-2))),
    "block zero point of the other block": (SCALE, given(joined, 2, other_one(-1))),
    "stale scales when the cache grows": ("stale scales", stale(1)),
    "stale scales and zero points when the cache grows": ("stale scales", stale(1, 2)),
    "zero point 1 too large": (ZERO, given(joined, 2, plus(1))),
    "zero point 1 too small": (ZERO, given(joined, 2, plus(-1))),
    "zero point 1 too large where it is read": (ZERO, zero_read("Add", 1.0)),
    "zero point 1 too small where it is read": (ZERO, zero_read("Add", -1.0)),
    "zero point left out": (ZERO, zero_read("Mul", 0.0)),
    "zero point in the middle": (ZERO, zero_in_the_middle),
    "zero point of the other sign": (ZERO, zero_read("Mul", -1.0)),
    "bytes of scales and zero points exchanged": ("cache layout", exchanged),
    "bounds 2 channels late": ("block bounds", in_order(shifted(2))),
    "bounds 16 channels early": ("block bounds", in_order(shifted(-16))),
    "bounds 1 channel late where they are written": (
        "block bounds", in_order(shifted(1), read=False)),
    "bounds of every second channel": ("block bounds", in_order(strided)),
    "scale table halved where it is read": ("cache scale", table_read(lambda s: s / 2)),
    "scale table squared": ("cache scale", held_as(STEPS, np.square)),
    "scale table linear within octaves": ("cache scale", held_as(STEPS, linear)),
    "scale table linear where it is read": ("cache scale", table_read(linear)),
    "scale table rounded to 8 digits where it is read": ("cache scale", table_read(digits(8))),
    "scale table reversed": ("cache scale", held_as(STEPS, lambda s: s[::-1])),
    "scale edges 1 step too large": ("cache scale", edges(2 ** (1 / 8))),
    "scale edges an octave too small": ("cache scale", edges(0.5)),
    "clipped at 14": ("clipped range", limit(15, 14)),
    "clipped beyond a byte": ("clipped range", limit(15, 2**30)),
    "mixing of queries left out": ("key rotation", mixing(0, unit)),
    "mixing of keys left out": ("key rotation", mixing(1, unit)),
    "mixing of queries not scaled": ("key rotation", mixing(0, lambda m: m / np.abs(m).max())),
    "mixing in another order": ("key rotation", mixing(1, lambda m: m[:, ::-1])),
}  # fmt: skip
