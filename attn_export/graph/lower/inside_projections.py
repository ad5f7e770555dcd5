"""Recognition of steps between projections and attention that an operator can do itself.

Each function recognises one step, and returns the values before it: a rotary embedding, norms of
queries and keys, or projections of one input, which become one product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from attn_export.graph.ir_helpers import constant_array, dims, producer_of
from attn_export.graph.lower.caches import source_of_number
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.read import AttentionNode, merge_qkv

_HALVES = ("Sub", "Add")


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A rotary embedding of queries and keys, by halves, at the positions past + i.

    Attributes:
        cos: Cosines of the positions, `[B, 1, L, D/2]` or `[B, L, D/2]`.
        sin: Sines of the positions, of the same shape.
        positions: The positions, int64 `[B, L]`.
    """

    query: ir.Value
    key: ir.Value
    cos: ir.Value
    sin: ir.Value
    positions: ir.Value

    def operands(self, op: Builder, a: AttentionNode) -> Sequence[ir.Value | None]:
        """Return queries, keys and values before the rotation, as one packed value if there is one.

        `a`: The node with its new keys and values.
        """
        merged = merge_qkv(op, dataclasses.replace(a, query=self.query, key=self.key))
        packed = pack_projections(op, *merged)
        return merged if packed is None else (packed, None, None)

    def tables(self, op: Builder, count: int) -> tuple[ir.Value, ir.Value]:
        """Return cosines and sines of the positions below `count`, `[count, D/2]`.

        They are computed by copies of the graph's nodes, which ONNX Runtime folds when it loads the
        graph, so that the file holds no table.
        """
        first, last, step = (op.scalar(number) for number in (0, count, 1))
        positions = op("Unsqueeze", op("Range", first, last, step), op.ints(0))
        cos, sin = (
            op("Reshape", self._repeat(op, value, positions), op.ints(count, -1))
            for value in (self.cos, self.sin)
        )
        return cos, sin

    def _repeat(self, op: Builder, value: ir.Value, positions: ir.Value) -> ir.Value:
        """Return cosines or sines of other positions, int64 `[1, N]`, by copies of nodes."""
        chain = _chain_to(value, self.positions)
        assert chain is not None  # `find_rotation` has checked this
        replacements = {self.positions: positions}
        for node in chain:
            (replacements[node.outputs[0]],) = op.copy_node(node, replacements)
        return replacements[value]


def find_rotation(query: ir.Value, key: ir.Value, lengths: ir.Value) -> Rotation | None:
    """Return the rotary embedding that computes queries and keys; None if there is none.

    `query`: `[B, H, L, D]`.
    `key`: `[B, Hkv, L, D]`.
    `lengths`: The number of past keys of each batch element, int64 `[B]`: the position of the first
    query.
    """
    query_parts, key_parts = (_read_node(x) or _read_rotation(x) for x in (query, key))
    if query_parts is None or key_parts is None or query_parts[1:] != key_parts[1:]:
        return None
    (before, cos, sin), (key_before, *_) = query_parts, key_parts
    positions = _positions(cos, lengths)
    if positions is None or _chain_to(sin, positions) is None:
        return None
    return Rotation(before, key_before, cos, sin, positions)


def _read_node(x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return x, cos and sin of a `RotaryEmbedding` of whole heads by halves."""
    node = producer_of(x, "RotaryEmbedding")
    if node is None or len(node.inputs) > 3 or len(dims(x)) != 4:
        return None
    source, cos, sin = node.inputs
    width, interleaved = (
        node.attributes.get_int(name, 0) for name in ("rotary_embedding_dim", "interleaved")
    )
    fits = width in (0, dims(x)[-1]) and not interleaved
    return None if not fits or not source or not cos or not sin else (source, cos, sin)


def _read_rotation(x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return the same of a rotation by halves that is written out.

    It is ``[x1·cos - x2·sin, x2·cos + x1·sin]``, x1 and x2 halves of x.
    """
    node = producer_of(x, "Concat")
    if node is None or len(node.inputs) != 2:
        return None
    if node.attributes.get_int("axis", 0) not in (-1, len(dims(x)) - 1):
        return None
    first, second = (_factors(x, kind) for x, kind in zip(node.inputs, _HALVES, strict=True))
    if first is None or second is None:
        return None
    ((x1, cos), (x2, sin)), ((x2_again, cos_again), (x1_again, sin_again)) = first, second
    if (x1, cos, x2, sin) != (x1_again, cos_again, x2_again, sin_again):
        return None
    source = _halved_value(x1, 0)
    if source is None or source is not _halved_value(x2, 1):
        return None
    # All heads must have the same angles.
    width = dims(x1)[-1:]
    if any(dims(x)[1:2] != (1,) or dims(x)[-1:] != width for x in (cos, sin)):
        return None
    return source, cos, sin


def _factors(
    value: ir.Value | None, op_type: str
) -> tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] | None:
    """Return the operands of both products of a sum or difference of products, or None."""
    node = producer_of(value, op_type)
    if node is None:
        return None
    factors = []
    for term in node.inputs:
        product = producer_of(term, "Mul")
        one, other = (None, None) if product is None else product.inputs
        if one is None or other is None:
            return None
        factors.append((one, other))
    return factors[0], factors[1]


def _halved_value(value: ir.Value, half: int) -> ir.Value | None:
    """Return the value of whose last axis `value` is the first or second half, or None."""
    parts = _slice_of_last_axis(value)
    if parts is None:
        return None
    source, *selected = parts
    width = dims(source)[-1]
    if not isinstance(width, int) or width % 2:
        return None
    start = half * width // 2
    return source if selected == [start, start + width // 2, 1] else None


def _slice_of_last_axis(value: ir.Value | None) -> tuple[ir.Value, int, int, int] | None:
    """Return what a Slice of the last axis reads, with start, end and step; None for other values.

    Start, end and step must be constants, and the size of the axis be known; it limits the end.
    """
    node = producer_of(value, "Slice")
    source = None if node is None else node.inputs[0]
    if node is None or source is None or not dims(source):
        return None
    width, last = dims(source)[-1], len(dims(source)) - 1
    arrays = [constant_array(x) for x in node.inputs[1:]]
    numbers = [int(x.item()) for x in arrays if x is not None and x.size == 1]
    if len(numbers) < max(len(arrays), 3) or not isinstance(width, int):
        return None
    start, end, axis, *step = numbers
    return (source, start, min(end, width), step[0] if step else 1) if axis in (-1, last) else None


def _positions(cos: ir.Value, lengths: ir.Value) -> ir.Value | None:
    """Return the positions, ``lengths + [0 … L - 1]``, from which `cos` is computed."""
    value: ir.Value | None = cos
    while value is not None and (node := value.producer()) is not None:
        moving = _moving(node)
        if node.op_type == "Add" and len(moving) == 2:
            rows, steps = sorted(moving, key=lambda x: source_of_number(x) is not lengths)
            return value if source_of_number(rows) is lengths and _counts_up(steps) else None
        value = moving[0] if len(moving) == 1 else None
    return None


def _moving(node: ir.Node) -> list[ir.Value]:
    """Return the inputs that are no constants, each once."""
    return list(dict.fromkeys(x for x in node.inputs if x is not None and x.const_value is None))


def _counts_up(value: ir.Value) -> bool:
    """Return whether a value counts up from 0 by 1."""
    node = producer_of(value, "Range")
    if node is None:
        return False
    bounds = [constant_array(x) for x in (node.inputs[0], node.inputs[2])]
    return [None if x is None else x.item() for x in bounds] == [0, 1]


def _chain_to(value: ir.Value, source: ir.Value) -> list[ir.Node] | None:
    """Return the nodes from `source` to `value`; None unless their other inputs are constants."""
    nodes: list[ir.Node] = []
    while value is not source:
        node = value.producer()
        if node is None or len(node.outputs) != 1:
            return None
        moving = _moving(node)
        if len(moving) != 1:
            return None
        nodes.append(node)
        value = moving[0]
    return nodes[::-1]


@dataclasses.dataclass(frozen=True)
class Norm:
    """RMS norms of queries and keys, over the width of a head.

    Attributes:
        query_weight: The scale of queries, `[D]`.
        key_weight: The scale of keys, `[D]`.
    """

    query: ir.Value
    key: ir.Value
    query_weight: ir.Value
    key_weight: ir.Value
    epsilon: float


def find_norm(query: ir.Value, key: ir.Value) -> Norm | None:
    """Return the RMS norms that compute queries and keys; None if there are no such norms.

    `query`: `[B, H, L, D]`.
    `key`: `[B, Hkv, L, D]`.
    """
    norms = []
    for value in (query, key):
        node = producer_of(value, "RMSNormalization")
        if node is None:
            return None
        source, weight = node.inputs
        last = node.attributes.get_int("axis", -1) in (-1, len(dims(value)) - 1)
        if source is None or weight is None or len(dims(weight)) != 1 or not last:
            return None
        norms.append((source, weight, node.attributes.get_float("epsilon", 1e-5)))
    (before, weight, epsilon), (key_before, key_weight, key_epsilon) = norms
    if epsilon != key_epsilon:
        return None
    return Norm(before, key_before, weight, key_weight, epsilon)


def pack_projections(
    op: Builder, query: ir.Value, key: ir.Value, value: ir.Value
) -> ir.Value | None:
    """Return queries, keys and values, concatenated on the last axis, from one product.

    The result is None if the three are no projections of one input.

    Weights are concatenated by nodes that ONNX Runtime folds when it loads the graph, so that the
    file holds them once.

    `query`: `[B, L, H·D]`.
    `key`: `[B, L, Hkv·D]`.
    `value`: `[B, L, Hkv·Dv]`.
    """
    split = producer_of(query, "Split")
    if split is not None:
        same = list(split.outputs) == [query, key, value]
        last = split.attributes.get_int("axis", 0) in (-1, len(dims(query)) - 1)
        return split.inputs[0] if same and last else None
    candidates = [_projection(operand) for operand in (query, key, value)]
    projections = [part for part in candidates if part is not None]
    if len(projections) < 3 or len({source for source, _, _ in projections}) > 1:
        return None
    biases = [bias for _, _, bias in projections if bias is not None]
    if len(biases) not in (0, 3):
        return None
    weight = op("Concat", *(weight for _, weight, _ in projections), axis=1)
    product = op("MatMul", projections[0][0], weight)
    return op("Add", product, op("Concat", *biases, axis=0)) if biases else product


def _projection(value: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value | None] | None:
    """Return input, weight and bias of the linear layer that computes a value, or None."""
    product, bias = value, None
    added = producer_of(value, "Add")
    if added is not None:
        constants = [x for x in added.inputs if x is not None and x.is_initializer()]
        others = [x for x in added.inputs if x is not None and not x.is_initializer()]
        if len(constants) != 1 or len(others) != 1 or len(dims(constants[0])) != 1:
            return None
        bias, product = constants[0], others[0]
    node = producer_of(product, "MatMul")
    if node is None:
        return None
    source, weight = node.inputs
    if source is None or weight is None or not weight.is_initializer() or len(dims(weight)) != 2:
        return None
    return source, weight, bias
