"""Places in caches of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx

from attn_export.explain.mistake import (
    NOTHING,
    Changes,
    Compute,
    GraphPlace,
    array_of,
    together,
)
from attn_export.float64.attention_steps import Steps
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array


def cache_places(
    parts: Mapping[str, tuple[onnx.NodeProto, Compute]], tags: Sequence[str], prefix: str = "",
    given: Mapping[str, Any] = NOTHING,
) -> Iterator[GraphPlace]:  # fmt: skip
    """Yield the places of both parts of a cache, and of each; nothing of none."""
    both = {"keys and values": tuple(parts.values())} if parts else {}
    alone = {name: (part,) for name, part in parts.items()} if len(parts) > 1 else {}
    for name, group in {**both, **alone}.items():
        more = ["both"] if len(group) > 1 else []
        yield GraphPlace(
            f"{prefix}{name}", group[0][0].name,
            given={**given, "tags": {*tags, *more}},
            compute=together([compute for _, compute in group]),
        )  # fmt: skip


def cache_scatters(evaluation: Evaluation) -> dict[str, onnx.NodeProto]:
    """Return the nodes that write a cache: a TensorScatter by ``"keys"``, another by ``"values"``.

    Return an empty dict unless there is exactly one of each.
    """
    scatters = {}
    for name, past in (("keys", "past_key"), ("values", "past_value")):
        found = [n for n in evaluation.nodes if n.op_type == "TensorScatter" and n.input[0] == past]
        if len(found) == 1:
            scatters[name] = found[0]
    return scatters if len(scatters) == 2 else {}


def scatter_rows(
    evaluation: Evaluation, node: onnx.NodeProto, values: Values, past: Array, new: Array
) -> Array:
    """Return the cache `[B, Hkv, S, .]` that a TensorScatter makes of `past` and `new` rows."""
    changed = dict(zip(node.input[:2], (past, new), strict=True))
    return evaluation.compute_node(node, {**values, **changed})[node.output[0]]


# -- where a cache is written -------------------------------------------------------------------


def cache_writes(evaluation: Evaluation) -> Iterator[GraphPlace]:
    """Yield where a cache is written: steps are ``value``, the lengths, and ``written``."""
    scatters = cache_scatters(evaluation)
    parts = {n: (s, functools.partial(_write, evaluation, s)) for n, s in scatters.items()}
    return cache_places(parts, ())


def _write(
    evaluation: Evaluation, node: onnx.NodeProto, values: Values, changes: Changes
) -> Mapping[str, Array]:
    past, _, lengths = (array_of(values, name) for name in node.input[:3])
    at = Steps(changes, {"past": past})
    moved = {**values, node.input[2]: at.set("value", lengths)}
    name = node.output[0]
    return {name: at.set("written", evaluation.compute_node(node, moved)[name])}
