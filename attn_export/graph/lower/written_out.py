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
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.graph.axis_names import Size
from attn_export.graph.ir_helpers import dims, nodes_of
from attn_export.graph.lower.new_shapes import reordered
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.read import WEIGHTS
from attn_export.graph.lower.views import Heads, NoMatchError, Views
from attn_export.graph.lower.written_masks import Masks
from attn_export.graph.lower.written_scores import Operand, Scores, read_scores
from attn_export.graph.lower.written_weights import Weights, weights_of


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
        self._scores = _with_zeros(read_scores(self._op, source), weights.seen)
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
        masks = Masks(op, views, Heads(batch, count, ()), query, key)
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


def _with_zeros(scores: Scores, seen: ir.Value | None) -> Scores:
    """Return scores whose last mask hides by -inf, since the weights are set to 0 by it, too."""
    if seen is None:
        return scores
    *others, last = scores.masks or (None,)
    if last is None or not last.visible or last.value is not seen:
        raise NoMatchError
    return dataclasses.replace(scores, masks=(*others, dataclasses.replace(last, low=-math.inf)))


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
