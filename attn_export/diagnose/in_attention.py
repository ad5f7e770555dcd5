"""Known mistakes within an `Attention` node, and in the rotary embedding before it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx

from attn_export.diagnose.attention_steps import StepChange
from attn_export.diagnose.evaluate import Evaluation, Values
from attn_export.diagnose.misreadings import MISREADINGS, StepValues
from attn_export.diagnose.mistake import (
    Mistake,
    Replacement,
    array_of,
    change_value,
)
from attn_export.tensorfile import Array

NEEDS_CAUSAL = frozenset({"causal dropped", "causal offset", "mask dropped beside causal"})
"""Kinds of misreadings that are possible in causal nodes only."""

MOST_HEADS = 32
"""The number of query heads, from the first on, of which every pair is tried."""


def attention_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the known mistakes of every `Attention` node."""
    for node in _attention_nodes(evaluation):
        causal = any(a.name == "is_causal" and a.i for a in node.attribute)
        impossible = {"causal added"} if causal else NEEDS_CAUSAL
        if not _has_softcap(node):
            impossible |= {"softcap"}
        for misreading in MISREADINGS:
            if misreading.kind not in impossible:
                kind, effect = misreading.kind, misreading.effect
                yield _step_mistake(evaluation, node, kind, effect, misreading.changes)
        yield _swap_keys_and_values(evaluation, node)


def head_swaps(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield, for each pair of the first `MOST_HEADS` query heads, the mistake of swapping them.

    A pair beyond the heads of the node raises NotComputedError, and `match` skips it.
    """
    for node in _attention_nodes(evaluation):
        for a, b in itertools.combinations(range(MOST_HEADS), 2):
            effect = f"the results of query heads {a} and {b} are swapped"
            changes = {"attended": _swap_heads(a, b)}
            yield _step_mistake(evaluation, node, "swapped heads", effect, changes)


def fitted_scales_and_softcaps(evaluation: Evaluation) -> list[Callable[[float], Mistake]]:
    """Return functions from a factor to the mistake of a scale or softcap wrong by this factor."""

    def make(node: onnx.NodeProto, step: str, name: str, factor: float) -> Mistake:
        effect = f"the {name} is {factor:.4g} times what it should be"
        return _step_mistake(evaluation, node, step, effect, {step: lambda x, _: x * factor})

    makers: list[Callable[[float], Mistake]] = []
    for node in _attention_nodes(evaluation):
        makers.append(functools.partial(make, node, "scale", "softmax scale"))
        if _has_softcap(node):
            makers.append(functools.partial(make, node, "softcap", "softcap"))
    return makers


def _step_mistake(
    evaluation: Evaluation, node: onnx.NodeProto, kind: str, effect: str,
    changes: Mapping[str, StepChange],
) -> Mistake:  # fmt: skip
    """Return the mistake of changing steps of an `Attention` node."""
    return Mistake(
        kind, effect, node.name, lambda values: evaluation.attention(node, values, changes)
    )


def _attention_nodes(evaluation: Evaluation) -> list[onnx.NodeProto]:
    return [node for node in evaluation.nodes if node.op_type == "Attention"]


def _has_softcap(node: onnx.NodeProto) -> bool:
    return any(a.name == "softcap" and a.f for a in node.attribute)


def _swap_keys_and_values(evaluation: Evaluation, node: onnx.NodeProto) -> Mistake:
    names = [*node.input, *[""] * 6]
    k, v, past_k, past_v = (names[i] for i in (1, 2, 4, 5))

    def replaced(values: Values) -> dict[str, Array]:
        if array_of(values, k).shape != array_of(values, v).shape:
            return {}
        swapped = {k: values[v], v: values[k], past_k: values[past_v], past_v: values[past_k]}
        # An input that is left out has the name "". The outputs with the cache stay right.
        outputs = evaluation.attention(node, {**values, **swapped, "": None}, {})
        return {node.output[0]: outputs[node.output[0]]}

    return Mistake(
        "keys and values swapped", "keys are used as values, and values as keys",
        node.name, replaced,
    )  # fmt: skip


def _swap_heads(a: int, b: int) -> StepChange:
    def change(attended: Array, _: StepValues) -> Array:
        order = np.arange(attended.shape[1])
        order[[a, b]] = b, a
        return attended[:, order]

    return change


# -- rotary positions, in a graph that computes their angles itself -----------------------------


BASES = (1e4, 5e5, 1e6)
"""Wrong bases of the rotary frequencies that are tried."""


def rotary_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of rotary embeddings: positions, direction, frequencies, channel pairs."""
    angles = [
        (node, sine)
        for node in evaluation.nodes if node.op_type == "Cos"
        for sine in evaluation.nodes if sine.op_type == "Sin" and sine.input == node.input
    ]  # fmt: skip
    for cosine, sine in angles:
        yield from _angle_mistakes(evaluation, cosine, sine)
    if angles:
        yield from _rotation_mistakes(evaluation)


def _angle_mistakes(
    evaluation: Evaluation, cosine: onnx.NodeProto, sine: onnx.NodeProto
) -> Iterator[Mistake]:
    """Yield the mistakes of the angles position · frequency, `[..., L, R/2]`."""
    change = functools.partial(_change_angle, evaluation, cosine.input[0])
    offset = "position offset"
    for kind, effect, replaced in (
        (offset, "rotary positions are 1 too high", change(lambda p, f: (p + 1) * f)),
        (offset, "rotary positions are 1 too low", change(lambda p, f: (p - 1) * f)),
        (offset, "rotary positions start at 0 and ignore the past",
         change(lambda p, f: (p - p[..., :1, :]) * f)),
        ("rotation reversed", "heads are rotated in the opposite direction",
         change_value(sine.output[0], np.negative)),
        *(("rotary frequencies", f"the rotary base is {base:g}",
           change(functools.partial(_multiply_by_frequencies, base))) for base in BASES),
    ):  # fmt: skip
        yield Mistake(kind, effect, cosine.name, replaced)


def _multiply_by_frequencies(base: float, positions: Array, right_frequencies: Array) -> Array:
    count = right_frequencies.shape[-1]
    return np.asarray(positions * base ** (-np.arange(count) / count))


def _change_angle(
    evaluation: Evaluation, angle: str, change: Callable[[Array, Array], Array]
) -> Replacement:
    """Return a function that computes an angle by `change` of its positions and frequencies."""

    def replaced(values: Values) -> Mapping[str, Array]:
        factors = _positions_and_frequencies(evaluation, angle, values)
        return {} if factors is None else {angle: change(*factors)}

    return replaced


def _positions_and_frequencies(
    evaluation: Evaluation, angle: str, values: Values
) -> tuple[Array, Array] | None:
    """Return the factors of an angle, `[..., L, 1]` and `[R/2]`; None if it is no such product."""
    product = evaluation.producer.get(angle)
    if product is None or product.op_type not in {"Mul", "MatMul"}:
        return None
    for name, other in (product.input, product.input[::-1]):
        frequencies, positions = evaluation.initializers.get(name), values[other]
        if frequencies is None or positions is None or frequencies.size <= 1:
            continue
        if positions.ndim and positions.shape[-1] == 1:
            return positions, frequencies
    return None


def _rotation_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield mistakes of rotations: Concat(a·cos - b·sin, b·cos + a·sin) of halves a, b of heads."""
    for node in evaluation.nodes:
        names = _rotation_operands(evaluation, node)
        if names is not None:
            effect = "the rotary embedding is not applied"
            unrotated = _replace_rotation(node, names, lambda a, b, *_: np.concatenate([a, b], -1))
            yield Mistake("rotation left out", effect, node.name, unrotated)
            effect = "pairs are (2i, 2i + 1) in place of (i, i + R/2)"
            rotated = _replace_rotation(node, names, _rotate_neighbours)
            yield Mistake("rotary pairs", effect, node.name, rotated)


RotationNames = tuple[str, str, str, str]
"""The names of a, b, cos and sin."""


def _rotation_operands(evaluation: Evaluation, node: onnx.NodeProto) -> RotationNames | None:
    """Return the names of a, b, cos and sin, if the node is the Concat of a rotation.

    Only the order of factors a·cos, b·sin is known, that of `attention/positions`.
    """
    made_by = [evaluation.producer.get(name) for name in node.input]
    if node.op_type != "Concat" or [n.op_type if n else "" for n in made_by] != ["Sub", "Add"]:
        return None
    assert made_by[0] is not None
    products = [evaluation.producer.get(name) for name in made_by[0].input]
    if any(n is None or n.op_type != "Mul" for n in products):
        return None
    (a, cos), (b, sin) = (list(n.input) for n in products if n is not None)
    return a, b, cos, sin


def _replace_rotation(
    node: onnx.NodeProto,
    names: RotationNames,
    rotate: Callable[[Array, Array, Array, Array], Array],
) -> Replacement:
    def replaced(values: Values) -> Mapping[str, Array]:
        a, b, cos, sin = (array_of(values, name) for name in names)
        return {node.output[0]: rotate(a, b, cos, sin)}

    return replaced


def _rotate_neighbours(a: Array, b: Array, cos: Array, sin: Array) -> Array:
    head = np.concatenate([a, b], axis=-1)
    even, odd = head[..., 0::2], head[..., 1::2]
    turned = np.empty_like(head)
    turned[..., 0::2], turned[..., 1::2] = even * cos - odd * sin, odd * cos + even * sin
    return turned
