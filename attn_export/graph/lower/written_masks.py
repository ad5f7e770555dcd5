"""Masks of attention that is written out in operators, combined to the mask of one node."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import known_equal
from attn_export.graph.ir_helpers import dims, set_type
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.views import Heads, NoMatchError, Views
from attn_export.graph.lower.written_scores import Mask


class Masks:
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
