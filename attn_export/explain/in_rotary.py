"""Known mistakes of rotary embeddings whose angles the graph computes itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx

from attn_export.explain.mistake import Mistake, Replacement, array_of, change_value, join
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

BASES = (1e4, 5e5, 1e6)
"""Wrong bases of the rotary frequencies that are tried."""


def rotary_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of rotary embeddings: positions, direction, frequencies, channel pairs."""
    angles = _angles(evaluation)
    for node, angle, sine in angles:
        yield from _angle_mistakes(evaluation, node, angle, sine)
    if angles:
        yield from _rotation_mistakes(evaluation)


def fitted_angles(evaluation: Evaluation) -> list[Callable[[float], Mistake]]:
    """Return functions from a factor to the mistake of positions or a base wrong by it."""

    def positions(node: onnx.NodeProto, angle: str, factor: float) -> Mistake:
        effect = f"rotary positions are {factor:.4g} times what they should be"
        change = _change_angle(evaluation, angle, lambda p, f: p * factor * f)
        return Mistake("rotary positions", effect, node.name, change)

    def base(node: onnx.NodeProto, angle: str, right_base: float, factor: float) -> Mistake:
        wrong = right_base * factor**3
        effect = f"the rotary base is {wrong:.4g} in place of {right_base:.4g}"
        change = _change_angle(evaluation, angle, functools.partial(_multiply_by_powers, wrong))
        return Mistake("rotary frequencies", effect, node.name, change)

    makers: list[Callable[[float], Mistake]] = []
    for node, angle, _ in _angles(evaluation):
        makers.append(functools.partial(positions, node, angle))
        frequencies = _frequencies(evaluation, angle)
        if frequencies is not None and frequencies[0] == 1 and 0 < frequencies[1] < 1:
            right_base = float(frequencies[1]) ** -len(frequencies)
            makers.append(functools.partial(base, node, angle, right_base))
    return makers


# -- angles -------------------------------------------------------------------------------------


def _angles(evaluation: Evaluation) -> list[tuple[onnx.NodeProto, str, onnx.NodeProto]]:
    """Return each Cos with the product that it is taken of, and the Sin of the same angle."""
    return [
        (node, _without_reshapes(evaluation, node.input[0]), sine)
        for node in evaluation.nodes if node.op_type == "Cos"
        for sine in evaluation.nodes if sine.op_type == "Sin" and sine.input == node.input
    ]  # fmt: skip


def _without_reshapes(evaluation: Evaluation, name: str) -> str:
    """Return the value of which a value is an unsqueezed or cast copy."""
    producer = evaluation.producer.get(name)
    while producer is not None and producer.op_type in {"Unsqueeze", "Reshape", "Cast"}:
        name = producer.input[0]
        producer = evaluation.producer.get(name)
    return name


def _angle_mistakes(
    evaluation: Evaluation, node: onnx.NodeProto, angle: str, sine: onnx.NodeProto
) -> Iterator[Mistake]:
    """Yield the mistakes of the angles position · frequency, `[..., L, R/2]`."""
    change = functools.partial(_change_angle, evaluation, angle)
    product = evaluation.producer.get(angle, node)
    offset = "position offset"
    for kind, effect, replaced in (
        (offset, "rotary positions are 1 too high", change(lambda p, f: (p + 1) * f)),
        (offset, "rotary positions are 1 too low", change(lambda p, f: (p - 1) * f)),
        (offset, "rotary positions start at 0 and ignore the past",
         change(lambda p, f: (p - p[..., :1, :]) * f)),
        (offset, "rotary positions start at 1 and ignore the past",
         change(lambda p, f: (p - p[..., :1, :] + 1) * f)),
        ("positions of one batch row", "rotary positions of batch row 0 are used for every one",
         change(lambda p, f: np.broadcast_to(p[:1], p.shape) * f)),
        ("positions reversed", "rotary positions run backwards",
         change(lambda p, f: p[..., ::-1, :] * f)),
        ("rotation reversed", "heads are rotated in the opposite direction",
         change_value(sine.output[0], np.negative)),
        *(("rotary frequencies", f"the rotary base is {base:g}",
           change(functools.partial(_multiply_by_powers, base))) for base in BASES),
        ("rotary frequencies", "the exponents of the rotary base are half of what they should be",
         change(lambda p, f: p * np.sqrt(f))),
    ):  # fmt: skip
        yield Mistake(kind, effect, product.name, replaced)


def _multiply_by_powers(base: float, positions: Array, right_frequencies: Array) -> Array:
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


def _frequencies(evaluation: Evaluation, angle: str) -> Array | None:
    """Return the factor of an angle that is an initialiser `[R/2]`; None if there is none."""
    product = evaluation.producer.get(angle)
    if product is None or product.op_type not in {"Mul", "MatMul"}:
        return None
    arrays = (evaluation.initializers.get(name) for name in product.input)
    return next((array for array in arrays if array is not None and array.size > 1), None)


def _positions_and_frequencies(
    evaluation: Evaluation, angle: str, values: Values
) -> tuple[Array, Array] | None:
    """Return the factors of an angle, `[..., L, 1]` and `[R/2]`; None if it is no such product."""
    frequencies = _frequencies(evaluation, angle)
    if frequencies is None:
        return None
    for name in evaluation.producer[angle].input:
        positions = values[name]
        if name not in evaluation.initializers and positions is not None:
            return (positions, frequencies) if positions.shape[-1:] == (1,) else None
    return None


# -- rotations ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rotation:
    """A rotation of pairs a, b: a·cos - b·sin and b·cos + a·sin.

    Attributes:
        operands: The names of a, b, cos and sin.
        interleaved: Whether pairs are elements 2i and 2i + 1, not i and i + R/2.
    """

    node: onnx.NodeProto
    output: str
    operands: tuple[str, str, str, str]
    interleaved: bool


Rotate = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""Function from a, b, cos and sin to both parts of the rotated pairs."""

ROTATIONS: Sequence[tuple[str, str, Rotate]] = (
    ("rotation left out", "the rotary embedding is not applied", lambda a, b, *_: (a, b)),
    ("rotation reversed", "heads are rotated in the opposite direction",
     lambda a, b, cos, sin: (a * cos + b * sin, b * cos - a * sin)),
    ("rotation sign", "a sine has the wrong sign in the first part of each pair",
     lambda a, b, cos, sin: (a * cos + b * sin, b * cos + a * sin)),
    ("rotation sign", "a sine has the wrong sign in the second part of each pair",
     lambda a, b, cos, sin: (a * cos - b * sin, b * cos - a * sin)),
    ("rotation swapped", "cosines are used as sines, and sines as cosines",
     lambda a, b, cos, sin: (a * sin - b * cos, b * sin + a * cos)),
)  # fmt: skip
"""Kinds, effects and wrong rotations of the right pairs."""


def _rotation_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield mistakes of the rotations of queries and keys: of all, and of each alone."""
    rotations = list(_rotations(evaluation))
    groups = [rotations] if rotations else []
    groups += [[rotation] for rotation in rotations] if len(rotations) > 1 else []
    for group in groups:
        node = group[0].node.name
        which = f" in {group[0].output} alone" if len(group) < len(rotations) else ""
        for kind, effect, rotate in ROTATIONS:
            changes = [_replace(r, functools.partial(_rotated, r, rotate)) for r in group]
            yield Mistake(kind, f"{effect}{which}", node, join(changes))
        right, wrong = "(i, i + R/2)", "(2i, 2i + 1)"
        if group[0].interleaved:
            right, wrong = wrong, right
        effect = f"pairs are {wrong} in place of {right}{which}"
        for stored, text in ((False, effect), (True, f"{effect}, and stored as {right}")):
            changes = [_replace(r, functools.partial(_other_pairs, r, stored)) for r in group]
            yield Mistake("rotary pairs", text, node, join(changes))


def _rotations(evaluation: Evaluation) -> Iterator[_Rotation]:
    """Yield the rotations; only the order of factors a·cos, b·sin of `attention/positions`."""
    for node in evaluation.nodes:
        parts = [_without_reshapes(evaluation, name) for name in node.input]
        made_by = [evaluation.producer.get(name) for name in parts]
        if node.op_type != "Concat" or [n.op_type if n else "" for n in made_by] != ["Sub", "Add"]:
            continue
        assert made_by[0] is not None
        products = [evaluation.producer.get(name) for name in made_by[0].input]
        if any(n is None or n.op_type != "Mul" for n in products):
            continue
        (a, cos), (b, sin) = (list(n.input) for n in products if n is not None)
        output, interleaved = node.output[0], parts != list(node.input)
        if interleaved:
            reshape = next((n for n in evaluation.nodes if output in n.input), None)
            if reshape is None or reshape.op_type != "Reshape":
                continue
            output = reshape.output[0]
        yield _Rotation(node, output, (a, b, cos, sin), interleaved)


def _replace(rotation: _Rotation, rotate: Callable[..., Array]) -> Replacement:
    def replaced(values: Values) -> Mapping[str, Array]:
        return {rotation.output: rotate(*(array_of(values, name) for name in rotation.operands))}

    return replaced


def _rotated(rotation: _Rotation, rotate: Rotate, *operands: Array) -> Array:
    return _join_pairs(*rotate(*operands), interleaved=rotation.interleaved)


def _other_pairs(
    rotation: _Rotation, stored: bool, a: Array, b: Array, cos: Array, sin: Array
) -> Array:
    """Rotate the pairs of the other layout; `stored` puts the results where the right pairs are."""
    head = _join_pairs(a, b, interleaved=rotation.interleaved)
    if rotation.interleaved:
        x, y = np.split(head, 2, axis=-1)
    else:
        x, y = head[..., 0::2], head[..., 1::2]
    turned = x * cos - y * sin, y * cos + x * sin
    return _join_pairs(*turned, interleaved=rotation.interleaved == stored)


def _join_pairs(a: Array, b: Array, *, interleaved: bool) -> Array:
    """Return heads `[..., R]` of pairs of which a and b `[..., R/2]` are the parts."""
    if not interleaved:
        return np.concatenate([a, b], axis=-1)
    return np.stack([a, b], axis=-1).reshape(*a.shape[:-1], -1)
