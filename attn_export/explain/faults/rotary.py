"""Known faults of rotary embeddings whose angles the graph computes itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from attn_export.explain.faults.fault import (
    NOTHING,
    Changes,
    Fault,
    GraphPlace,
    Locator,
    array_of,
    plain,
    rows,
    together,
)
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

# -- places -------------------------------------------------------------------------------------


def angles(evaluation: Evaluation, _: Values = NOTHING) -> Iterator[GraphPlace]:
    """Find each product of positions and frequencies of which a Cos and a Sin are taken."""
    for node in evaluation.nodes:
        for sine in evaluation.nodes if node.op_type == "Cos" else ():
            if sine.op_type != "Sin" or sine.input != node.input:
                continue
            angle = _without_reshapes(evaluation, node.input[0])
            product = evaluation.producer.get(angle, node)
            steps = {"angle": angle, "sine": sine.output[0]}
            given: dict[str, Any] = {}
            for name in product.input if product.op_type in {"Mul", "MatMul"} else ():
                array = evaluation.initializers.get(name)
                if array is None:
                    steps.setdefault("positions", name)
                elif array.size > 1:
                    given.setdefault("frequencies", array)
            yield GraphPlace("", product.name, steps, given)


def _angles_of_a_base(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find angles whose frequencies are powers of a base, as far as they tell it."""
    for place in angles(evaluation):
        f = place.given.get("frequencies")
        if f is not None and f[0] == 1 and 0 < f[1] < 1:
            yield place


def _without_reshapes(evaluation: Evaluation, name: str) -> str:
    """Return the value of which a value is an unsqueezed or cast copy."""
    producer = evaluation.producer.get(name)
    while producer is not None and producer.op_type in {"Unsqueeze", "Reshape", "Cast"}:
        name = producer.input[0]
        producer = evaluation.producer.get(name)
    return name


@functools.cache
def rotations(*, interleaved: bool | None = None) -> Locator:
    """Return what finds rotations of pairs a, b to a·cos - b·sin, b·cos + a·sin: all, and each.

    `interleaved`: Whether pairs are elements 2i and 2i + 1, not i and i + R/2; None for either.
    """

    def places(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
        if not any(angles(evaluation)):
            return
        found = list(_rotations(evaluation))
        groups = [found, *([each] for each in found if len(found) > 1)] if found else []
        for group in groups:
            node, output, _names, is_interleaved = group[0]
            if interleaved in (None, is_interleaved):
                name = f" in {output} alone" if len(group) < len(found) else ""
                computes = [functools.partial(_rotate, o, names, i) for _node, o, names, i in group]
                yield GraphPlace(name, node.name, compute=together(computes))

    return places


def _rotations(
    evaluation: Evaluation,
) -> Iterator[tuple[onnx.NodeProto, str, Sequence[str], bool]]:
    """Yield node, output, names of a, b, cos and sin, and whether pairs are interleaved.

    Only the order of factors a·cos, b·sin of `attention/positions` is found.
    """
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
        yield node, output, (a, b, cos, sin), interleaved


def _rotate(
    output: str, operands: Sequence[str], interleaved: bool, values: Values, changes: Changes
) -> Mapping[str, Array]:
    """Return a rotation with its one step, the pair ``rotated``, changed."""
    at = {n: array_of(values, o) for n, o in zip(("a", "b", "cos", "sin"), operands, strict=True)}
    a, b = changes["rotated"]((), {**at, "interleaved": interleaved})
    return {output: _join_pairs(a, b, interleaved=interleaved)}


def _join_pairs(a: Array, b: Array, *, interleaved: bool) -> Array:
    """Return heads `[..., R]` of pairs of which a and b `[..., R/2]` are the parts."""
    if not interleaved:
        return np.concatenate([a, b], axis=-1)
    return np.stack([a, b], axis=-1).reshape(*a.shape[:-1], -1)


# -- changes ------------------------------------------------------------------------------------


def _angle(function: Callable[[Array, Array], Array]) -> Changes:
    """Return the change to a function of positions `[..., L, 1]` and frequencies `[R/2]`."""

    def change(_: Array, at: Mapping[str, Any]) -> Array:
        if at["positions"].shape[-1:] != (1,):
            raise ValueError("the positions have another axis")
        return np.asarray(function(at["positions"], at["frequencies"]))

    return {"angle": change}


def _of_base(base: float) -> Changes:
    return _angle(lambda p, f: p * base ** (-np.arange(f.shape[-1]) / f.shape[-1]))


def _pair(function: Callable[..., tuple[Array, Array]]) -> Changes:
    """Return the change to a function of a, b, cos and sin."""
    return {"rotated": lambda _, at: function(at["a"], at["b"], at["cos"], at["sin"])}


def _other_pairs(*, stored: bool) -> Changes:
    """Return the rotation of the pairs of the other layout.

    `stored`: Whether results are where those of the right pairs are.
    """

    def change(_: object, at: Mapping[str, Any]) -> tuple[Array, Array]:
        interleaved, cos, sin = at["interleaved"], at["cos"], at["sin"]
        x, y = _pairs(_join_pairs(at["a"], at["b"], interleaved=interleaved), not interleaved)
        turned = x * cos - y * sin, y * cos + x * sin
        head = _join_pairs(*turned, interleaved=interleaved == stored)
        return _pairs(head, interleaved)

    return {"rotated": change}


def _pairs(head: Array, interleaved: bool) -> tuple[Array, Array]:
    if interleaved:
        return head[..., 0::2], head[..., 1::2]
    a, b = np.split(head, 2, axis=-1)
    return a, b


def _times(_: GraphPlace, factor: float) -> tuple[str, Changes]:
    effect = f"rotary positions are {factor:.4g} times what they should be"
    return effect, _angle(lambda p, f: p * factor * f)


def _base_to_the(place: GraphPlace, power: float) -> tuple[str, Changes]:
    frequencies = place.given["frequencies"]
    right = float(frequencies[1]) ** -len(frequencies)
    return f"the rotary base is {right**power:.4g} in place of {right:.4g}", _of_base(right**power)


# -- the table ----------------------------------------------------------------------------------

OFFSET, FREQUENCIES = "position offset", "rotary frequencies"
REVERSED, SIGN, PAIRS = "rotation reversed", "rotation sign", "rotary pairs"
HALVES, NEIGHBOURS = "(i, i + R/2)", "(2i, 2i + 1)"
IN_ROTARY: Final = (
    *rows(angles,
        (OFFSET, "rotary positions are 1 too high", _angle(lambda p, f: (p + 1) * f)),
        (OFFSET, "rotary positions are 1 too low", _angle(lambda p, f: (p - 1) * f)),
        (OFFSET, "rotary positions start at 0 and ignore the past",
         _angle(lambda p, f: (p - p[..., :1, :]) * f)),
        (OFFSET, "rotary positions start at 1 and ignore the past",
         _angle(lambda p, f: (p - p[..., :1, :] + 1) * f)),
        ("positions of one batch row", "rotary positions of batch row 0 are used for every one",
         _angle(lambda p, f: np.broadcast_to(p[:1], p.shape) * f)),
        ("positions reversed", "rotary positions run backwards",
         _angle(lambda p, f: p[..., ::-1, :] * f)),
        (REVERSED, "heads are rotated in the opposite direction", {"sine": plain(np.negative)}),
        *((FREQUENCIES, f"the rotary base is {base:g}", _of_base(base))
          for base in (1e4, 5e5, 1e6)),
        (FREQUENCIES, "the exponents of the rotary base are half of what they should be",
         _angle(lambda p, f: p * np.sqrt(f)))),
    Fault(angles, "rotary positions", "", {}, factor=_times),
    Fault(_angles_of_a_base, FREQUENCIES, "", {}, factor=_base_to_the),
    *rows(rotations(),
        ("rotation left out", "the rotary embedding is not applied{}",
         _pair(lambda a, b, *_: (a, b))),
        (REVERSED, "heads are rotated in the opposite direction{}",
         _pair(lambda a, b, cos, sin: (a * cos + b * sin, b * cos - a * sin))),
        (SIGN, "a sine has the wrong sign in the first part of each pair{}",
         _pair(lambda a, b, cos, sin: (a * cos + b * sin, b * cos + a * sin))),
        (SIGN, "a sine has the wrong sign in the second part of each pair{}",
         _pair(lambda a, b, cos, sin: (a * cos - b * sin, b * cos - a * sin))),
        ("rotation swapped", "cosines are used as sines, and sines as cosines{}",
         _pair(lambda a, b, cos, sin: (a * sin - b * cos, b * sin + a * cos)))),
    *(row for right, wrong, interleaved in (
        (HALVES, NEIGHBOURS, False), (NEIGHBOURS, HALVES, True))
      for row in rows(rotations(interleaved=interleaved),
        (PAIRS, f"pairs are {wrong} in place of {right}{{}}", _other_pairs(stored=False)),
        (PAIRS, f"pairs are {wrong} in place of {right}{{}}, and stored as {right}",
         _other_pairs(stored=True)))),
)  # fmt: skip
