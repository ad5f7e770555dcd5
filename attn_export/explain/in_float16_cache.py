"""Known mistakes in rounding new keys and values to a cache in float16."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from attn_export.explain.mistake import (
    ArrayChange,
    Mistake,
    array_of,
    join,
    round_to_bfloat16,
    scatter_into_cache,
)
from attn_export.float64.evaluate import ROUNDED_TO, Evaluation, Values
from attn_export.tensorfile import Array


@dataclasses.dataclass(frozen=True)
class _CachePart:
    """The keys, or the values, of a cache in float16 in a graph.

    Attributes:
        new: The name of the new tokens before they are rounded, `[B, Hkv, L, D]`.
        widened: The outputs of the Casts of the cache to the type of the layer, `[B, Hkv, S, D]`.
    """

    new: str
    scatter: onnx.NodeProto
    widened: Sequence[str]


def _toward(end: float) -> ArrayChange:
    """Return a rounding toward 0 for `end` 0, and away from 0 for infinity."""

    def rounded(x: Array) -> Array:
        nearest = x.astype(np.float16)
        is_beyond = np.abs(nearest.astype(np.float64)) > np.abs(x)
        is_exact = nearest == x
        steps = np.nextafter(nearest, np.copysign(np.float16(end), nearest))
        return np.where(is_exact | (is_beyond != (end == 0)), nearest, steps)

    return rounded


KIND = "cache rounding"
ROUNDINGS: Final[tuple[tuple[str, ArrayChange], ...]] = (
    ("new {} are rounded to float16 toward 0, not to nearest", _toward(0.0)),
    ("new {} are rounded to float16 away from 0, not to nearest", _toward(np.inf)),
    (
        "new {} are rounded to bfloat16 before float16",
        lambda x: round_to_bfloat16(x).astype(np.float16),
    ),
)
"""Effect and rounding of each mistake; ``{}`` stands for keys, values or both. A rounding takes new
tokens `[B, Hkv, L, D]`, and returns them in float16."""


def float16_cache_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes in rounding and writing new keys, new values, and both."""
    parts = _cache_parts(evaluation)
    groups = [("keys and values", parts)] if parts else []
    if len(parts) == 2:
        groups += [("keys", parts[:1]), ("values", parts[1:])]
    for name, group in groups:
        node = group[0].scatter.name
        for effect, rounding in ROUNDINGS:
            changes = [functools.partial(_write, evaluation, p, p, rounding) for p in group]
            yield Mistake(KIND, effect.format(name), node, join(changes))
        effect = f"attention reads new {name} that are not rounded to float16"
        changes = [functools.partial(_read_unrounded, evaluation, p) for p in group]
        yield Mistake(KIND, effect, node, join(changes))
    if len(parts) == 2:
        keys, values = parts
        changes = [
            functools.partial(_write, evaluation, part, source, lambda x: x.astype(np.float16))
            for part, source in ((keys, values), (values, keys))
        ]
        effect = "values are written as keys, and keys as values"
        yield Mistake("keys and values exchanged", effect, keys.scatter.name, join(changes))


def _cache_parts(evaluation: Evaluation) -> list[_CachePart]:
    """Return the parts of a cache in float16: keys, then values."""
    parts = []
    for node in evaluation.nodes:
        cast = evaluation.producer.get(node.input[1]) if node.op_type == "TensorScatter" else None
        if cast is None or not _rounds_to_float16(cast):
            continue
        output = node.output[0]
        widened = [
            reader.output[0]
            for reader in evaluation.nodes
            if reader.op_type == "Cast" and reader.input[0] == output
        ]
        parts.append(_CachePart(cast.input[0], node, widened))
    return parts


def _rounds_to_float16(node: onnx.NodeProto) -> bool:
    return any(a.name == ROUNDED_TO and a.i == TensorProto.FLOAT16 for a in node.attribute)


def _write(
    evaluation: Evaluation, part: _CachePart, source: _CachePart, rounding: ArrayChange,
    values: Values,
) -> Mapping[str, Array]:  # fmt: skip
    """Return the cache of `part` after the rounded new tokens of `source` are written to it."""
    past, tokens = array_of(values, part.scatter.input[0]), rounding(array_of(values, source.new))
    cache = scatter_into_cache(part.scatter, evaluation, values, past, tokens)
    return {part.scatter.output[0]: cache, **dict.fromkeys(part.widened, cache.astype(np.float64))}


def _read_unrounded(
    evaluation: Evaluation, part: _CachePart, values: Values
) -> Mapping[str, Array]:
    """Return what attention reads if new tokens are written to a copy of the cache in float64."""
    past = array_of(values, part.scatter.input[0]).astype(np.float64)
    tokens = array_of(values, part.new)
    cache = scatter_into_cache(part.scatter, evaluation, values, past, tokens)
    return dict.fromkeys(part.widened, cache)
