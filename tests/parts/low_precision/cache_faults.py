"""Faults in how a cache of integers is written and read, as changes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from refused_outputs import refused_outputs

from attn_export.float64.evaluate import Evaluation
from attn_export.graph.load import load_model
from attn_export.results import StoredCase


class Graph:
    """A graph in the standard dialect, to be changed."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.proto = onnx.ModelProto()
        self.proto.CopyFrom(model)
        self.nodes = self.proto.graph.node

    def linear(self, op_type: str) -> list[onnx.NodeProto]:
        """Return the nodes that write or read, of keys and of values."""
        return [node for node in self.nodes if node.op_type == op_type]

    def constant(self, array: np.ndarray) -> str:
        name = f"planted_{len(self.proto.graph.initializer)}"
        self.proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def held(self, name: str) -> np.ndarray:
        (tensor,) = (t for t in self.proto.graph.initializer if t.name == name)
        return numpy_helper.to_array(tensor)

    def insert(self, before: onnx.NodeProto, *nodes: onnx.NodeProto) -> None:
        place = next(i for i, node in enumerate(self.nodes) if node is before)
        for node in reversed(nodes):
            self.nodes.insert(place, node)

    def with_scale(self, change: Callable[[np.ndarray], np.ndarray], *parts: str) -> None:
        """Change the scales of parts of ``"kw"``, ``"kr"``, ``"vw"`` and ``"vr"``."""
        for part in parts:
            name = f"kv_scales.{part[0]}_scale"
            other = self.constant(change(self.held(name)).astype(np.float32))
            wanted = ("QuantizeLinear", "Div") if part[1] == "w" else ("DequantizeLinear", "Mul")
            for node in self.nodes:
                if node.op_type in wanted:
                    for index, given in enumerate(node.input):
                        if given == name:
                            node.input[index] = other


Fault = Callable[[Graph], None]


def wrong_outputs(
    folder: Path,
    fault: Fault | None,
    chosen: Callable[[Sequence[StoredCase]], Iterable[StoredCase]],
) -> int:
    """Return the number of outputs of a bundle's graph with a fault that the judge refuses."""
    graph = Graph(load_model(folder / "model.onnx"))
    before = graph.proto.SerializeToString()
    if fault is not None:
        fault(graph)
        assert graph.proto.SerializeToString() != before, "no change"
    evaluation = Evaluation(graph.proto)
    return refused_outputs(
        folder, lambda inputs: evaluation.outputs_of(evaluation.values(inputs)), chosen
    )


BOTH, WRITTEN, READ = ("kw", "kr", "vw", "vr"), ("kw", "vw"), ("kr", "vr")


def scaled(change: Callable[[np.ndarray], np.ndarray], *parts: str) -> Fault:
    return lambda graph: graph.with_scale(change, *parts)


def zero_point(value: int, *op_types: str) -> Fault:
    def fault(graph: Graph) -> None:
        for op_type in op_types:
            for node in graph.linear(op_type):
                node.input[2] = graph.constant(np.array(value, np.int8))

    return fault


def scales_exchanged(graph: Graph) -> None:
    """Write and read keys with the scale of values, and the other way round."""
    names = ["kv_scales.k_scale", "kv_scales.v_scale"]
    for node in graph.nodes:
        for index, given in enumerate(node.input):
            if given in names:
                node.input[index] = names[1 - names.index(given)]


def requantised(change: float) -> Fault:
    """Return the fault that the whole cache is quantised anew with another scale."""

    def fault(graph: Graph) -> None:
        scale, other = np.float32(1.0), np.float32(change)
        for node in list(graph.linear("TensorScatter")):
            present, raw = node.output[0], f"{node.output[0]}_raw"
            node.output[0] = raw
            reader = next(n for n in graph.nodes if present in n.input)
            zero = graph.constant(np.zeros((), np.int8))
            graph.insert(
                reader,
                helper.make_node(
                    "DequantizeLinear", [raw, graph.constant(scale), zero], [f"{raw}_f"]
                ),
                helper.make_node(
                    "QuantizeLinear", [f"{raw}_f", graph.constant(other), zero], [f"{raw}_q"]
                ),
                helper.make_node(
                    "DequantizeLinear", [f"{raw}_q", graph.constant(other), zero], [f"{raw}_g"]
                ),
                helper.make_node(
                    "QuantizeLinear", [f"{raw}_g", graph.constant(scale), zero], [present]
                ),
            )

    return fault


def rounded_by(*steps: tuple[str, float]) -> Fault:
    """Return the fault that quotients go through operators before they are rounded."""

    def fault(graph: Graph) -> None:
        for node in graph.linear("QuantizeLinear"):
            scale, x = node.input[1], node.input[0]
            made = [helper.make_node("Div", [x, scale], [f"{x}_0"])]
            for number, (op_type, value) in enumerate(steps):
                more = (
                    [graph.constant(np.float64(value))] if op_type in ("Add", "Max", "Min") else []
                )
                source = [f"{x}_{number}", *more]
                made.append(helper.make_node(op_type, source, [f"{x}_{number + 1}"]))
            made.append(helper.make_node("Mul", [f"{x}_{len(steps)}", scale], [f"{x}_back"]))
            graph.insert(node, *made)
            node.input[0] = f"{x}_back"

    return fault


def read_before_rounding(graph: Graph) -> None:
    """Let attention read new keys and values as they were, not their integers."""
    for write, read in zip(
        graph.linear("QuantizeLinear"), graph.linear("DequantizeLinear"), strict=True
    ):
        scatter = next(n for n in graph.linear("TensorScatter") if n.output[0] == read.input[0])
        product = next(n for n in graph.linear("Mul") if n.input[0] == read.output[0])
        past, scaled_past, whole = (f"{read.output[0]}_{part}" for part in ("past", "mul", "whole"))
        graph.insert(
            read,
            helper.make_node("DequantizeLinear", [scatter.input[0], *read.input[1:]], [past]),
            helper.make_node("Mul", [past, product.input[1]], [scaled_past]),
            helper.make_node(
                "TensorScatter", [scaled_past, write.input[0], scatter.input[2]], [whole], axis=-2
            ),
        )
        (attention,) = graph.linear("Attention")
        attention.input[list(attention.input).index(product.output[0])] = whole


def neighbours(array: np.ndarray) -> np.ndarray:
    return array.reshape(*array.shape[:-1], -1, 2)[..., ::-1].reshape(array.shape)


def new_ones_exchanged(graph: Graph) -> None:
    """Swap neighbouring channels as they are written, as 4 bits of a byte may be."""
    for scatter in graph.linear("TensorScatter"):
        new = scatter.input[1]
        order = graph.constant(neighbours(np.arange(8)))
        graph.insert(scatter, helper.make_node("Gather", [new, order], [f"{new}_n"], axis=-1))
        scatter.input[1] = f"{new}_n"


ANY: dict[str, Fault] = {
    "scale halved": scaled(lambda s: s / 2, *BOTH),
    "scale halved where it is read": scaled(lambda s: s / 2, *READ),
    "scale halved where it is written": scaled(lambda s: s / 2, *WRITTEN),
    "scale of keys halved": scaled(lambda s: s / 2, "kw", "kr"),
    "scale of values doubled where it is read": scaled(lambda s: s * 2, "vr"),
    "scale by 128, not 127": scaled(lambda s: s * 127 / 128, *BOTH),
    "scale rounded to 8 digits": scaled(
        lambda s: np.ldexp(np.rint(np.frexp(s)[0] * 256) / 256, np.frexp(s)[1]), *READ
    ),
    "stale scales": scaled(lambda s: s * 0.97, *BOTH),
    "stale scales where they are read": scaled(lambda s: s * 0.97, *READ),
    "scales of keys and values exchanged": scales_exchanged,
    "zero point of 1": zero_point(1, "QuantizeLinear", "DequantizeLinear"),
    "zero point of 1 where it is written": zero_point(1, "QuantizeLinear"),
    "zero point of -1 where it is read": zero_point(-1, "DequantizeLinear"),
    "zero point of -128": zero_point(-128, "QuantizeLinear", "DequantizeLinear"),
    "quantised twice": requantised(1.03),
    "quantised twice, to few bits": requantised(9.0),
    "rounded down": rounded_by(("Floor", 0)),
    "rounded up": rounded_by(("Ceil", 0)),
    "rounded from 0.1 on, not 0.5": rounded_by(("Add", 0.4)),
    "clipped at -127": rounded_by(("Max", -127.0)),
    "clipped at 126": rounded_by(("Min", 126.0)),
    "clipped at -8 and 7": rounded_by(("Max", -8.0), ("Min", 7.0)),
    "neighbouring channels swapped": new_ones_exchanged,
}
OF_TENSORS: dict[str, Fault] = {"new tokens read before they are rounded": read_before_rounding}
OF_CHANNELS: dict[str, Fault] = {
    "scale of the wrong axis": scaled(lambda s: s.transpose(2, 1, 0), *BOTH),
    "scale of the wrong axis where it is read": scaled(lambda s: s.transpose(2, 1, 0), *READ),
    "scale of the next channel": scaled(lambda s: np.roll(s, 1, -1), *BOTH),
    "scale of the next head": scaled(lambda s: np.roll(s, 1, 0), *BOTH),
    "scale of the first head for all": scaled(lambda s: s * 0 + s[:1], *BOTH),
    "scale of the largest channel for all": scaled(lambda s: s * 0 + s.max(), *BOTH),
    "one scale of 64 stale": scaled(
        lambda s: s * np.where(np.arange(s.size).reshape(s.shape) == 9, 1.02, 1), *READ
    ),
}


# -- two integers in a byte ---------------------------------------------------------------------


def packing(graph: Graph, op_type: str) -> list[onnx.NodeProto]:
    """Return the nodes of a type that round and pack."""
    return [node for node in graph.linear(op_type) if node.output[0].startswith("kv_scales/")]


def packed_with(op_type: str, number: float) -> Fault:
    """Return the fault that the constant of the nodes that round and pack is another one."""

    def fault(graph: Graph) -> None:
        held = {t.name for t in graph.proto.graph.initializer}
        for node in packing(graph, op_type):
            if node.input[1] in held:
                dtype = graph.held(node.input[1]).dtype
                node.input[1] = graph.constant(np.array(number, dtype))

    return fault


def read_as(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """Return the fault that bytes stand for other numbers, `[256, 2]`."""

    def fault(graph: Graph) -> None:
        other = graph.constant(change(graph.held("kv_scales.nibbles")).astype(np.float32))
        for node in graph.linear("Gather"):
            if node.input[0] == "kv_scales.nibbles":
                node.input[0] = other

    return fault


def rounded_as(op_type: str) -> Fault:
    def fault(graph: Graph) -> None:
        for node in graph.linear("Round"):
            node.op_type = op_type

    return fault


def sign_lost(graph: Graph) -> None:
    for node in graph.linear("Round"):
        x = node.input[0]
        graph.insert(node, helper.make_node("Abs", [x], [f"{x}_a"]))
        node.input[0] = f"{x}_a"


def both(*faults: Fault) -> Fault:
    def fault(graph: Graph) -> None:
        for each in faults:
            each(graph)

    return fault


def packed_from(first: tuple[int, int, int], second: tuple[int, int, int]) -> Fault:
    """Return the fault that the halves are other channels: start, end and step of each slice."""

    def fault(graph: Graph) -> None:
        for number, node in enumerate(packing(graph, "Slice")):
            start, end, step = (graph.constant(np.array([n])) for n in (first, second)[number % 2])
            node.input[1], node.input[2], node.input[4] = start, end, step

    return fault


def read_in_order(*perm: int) -> Fault:
    """Return the fault that halves, `[B, Hkv, S, D / 2, 2]`, are joined in another order."""

    def fault(graph: Graph) -> None:
        gathered = [node.output[0] for node in graph.linear("Gather")]
        for node in [n for n in graph.linear("Reshape") if n.input[0] in gathered]:
            pairs, shape = node.input[0], graph.held(node.input[1]).copy()
            shape[2] = -1
            graph.insert(node, helper.make_node("Transpose", [pairs], [f"{pairs}_t"], perm=perm))
            node.input[0], node.input[1] = f"{pairs}_t", graph.constant(shape)

    return fault


ALL = 2**31
SWAPPED = packed_from((1, ALL, 2), (0, ALL, 2))
OF_BYTES: dict[str, Fault] = {
    name: fault for name, fault in ANY.items() if name.startswith(("scale", "stale"))
} | {
    "halves swapped": both(SWAPPED, read_as(lambda n: n[:, ::-1])),
    "halves swapped where they are written": SWAPPED,
    "halves swapped where they are read": read_as(lambda n: n[:, ::-1]),
    "zero of 7": both(packed_with("Add", 7), read_as(lambda n: n + 1)),
    "zero of 7 where it is written": packed_with("Add", 7),
    "zero of 7 where it is read": read_as(lambda n: n + 1),
    "zero of 9": both(packed_with("Add", 9), read_as(lambda n: n - 1)),
    "zero of 9 where it is written": packed_with("Add", 9),
    "zero of 9 where it is read": read_as(lambda n: n - 1),
    "scale of int8": scaled(lambda s: s * 7 / 127, *BOTH),
    "scale of int8 where it is read": scaled(lambda s: s * 7 / 127, *READ),
    "scale by 8, not 7": scaled(lambda s: s * 7 / 8, *BOTH),
    "sign lost": sign_lost,
    "sign lost where it is read": read_as(np.abs),
    "read as two's complement": read_as(lambda n: np.where(n < 0, n + 8, n - 8)),
    "lower halves of all keys first": read_in_order(0, 1, 4, 2, 3),
    "read by channel, then by key": read_in_order(0, 1, 3, 2, 4),
    "lower halves of a key first": read_in_order(0, 1, 2, 4, 3),
    "halves of the row in a byte": packed_from((0, 4, 1), (4, 8, 1)),
    "the first channel twice": packed_from((0, ALL, 2), (0, ALL, 2)),
    "moved by 3 bits": packed_with("Mul", 8),
    "rounded down": rounded_as("Floor"),
    "rounded up": rounded_as("Ceil"),
    "clipped at -7": packed_with("Max", -7),
    "clipped at 6": packed_with("Min", 6),
    "not clipped at -8": packed_with("Max", -16),
    "not clipped at 7": packed_with("Min", 15),
}
