"""Known mistakes within an `Attention` node: scale, heads, causal mask, softcap."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from attn_export.diagnose.attention_steps import Change
from attn_export.diagnose.misreadings import MISREADINGS, StepValues
from attn_export.diagnose.mistake import Mistake, attention_step_mistake, change_value
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.diagnose.evaluate import Evaluation, Values

OF_CAUSAL = frozenset({"causal dropped", "causal offset", "mask dropped beside causal"})
MANY_HEADS = 32
"""Largest number of heads of which every pair is tried."""


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
                    yield attention_step_mistake(
                        evaluation, node, each.kind, each.says, **each.changes
                    )
            yield _keys_for_values(evaluation, node)


def swapped_heads(evaluation: Evaluation, node: onnx.NodeProto) -> Iterator[Mistake]:
    """Yield a mistake for each pair of query heads whose results are swapped.

    Args:
        evaluation: The graph, evaluated in float64.
        node: The node.
    """
    for a, b in itertools.combinations(range(MANY_HEADS), 2):
        says = f"the results of query heads {a} and {b} are swapped"
        yield attention_step_mistake(evaluation, node, "swapped heads", says, attended=_swap(a, b))


def scale_mistake(evaluation: Evaluation, node: onnx.NodeProto, factor: float) -> Mistake:
    """Return the mistake of multiplying scores by `factor` times the right scale.

    Args:
        evaluation: The right graph.
        node: Its `Attention` node.
        factor: The factor on the scale.
    """
    says = f"the softmax scale is {factor:.4g} times what it should be"
    return attention_step_mistake(
        evaluation, node, "scale", says, scale=lambda scale, _: scale * factor
    )


def softcap_mistake(evaluation: Evaluation, node: onnx.NodeProto, factor: float) -> Mistake:
    """Return the mistake of another softcap: `factor` times the right one.

    Args:
        evaluation: The right graph.
        node: Its `Attention` node.
        factor: The factor on the softcap.
    """
    says = f"the softcap is {factor:.4g} times what it should be"
    return attention_step_mistake(
        evaluation, node, "softcap", says, softcap=lambda cap, _: cap * factor
    )


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
    def change(attended: Array, _: StepValues) -> Array:
        order = np.arange(attended.shape[1])
        order[[a, b]] = b, a
        return attended[:, order]

    return change


# -- rotary positions, in a graph that computes their angles itself -----------------------------


BASES = (1e4, 5e5, 1e6)


def rotary_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield shifted positions, reversed or missing rotations, other frequencies, other pairs."""
    for node in evaluation.nodes:
        sine = next((n for n in evaluation.nodes if _is_sine_of(n, node)), None)
        if node.op_type == "Cos" and sine is not None:
            yield from _of_angles(evaluation, node, sine)
            yield from _of_blocks(evaluation)


def _is_sine_of(node: onnx.NodeProto, cosine: onnx.NodeProto) -> bool:
    return node.op_type == "Sin" and list(node.input) == list(cosine.input)


def _of_angles(
    evaluation: Evaluation, cosine: onnx.NodeProto, sine: onnx.NodeProto
) -> Iterator[Mistake]:
    """Yield the mistakes of angles: position · frequency, `[..., L, R/2]`."""
    angle, where = cosine.input[0], cosine.name
    kind = "position offset"
    for by in (1, -1):
        says = f"rotary positions are {abs(by)} too {'high' if by > 0 else 'low'}"
        yield Mistake(
            kind, says, where, _with_positions(evaluation, angle, functools.partial(np.add, by))
        )
    says = "rotary positions start at 0, whatever the past is"
    yield Mistake(
        kind, says, where, _with_positions(evaluation, angle, lambda p: p - p[..., :1, :])
    )
    yield Mistake(
        "rotation reversed", "heads are rotated backwards", where,
        change_value(sine.output[0], np.negative),
    )  # fmt: skip
    for base in BASES:
        says = f"the rotary base is {base:g}"
        yield Mistake("rotary frequencies", says, where, _with_base(evaluation, angle, base))


def _with_positions(
    evaluation: Evaluation, angle: str, of: Callable[[Array], Array]
) -> Callable[[Values], Mapping[str, Array]]:
    def replaced(values: Values) -> Mapping[str, Array]:
        position, frequency = _parts(evaluation, angle, values)
        return {} if position is None else {angle: of(position) * frequency}

    return replaced


def _with_base(
    evaluation: Evaluation, angle: str, base: float
) -> Callable[[Values], Mapping[str, Array]]:
    def replaced(values: Values) -> Mapping[str, Array]:
        position, frequency = _parts(evaluation, angle, values)
        if position is None:
            return {}
        count = frequency.shape[-1]
        return {angle: position * base ** (-np.arange(count) / count)}

    return replaced


def _parts(evaluation: Evaluation, angle: str, values: Values) -> tuple[Array | None, Array]:
    """Return positions `[..., L, 1]` and frequencies `[R/2]`, if the angle is their product."""
    product = evaluation.producer.get(angle)
    if product is None or product.op_type not in {"Mul", "MatMul"}:
        return None, np.zeros(0)
    found = [(name, values[name]) for name in product.input]
    for (name, frequency), (_, position) in (found, found[::-1]):
        constant = name in evaluation.initializers and frequency is not None and frequency.size > 1
        if constant and position is not None and position.ndim and position.shape[-1] == 1:
            assert frequency is not None
            return position, frequency
    return None, np.zeros(0)


def _of_blocks(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of rotation blocks.

    A block is Concat(a·cos - b·sin, b·cos + a·sin) of the halves a and b of a head.
    """
    for node in evaluation.nodes:
        parts = _halves(evaluation, node)
        if parts is not None:
            yield Mistake("rotation left out", "a head is passed on as it is", node.name,
                          _block(node, parts, _untouched))  # fmt: skip
            yield Mistake("rotary pairs", "pairs are (2i, 2i + 1) in place of (i, i + R/2)",
                          node.name, _block(node, parts, _neighbours))  # fmt: skip


Parts = tuple[str, str, str, str]


def _halves(evaluation: Evaluation, node: onnx.NodeProto) -> Parts | None:
    """Return the names of a, b, cos and sin, if the node is such a Concat."""
    made_by = [evaluation.producer.get(name) for name in node.input]
    if node.op_type != "Concat" or [n.op_type if n else "" for n in made_by] != ["Sub", "Add"]:
        return None
    assert made_by[0] is not None
    products = [evaluation.producer.get(name) for name in made_by[0].input]
    if any(n is None or n.op_type != "Mul" for n in products):
        return None
    (a, cos), (b, sin) = (list(n.input) for n in products if n is not None)
    return a, b, cos, sin


def _block(
    node: onnx.NodeProto, parts: Parts, of: Callable[[Array, Array, Array, Array], Array]
) -> Callable[[Values], Mapping[str, Array]]:
    def replaced(values: Values) -> Mapping[str, Array]:
        arrays = [values[name] for name in parts]
        a, b, cos, sin = (array for array in arrays if array is not None)
        return {node.output[0]: of(a, b, cos, sin)}

    return replaced


def _untouched(a: Array, b: Array, _cos: Array, _sin: Array) -> Array:
    return np.concatenate([a, b], axis=-1)


def _neighbours(a: Array, b: Array, cos: Array, sin: Array) -> Array:
    head = np.concatenate([a, b], axis=-1)
    even, odd = head[..., 0::2], head[..., 1::2]
    turned = np.empty_like(head)
    turned[..., 0::2], turned[..., 1::2] = even * cos - odd * sin, odd * cos + even * sin
    return turned
