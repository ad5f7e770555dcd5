"""The nodes that make a mask, and what they give where only sizes, or made-up data, go in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

from attn_export.graph.axes import Size
from attn_export.graph.mend import dims

Array = np.ndarray[Any, Any]
SizeOf = Callable[[Size], int | None]

MOST_NODES = 300
NEVER = frozenset({"Attention", "Bernoulli", "Multinomial"})
"""Beside all that is random: what gives other values each time, or is no part of a mask."""


class MaskMaker:
    """Everything that a value is computed from.

    Args:
        mask: The value.
        lengths: A value that says how many keys each row holds: it is given in a trial.
        known: Whether a size can be told in a trial: Shape of an axis of it ends the search.

    Attributes:
        nodes: In an order in which they can run.
        data: What is neither computed from sizes nor constant, whatever it is.
        tainted: The values that are computed from it.
    """

    def __init__(
        self, mask: ir.Value, lengths: ir.Value | None, known: Callable[[Size], bool]
    ) -> None:
        self.mask, self.lengths, self._known = mask, lengths, known
        self.nodes: list[ir.Node] = []
        self.data: set[ir.Value] = set()
        self.tainted: set[ir.Value] = set()
        self._sized: set[ir.Value] = set()
        self._constants: dict[str, Array] = {}
        self._visit(mask)

    def _visit(self, last: ir.Value) -> None:
        """Depth first: a node is listed behind those that it reads."""
        done: set[ir.Value | ir.Node] = set()
        stack: list[ir.Value | ir.Node] = [last]
        while stack:
            item = stack.pop()
            if isinstance(item, ir.Node):
                self._list(item)
            elif item not in done:
                done.add(item)
                node = self._maker_of(item)
                if node is not None and node not in done:
                    done.add(node)
                    stack += [node, *(value for value in node.inputs if value is not None)]

    def _maker_of(self, value: ir.Value) -> ir.Node | None:
        """The node to go on with; None at what is given."""
        node = value.producer()
        if value is self.lengths or (node is not None and self._is_size(node)):
            self._sized.add(value)
        elif value.const_value is not None:
            self._constants[str(value.name)] = value.const_value.numpy()
        elif node is None or not _can_run(node) or len(self.nodes) > MOST_NODES:
            self.data.add(value)
            self.tainted.add(value)
        else:
            return node
        return None

    def _list(self, node: ir.Node) -> None:
        self.nodes.append(node)
        if any(value in self.tainted for value in node.inputs):
            self.tainted.update(node.outputs)

    def _is_size(self, node: ir.Node) -> bool:
        source = node.inputs[0] if node.op_type in ("Shape", "Size") and node.inputs else None
        return source is not None and bool(dims(source)) and all(map(self._known, _asked(node)))

    def evaluator(self, outputs: Sequence[ir.Value], cut: Collection[ir.Value] = ()) -> Evaluator:
        """Runs the nodes that `outputs` need; the values in `cut` are given instead."""
        wanted, nodes = set(outputs), list[ir.Node]()
        for node in reversed(self.nodes):
            if wanted.intersection(node.outputs) - set(cut):
                nodes.insert(0, node)
                wanted.update(value for value in node.inputs if value is not None)
        sized = [value for value in self._sized if value in wanted]
        return Evaluator(self, nodes, outputs, sized, [value for value in cut if value in wanted])

    def constants(self) -> dict[str, Array]:
        """The constants that are read, by name."""
        return self._constants


class Evaluator:
    """Some of the nodes of a maker, ready to run.

    Args:
        maker: Whose nodes.
        nodes: Which, in order.
        outputs: What they are run for.
        sized: What follows from the sizes.
        given: What is handed in.
    """

    def __init__(
        self,
        maker: MaskMaker,
        nodes: Sequence[ir.Node],
        outputs: Sequence[ir.Value],
        sized: Sequence[ir.Value],
        given: Sequence[ir.Value],
    ) -> None:
        self._maker, self._sized = maker, sized
        made = {value for node in nodes for value in node.outputs}
        read = {value for node in nodes for value in node.inputs if value is not None}
        leaves = [*sized, *given]
        names = [str(value.name) for value in leaves]
        read_constants = {str(value.name) for value in read - made - set(leaves)}
        self._constants = {
            name: array for name, array in maker.constants().items() if name in read_constants
        }
        inputs = [helper.make_empty_tensor_value_info(n) for n in [*names, *self._constants]]
        graph = helper.make_graph(
            [ir.to_proto(node) for node in nodes], "mask", inputs,
            [helper.make_empty_tensor_value_info(str(value.name)) for value in outputs],
        )  # fmt: skip
        opset = _opset(nodes)
        self._names = [str(value.name) for value in outputs]
        self._run = ReferenceEvaluator(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        )

    def __call__(
        self, size_of: SizeOf, lengths: Array, given: Mapping[ir.Value, Array]
    ) -> dict[str, Array]:
        """What the outputs are, by name.

        Args:
            size_of: A size in this trial.
            lengths: How many keys each row holds.
            given: The values of what was cut off.
        """
        feeds = dict(self._constants)
        for value in self._sized:
            feeds[str(value.name)] = (
                lengths if value is self._maker.lengths else _size(value, size_of)
            )
        feeds |= {str(value.name): array for value, array in given.items()}
        with np.errstate(all="ignore"):
            found = self._run.run(None, feeds)
        return dict(zip(self._names, found, strict=True))


def _can_run(node: ir.Node) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type in NEVER or "Random" in node.op_type:
        return False
    kinds = {attribute.type for attribute in node.attributes.values()}
    return not kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}


def _asked(node: ir.Node) -> tuple[Size, ...]:
    """The axes that a Shape or Size reads."""
    source = node.inputs[0]
    assert source is not None
    whole = dims(source)
    if node.op_type == "Size":
        return whole
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(whole))
    return whole[start:end]


def _size(value: ir.Value, size_of: SizeOf) -> Array:
    node = value.producer()
    assert node is not None
    sizes = [size_of(size) for size in _asked(node)]
    if None in sizes:
        raise ValueError(f"a size of {value.name} is not known")
    array = np.array(sizes, np.int64)
    return array if node.op_type == "Shape" else array.prod()


def _opset(nodes: Sequence[ir.Node]) -> int:
    graph = nodes[0].graph if nodes else None
    versions = graph.opset_imports if isinstance(graph, ir.Graph) else {}
    return versions.get("", 23)
