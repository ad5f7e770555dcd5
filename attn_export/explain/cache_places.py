"""Places in caches of keys and values, and caches of integers with a scale for all or each channel.

Each is computed in steps, of which a mistake changes some. Legend: B batch, Hkv key/value heads,
L new tokens, S tokens of the cache, D channels of a head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from attn_export.explain.mistake import (
    NOTHING,
    Changes,
    Compute,
    GraphPlace,
    array_of,
    together,
)
from attn_export.float64.attention_steps import Steps
from attn_export.float64.contrib_operators import from_cache, to_cache
from attn_export.float64.evaluate import ROUNDED_TO, Evaluation, Values
from attn_export.quantiser import cached_integers
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


# -- caches of integers -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CachePart:
    """The keys, or the values, of a cache in a graph.

    Attributes:
        new: The name of the new tokens before they are rounded, `[B, Hkv, L, D]`.
        scatter: The node that writes them into the cache.
        read: The names of what is read of the cache, `[B, Hkv, S, D]`.
        scales: The scale, `[]` or `[Hkv, 1, D]`; or those of a table, `[256]`.
        edges: The largest value range of each scale of a table but the last, `[255]`.
        blocks: The number of blocks of a token.
    """

    new: str
    scatter: onnx.NodeProto
    read: Sequence[str]
    scales: Array = dataclasses.field(default_factory=lambda: np.ones(()))
    edges: Array = dataclasses.field(default_factory=lambda: np.ones(0))
    blocks: int = 1


def whole_caches(evaluation: Evaluation) -> Iterator[GraphPlace]:
    """Yield the places of a cache with a scale for all, or for each channel, if there is one."""
    parts = {}
    for name, scatter in cache_scatters(evaluation).items():
        # The initialisers are k_scale and v_scale.
        names = (n for n in evaluation.initializers if n.endswith(f"kv_scales.{name[0]}_scale"))
        scale = next(names, None)
        users = [node for node in evaluation.nodes if scale is not None and scale in node.input]
        writing = [node for node in users if node.op_type in ("Div", "QuantizeLinear")]
        reading = [node for node in users if node.op_type == "Mul"]
        if scale is None or not len(writing) == len(reading) == 1:
            return
        scales = evaluation.initializers[scale]
        parts[name] = CachePart(writing[0].input[0], scatter, reading[0].output[:1], scales)
    if not parts:
        return
    dtypes = {i.name: i.type.tensor_type.elem_type for i in evaluation.proto.graph.input}
    bits = 4 if dtypes["past_key"] == TensorProto.UINT8 else 8
    others = dict(zip(parts, [part.scales for part in parts.values()][::-1], strict=True))
    tags = ["whole", "integers", "nibbles" if bits == 4 else "int8"]
    tags += ["channels"] if parts["keys"].scales.ndim else []
    computes = {
        name: (
            part.scatter,
            functools.partial(_keep_whole, evaluation, part, bits, others[name]),
        )
        for name, part in parts.items()
    }
    yield from cache_places(computes, tags, "cached ")


def _keep_whole(
    evaluation: Evaluation, part: CachePart, bits: int, other_scale: Array, values: Values,
    changes: Changes,
) -> Mapping[str, Array]:  # fmt: skip
    """Return a cache with one scale, or one for each channel, and its dequantised values.

    Steps: those of `to_cache`; ``stored``, the whole cache; those of `from_cache`.
    """
    x, past = array_of(values, part.new), array_of(values, part.scatter.input[0])
    scatter = functools.partial(scatter_rows, evaluation, part.scatter, values)
    at = Steps(changes, {"other_scale": other_scale})
    at["before_rounding"] = lambda: scatter(cached_integers(past, bits) * part.scales, x)
    present = at.set("stored", scatter(past, to_cache(x, part.scales, bits, at))).astype(past.dtype)
    read = from_cache(present, part.scales, bits, at)
    return {part.scatter.output[0]: present, part.read[0]: read}


# -- caches in float16 --------------------------------------------------------------------------


def float16_caches(evaluation: Evaluation) -> Iterator[GraphPlace]:
    """Yield the places of a cache in float16, if the graph has one."""
    parts = []
    for node in evaluation.nodes:
        cast = evaluation.producer.get(node.input[1]) if node.op_type == "TensorScatter" else None
        if cast is None or not _rounds_to_float16(cast):
            continue
        readers = [n for n in evaluation.nodes if n.op_type == "Cast" and n.input[0] in node.output]
        parts.append(CachePart(cast.input[0], node, [reader.output[0] for reader in readers]))
    others = [part.new for part in parts[::-1]]
    computes = {
        name: (part.scatter, functools.partial(_keep_float16, evaluation, part, other))
        for name, part, other in zip(("keys", "values"), parts, others, strict=False)
    }
    yield from cache_places(computes, ["float16"])


def _rounds_to_float16(node: onnx.NodeProto) -> bool:
    return any(a.name == ROUNDED_TO and a.i == TensorProto.FLOAT16 for a in node.attribute)


def _keep_float16(
    evaluation: Evaluation, part: CachePart, other: str, values: Values, changes: Changes
) -> Mapping[str, Array]:
    """Return a cache in float16, and what attention reads of it.

    Steps: new tokens as they are ``rounded`` to float16, and what is read, ``dequantised``.
    """
    x, past = array_of(values, part.new), array_of(values, part.scatter.input[0])
    scatter = functools.partial(scatter_rows, evaluation, part.scatter, values)
    at = Steps(changes, {"x": x, "other": array_of(values, other)})
    cache = scatter(past, at.set("rounded", x.astype(np.float16)))
    at["before_rounding"] = lambda: scatter(past.astype(np.float64), x)
    read = at.set("dequantised", cache.astype(np.float64))
    return {part.scatter.output[0]: cache, **dict.fromkeys(part.read, read)}
