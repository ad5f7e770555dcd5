"""Replacement of attention that is written out in operators by one `Attention` node.

The search starts at products that read a `Softmax` over the last axis. Before it there may be
scales, masks that are added or filled in, a softcap and casts, up to the product of queries and
keys. Between them, values may be rearranged by any route (`views`). If anything else is found, the
nodes stay.

The node is equivalent except for queries whose keys are all hidden by -inf, whose result is NaN if
attention is written out. Callers must compare the graph with its source: `build` does so with all
cases, `lower` with random inputs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.dialect_names import PORTABLE, STANDARD
from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import dims, nodes_of, set_type
from attn_export.graph.lower.dialects import Observed, with_shapes
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.read import WEIGHTS
from attn_export.graph.ort_compat import make_ort_compatible
from attn_export.parts.decomposed.from_contrib import from_contrib
from attn_export.parts.decomposed.normal_form import normalise
from attn_export.parts.decomposed.scores import Mask, Operand, read_scores
from attn_export.parts.decomposed.views import Heads, NoMatchError, Views, reordered
from attn_export.parts.decomposed.weights import Weights, weights_of


def recognise_attention(model: ir.Model) -> int:
    """Replace attention that is written out by `Attention` nodes, and return their number."""
    products = [*nodes_of(model, "MatMul"), *nodes_of(model, "Einsum")]
    found = [match for node in products for match in weights_of(node)]
    softmaxes = [match.softmax for match in found]
    views = Views(model) if found else None
    count = 0
    for match in found:
        if softmaxes.count(match.softmax) == 1 and views is not None:
            with contextlib.suppress(NoMatchError, ValueError):
                _Attention(model, views, match).replace()
                count += 1
    if count:
        common.RemoveUnusedNodesPass()(model)
        model.graph.sort()  # readers of weights may come before the values
    return count


class _Attention:
    """Attention that is written out, to be replaced by a node."""

    def __init__(self, model: ir.Model, views: Views, weights: Weights) -> None:
        self._views, self._weights = views, weights
        self._op = Builder(model, weights.product)
        source = weights.softmax.inputs[0]
        assert source is not None  # that is how the weights were found
        self._scores = read_scores(self._op, source)
        if weights.drops_last != (self._scores.sink is not None):
            raise NoMatchError

    def replace(self) -> None:
        """Replace the product, and the weights if others read them."""
        for batch, count in self._batches_and_heads():
            with contextlib.suppress(NoMatchError):
                self._replace(batch, count)
                return
        raise NoMatchError

    def _batches_and_heads(self) -> Iterator[tuple[Size, int]]:
        """Yield batch and number of heads that the scores may have."""
        scores, source = self._scores, self._weights.softmax.inputs[0]
        assert source is not None
        shapes = [scores.leads, dims(source)[:-2], *(mask.leads for mask in scores.masks)]
        for leads in shapes:
            heads = [size for size in leads[1:] if isinstance(size, int)]
            if len(leads) in (2, 3) and len(heads) == len(leads) - 1:
                yield leads[0], math.prod(heads)
            elif len(leads) > 2 and isinstance(leads[-1], int):
                yield _product_of(leads[:-1]), leads[-1]
        if len(scores.leads) == 1:
            sizes = self._views.sizes(scores.leads[0])
            for batch in self._views.leading_axes(scores.query.value):
                counts = {n / b for n, b in zip(sizes, self._views.sizes(batch), strict=True)}
                if len(counts) == 1 and counts == {int(max(counts))}:
                    yield batch, int(max(counts))
        last = scores.leads[-1] if scores.leads else 1
        if isinstance(last, int) and len(scores.leads) < 2:
            yield 1, last
        elif scores.leads:
            yield _product_of(scores.leads), 1

    def _replace(self, batch: Size, count: int) -> None:
        op, views, scores, weights = self._op, self._views, self._scores, self._weights
        heads = Heads(batch, count, scores.leads)
        query, factor = self._operand(scores.query, heads, scaled=True, count=count)
        key, key_factor = self._operand(scores.key, heads, scaled=True)
        of_values = Heads(batch, count, weights.leads)
        value, _ = self._operand(weights.value, of_values)
        counts = [size for size in (dims(key)[1], dims(value)[1]) if isinstance(size, int)]
        if len(set(counts)) > 1:  # of heads that are shared in one of them alone
            key, key_factor = self._operand(scores.key, heads, scaled=True, count=max(counts))
            value, _ = self._operand(weights.value, of_values, count=max(counts))
        scale = scores.scale * factor * key_factor
        masks = _Masks(op, views, Heads(batch, count, ()), query, key)
        mask = masks.combined(scores.masks)
        if scores.sink is not None:
            key, value, mask = masks.with_sink(value, mask, scores.sink)
        read = [x for x in weights.path if _is_read_elsewhere(x, weights)]
        attended, shown = self._node([query, key, value], mask, scale, weights_read=bool(read))
        # A query of batch size 1 is expanded later.
        attended.shape = ir.Shape([batch, *dims(attended)[1:]])
        out = weights.product.outputs[0]
        old, new = views.replace_furthest(op, attended, out, weights.order)
        made = weights.softmax.outputs[0]
        if bool(read) and scores.sink is not None:
            raise NoMatchError
        if shown is not None:
            shown = reordered(op, shown, range(4), dims(made))
            if shown is None or made.dtype != query.dtype:
                raise NoMatchError
        take_over(old, new)
        if shown is not None:
            take_over(made, shown)

    def _operand(
        self, operand: Operand, heads: Heads, *, scaled: bool = False, count: int = 0
    ) -> tuple[ir.Value, float]:
        return self._views.with_heads(
            self._op, operand.value, heads, perm=operand.perm, scaled=scaled, count=count
        )

    def _node(
        self, parts: Sequence[ir.Value], mask: ir.Value | None, scale: float, *, weights_read: bool
    ) -> tuple[ir.Value, ir.Value | None]:
        """Return the output of a new node, and the weights if others read them."""
        query, key, value = parts
        widths = (dims(query)[-1], dims(key)[-1], dims(value)[-1])
        if not all(isinstance(size, int) for size in widths) or not scale:
            raise NoMatchError
        softcap = self._scores.softcap
        attributes: dict[str, Any] = {"softcap": softcap} if softcap else {}
        attributes |= {"qk_matmul_output_mode": WEIGHTS} if weights_read else {}
        inputs = [query, key, value, *([] if mask is None else [mask])]
        outputs = self._op.add_node(
            "Attention", inputs, 4 if weights_read else 1, scale=scale, **attributes
        )
        outputs[0].shape = ir.Shape([*dims(query)[:3], dims(value)[-1]])
        for output in outputs:
            output.type = query.type
        if not weights_read:
            return outputs[0], None
        outputs[3].shape = ir.Shape([*dims(query)[:3], dims(key)[2]])
        return outputs[0], outputs[3]


def _product_of(sizes: Sequence[Size]) -> Size:
    if all(isinstance(size, int) for size in sizes):
        return math.prod(size for size in sizes if isinstance(size, int))
    return ir.SymbolicDim("*".join(f"({size})" for size in sizes))


def _is_read_elsewhere(value: ir.Value, weights: Weights) -> bool:
    """Return whether another node than those between softmax and product reads the weights."""
    inner = {user for x in weights.path for user in _makers(x, weights)} | {weights.product}
    return value.is_graph_output() or any(use.node not in inner for use in value.uses())


def _makers(value: ir.Value, weights: Weights) -> set[ir.Node]:
    """Return the nodes that compute a value from the output of the softmax."""
    nodes, waiting = set[ir.Node](), [value.producer()]
    while waiting:
        node = waiting.pop()
        if node is not None and node is not weights.softmax and node not in nodes:
            nodes.add(node)
            if len(nodes) > 64:
                break
            waiting += [x.producer() for x in node.inputs if x is not None]
    return nodes


# -- masks, combined to the mask of one node -------------------------------------------------------


class _Masks:
    """Converter of the masks of one attention.

    `query`: The queries of the node, `[B, H, L, D]`.
    `key`: Its keys, `[B, Hkv, S, D]`.
    """

    def __init__(
        self, op: Builder, views: Views, heads: Heads, query: ir.Value, key: ir.Value
    ) -> None:
        self._op, self._views, self._heads, self._key = op, views, heads, key
        self._query, self._dtype = query, query.dtype
        self._rows = (dims(query)[2], dims(key)[2])

    def combined(self, masks: Sequence[Mask]) -> ir.Value | None:
        """Combine all masks: to a bool one if all of them hide by -inf, else to an added one."""
        op, dtype = self._op, self._dtype
        if not masks:
            return None
        if dtype is None:
            raise NoMatchError
        values = [self._four_axes(mask) for mask in masks]
        if all(mask.visible and mask.low == -math.inf for mask in masks):
            return self._spread(self._joined("And", values, ir.DataType.BOOL))
        numbers = []
        for mask, number in zip(masks, values, strict=True):
            shape = number.shape
            if mask.visible:
                lowest = float(np.finfo(dtype.numpy()).min)
                floor = max(mask.low, lowest) if mask.low > -math.inf else mask.low
                number = op("Where", number, op.scalar(0.0, dtype), op.scalar(floor, dtype))
            elif number.dtype not in (None, dtype):
                number = op("Cast", number, to=dtype)
            if mask.factor != 1 and not mask.visible:
                number = op("Mul", number, op.scalar(mask.factor, dtype))
            numbers.append(set_type(number, dtype, shape))
        return self._spread(self._joined("Add", numbers, dtype))

    def with_sink(
        self, value: ir.Value, mask: ir.Value | None, sink: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Return keys and values with one more key of zeros, to which the mask adds the sink.

        `value`: The values, `[B, Hkv, S, Dv]`.
        """
        op, dtype, key = self._op, self._dtype, self._key
        if dtype is None or sink.dtype != dtype or len(dims(sink)) != 4:
            raise NoMatchError
        one_more = op.ints(0, 0, 0, 0, 0, 0, 1, 0)
        longer = [op("Pad", x, one_more) for x in (key, value)]
        keys = dims(key)[2]
        total = keys + 1 if isinstance(keys, int) else ir.SymbolicDim(f"{keys.value} + 1")
        for old, new in zip((key, value), longer, strict=True):
            set_type(new, dtype, ir.Shape([*dims(old)[:2], total, dims(old)[3]]))
        before = op("Concat", op.ints(0, 0, 0), op.size(key, 2), op.ints(0, 0, 0, 0), axis=0)
        bias = set_type(op("Pad", sink, before), dtype, ir.Shape([*dims(sink)[:3], total]))
        if mask is None:
            return longer[0], longer[1], bias
        if mask.dtype == ir.DataType.BOOL:
            numbers = op("Where", mask, op.scalar(0.0, dtype), op.scalar(-math.inf, dtype))
            mask = set_type(numbers, dtype, mask.shape)
        rank = len(dims(mask))
        padded = op("Pad", mask, op.ints(*[0] * (2 * rank - 1), 1))
        set_type(padded, dtype, ir.Shape([*dims(mask)[:-1], total]))
        return longer[0], longer[1], self._joined("Add", [padded, bias], dtype)

    def _four_axes(self, mask: Mask) -> ir.Value:
        """Return a mask that broadcasts to `[B, H, L, S]`, of 2 or 4 axes."""
        op, value, leads = self._op, mask.value, mask.leads
        rank, count = len(dims(value)), self._heads.count
        if not rank:
            raise NoMatchError
        is_split = len(leads) == 2 and all(map(known_equal, leads, (self._heads.batch, count)))
        if rank > 2 and not is_split:
            heads = Heads(self._heads.batch, count, leads)
            for wanted in (1, count):
                with contextlib.suppress(NoMatchError):
                    return self._views.with_heads(op, value, heads, count=wanted)[0]
            return self._merged(mask)
        if rank in (1, 3):
            unsqueezed = op("Unsqueeze", value, op.ints(0))
            return set_type(unsqueezed, value.dtype, ir.Shape([1, *dims(value)]))
        return value

    def _merged(self, mask: Mask) -> ir.Value:
        """Return a mask with all leading axes of the scores, merged to `[B, H, L, S]`."""
        op, count = self._op, self._heads.count
        known = [size for size in mask.leads if isinstance(size, int)]
        if len(known) < len(mask.leads) - 1 or math.prod(known) % count:
            raise NoMatchError
        other = op("Div", op.size(self._query, 0), op.ints(math.prod(known) // count))
        sizes = [op.ints(size) if isinstance(size, int) else other for size in mask.leads]
        whole = op("Expand", mask.value, op("Concat", *sizes, *self._row_sizes(), axis=0))
        target = op("Concat", op.ints(-1, count), *self._row_sizes(), axis=0)
        shape = ir.Shape([self._heads.batch, count, *self._rows])
        return set_type(op("Reshape", whole, target), mask.value.dtype, shape)

    def _spread(self, mask: ir.Value) -> ir.Value:
        """Return a mask with all queries and keys, if its axes are not known to be 1 or theirs."""
        ends = zip(dims(mask)[-2:], self._rows, strict=True)
        if all(size == 1 or known_equal(size, end) for size, end in ends):
            return mask
        op, leads = self._op, dims(mask)[:-2]
        ones = [op.ints(*[1] * len(leads))] if leads else []
        grown = op("Expand", mask, op("Concat", *ones, *self._row_sizes(), axis=0))
        return set_type(grown, mask.dtype, ir.Shape([*leads, *self._rows]))

    def _joined(self, op_type: str, masks: Sequence[ir.Value], dtype: ir.DataType) -> ir.Value:
        """Combine masks by an operator, and set the broadcast shape."""
        joined, *others = masks
        for other in others:
            rank = max(len(dims(joined)), len(dims(other)))
            first, second = ((1,) * (rank - len(dims(x))) + dims(x) for x in (joined, other))
            shape = [b if a == 1 else a for a, b in zip(first, second, strict=True)]
            joined = set_type(self._op(op_type, joined, other), dtype, ir.Shape(shape))
        return joined

    def _row_sizes(self) -> list[ir.Value]:
        return [self._op.size(self._query, 2), self._op.size(self._key, 2)]


# -- all forms of attention of other exporters --------------------------------------------------


def recognise(model: ir.Model, dialect: str, observed: Observed | None) -> tuple[ir.Model, int]:
    """Return a graph with `Attention` nodes for attention of other forms, and their number."""
    if observed is not None:
        normal = normalise(model.clone(), observed)
        count = _recognise_decomposed(normal)
        count += from_contrib(normal) if dialect in (STANDARD, PORTABLE) else 0
        return (normal, count) if count else (model, 0)
    # Exporters leave out shapes of parts, as of `baddbmm`.
    model = with_shapes(model, [x for node in model.graph for x in node.outputs])
    return model, _recognise_decomposed(model)


def _recognise_decomposed(model: ir.Model) -> int:
    recognised = recognise_attention(model) if nodes_of(model, "Softmax") else 0
    if recognised:
        make_ort_compatible(model)
    return recognised
