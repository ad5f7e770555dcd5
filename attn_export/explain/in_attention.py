"""Known mistakes within an `Attention` node: scale, heads, causal mask, softcap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from attn_export.explain.attention_steps import Change
from attn_export.explain.misreadings import MISREADINGS, At
from attn_export.explain.mistake import Mistake, in_attention
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.explain.evaluate import Evaluation, Values

OF_CAUSAL = frozenset({"causal dropped", "causal offset", "mask dropped beside causal"})
MANY_HEADS = 32
"""Of more, not every pair is tried."""


def attention_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the known mistakes of every `Attention` node."""
    for node in evaluation.nodes:
        if node.op_type == "Attention":
            causal = any(a.name == "is_causal" and a.i for a in node.attribute)
            impossible = {"causal added"} if causal else OF_CAUSAL
            if not softcap_of(node):
                impossible |= {"softcap"}
            for each in MISREADINGS:
                if each.kind not in impossible:
                    yield in_attention(evaluation, node, each.kind, each.says, **each.changes)
            yield _keys_for_values(evaluation, node)


def swapped_heads(evaluation: Evaluation, node: onnx.NodeProto) -> Iterator[Mistake]:
    """Yield a mistake for each pair of query heads whose results are swapped.

    Args:
        evaluation: The graph, evaluated in float64.
        node: The node.
    """
    for a, b in itertools.combinations(range(MANY_HEADS), 2):
        says = f"the results of query heads {a} and {b} are swapped"
        yield in_attention(evaluation, node, "swapped heads", says, attended=_swap(a, b))


def scaled(evaluation: Evaluation, node: onnx.NodeProto, factor: float) -> Mistake:
    """Return the mistake of multiplying scores by `factor` times the right scale.

    Args:
        evaluation: The right graph.
        node: Its `Attention` node.
        factor: The factor on the scale.
    """
    says = f"the softmax scale is {factor:.4g} times what it should be"
    return in_attention(evaluation, node, "scale", says, scale=lambda scale, _: scale * factor)


def capped_at(evaluation: Evaluation, node: onnx.NodeProto, factor: float) -> Mistake:
    """Return the mistake of another softcap: `factor` times the right one.

    Args:
        evaluation: The right graph.
        node: Its `Attention` node.
        factor: The factor on the softcap.
    """
    says = f"the softcap is {factor:.4g} times what it should be"
    return in_attention(evaluation, node, "softcap", says, softcap=lambda cap, _: cap * factor)


def softcap_of(node: onnx.NodeProto) -> float:
    """Return the softcap of an `Attention` node; 0 if it has none."""
    return next((a.f for a in node.attribute if a.name == "softcap"), 0.0)


def _keys_for_values(evaluation: Evaluation, node: onnx.NodeProto) -> Mistake:
    def replaced(values: Values) -> dict[str, Array]:
        named = [*node.input, *[""] * 6]
        k, v, past_k, past_v = (values[named[i]] for i in (1, 2, 4, 5))
        if k is None or v is None or k.shape != v.shape:
            return {}
        crossed = {named[1]: v, named[2]: k, named[4]: past_v, named[5]: past_k}
        found = evaluation.attention(node, {**values, **crossed, "": None}, {})
        return {node.output[0]: found[node.output[0]]}

    return Mistake(
        "keys and values swapped", "keys are used as values, and values as keys",
        node.name, replaced,
    )  # fmt: skip


def _swap(a: int, b: int) -> Change:
    def change(attended: Array, _: At) -> Array:
        order = np.arange(attended.shape[1])
        order[[a, b]] = b, a
        return attended[:, order]

    return change
