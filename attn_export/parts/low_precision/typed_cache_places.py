"""Places in caches of integers and in float16, computed in steps, of which a mistake changes some.

Legend: B batch, Hkv key/value heads, L new tokens, S tokens of the cache, D channels of a head,
n blocks of a token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto

from attn_export.explain.cache_places import cache_places, cache_scatters, scatter_rows
from attn_export.explain.mistake import Changes, GraphPlace, Locator, array_of, node_place
from attn_export.float64.attention_steps import Steps
from attn_export.float64.evaluate import ROUNDED_TO, Evaluation, Values
from attn_export.float64.integer_steps import from_cache, to_cache
from attn_export.quantiser import cached_integers, join_nibbles, split_nibbles
from attn_export.spec.low_precision import LARGEST_NIBBLE, LARGEST_ZERO, LEAST_ZERO
from attn_export.tensorfile import Array


@dataclasses.dataclass(frozen=True)
class _CachePart:
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


def _whole_caches(evaluation: Evaluation) -> Iterator[GraphPlace]:
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
        parts[name] = _CachePart(writing[0].input[0], scatter, reading[0].output[:1], scales)
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
    evaluation: Evaluation, part: _CachePart, bits: int, other_scale: Array, values: Values,
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


def _float16_caches(evaluation: Evaluation) -> Iterator[GraphPlace]:
    """Yield the places of a cache in float16, if the graph has one."""
    parts = []
    for node in evaluation.nodes:
        cast = evaluation.producer.get(node.input[1]) if node.op_type == "TensorScatter" else None
        if cast is None or not _rounds_to_float16(cast):
            continue
        readers = [n for n in evaluation.nodes if n.op_type == "Cast" and n.input[0] in node.output]
        parts.append(_CachePart(cast.input[0], node, [reader.output[0] for reader in readers]))
    others = [part.new for part in parts[::-1]]
    computes = {
        name: (part.scatter, functools.partial(_keep_float16, evaluation, part, other))
        for name, part, other in zip(("keys", "values"), parts, others, strict=False)
    }
    yield from cache_places(computes, ["float16"])


def _rounds_to_float16(node: onnx.NodeProto) -> bool:
    return any(a.name == ROUNDED_TO and a.i == TensorProto.FLOAT16 for a in node.attribute)


def _keep_float16(
    evaluation: Evaluation, part: _CachePart, other: str, values: Values, changes: Changes
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


# -- caches of 4 bits with block scales ----------------------------------------------------------


def _block_caches(evaluation: Evaluation) -> Iterator[GraphPlace]:
    """Yield the places of a cache of 4 bits with block scales, if the graph has one."""
    # Tables of `attention.block_scales`: the scale of each index, and the largest range of each
    # octave of scales, and of each scale within an octave.
    tables = [
        next((name for name in evaluation.initializers if name.endswith(f"kv_scales.{part}")), "")
        for part in ("steps", "octaves", "eighths")
    ]
    if not all(tables):
        return
    scales, octaves, eighths = (evaluation.initializers[name] for name in tables)
    edges = np.append(eighths, np.append(octaves, np.inf)[:, None], axis=1).ravel()[:-1]
    parts = {}
    for name, scatter in cache_scatters(evaluation).items():
        found = _find_values(evaluation, scatter, tables[0])
        if found is None:
            return
        new, read, blocks = found
        part = _CachePart(new, scatter, [read], scales.ravel(), edges, blocks)
        parts[name] = scatter, functools.partial(_keep_blocks, evaluation, part)
    yield from cache_places(parts, ["blocks", "integers", "nibbles"], "cached ", {"blocks": blocks})


def _find_values(
    evaluation: Evaluation, scatter: onnx.NodeProto, table: str
) -> tuple[str, str, int] | None:
    """Return the names of new and dequantised tokens, and the number of blocks, if found."""
    scale_names = {n.output[0] for n in evaluation.nodes if n.input[:1] == [table]}
    divisions = [
        node for node in _ancestors(evaluation, scatter.input[1])
        if node.op_type == "Div" and node.input[1] in scale_names
    ]  # fmt: skip
    products = [
        node for node in evaluation.nodes
        if node.op_type == "Mul" and node.input[1] in scale_names
        and scatter in list(_ancestors(evaluation, node.output[0]))
    ]  # fmt: skip
    if len(divisions) != 1 or len(products) != 1:
        return None
    reshape = evaluation.producer[divisions[0].input[0]]
    readers = [node for node in evaluation.nodes if products[0].output[0] in node.input]
    shape = evaluation.initializers.get(reshape.input[1]) if len(reshape.input) > 1 else None
    if len(readers) != 1 or shape is None:
        return None
    return reshape.input[0], readers[0].output[0], int(shape[-2])


def _ancestors(evaluation: Evaluation, name: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes from which a value is computed, directly and indirectly."""
    waiting, seen = [name], set[str]()
    while waiting:
        node = evaluation.producer.get(waiting.pop())
        if node is not None and node.output[0] not in seen:
            seen.add(node.output[0])
            yield node
            waiting += [source for source in node.input if source]


def _keep_blocks(
    evaluation: Evaluation, part: _CachePart, values: Values, changes: Changes
) -> Mapping[str, Array]:
    """Return a cache with block scales, and its dequantised values.

    A token of the cache is D / 2 bytes with two integers each, n bytes with the indices of scales,
    and n bytes with zero points. Steps: ``ordered`` new channels, `[B, Hkv, L, D]`; ``ranges`` of
    their blocks, `[B, Hkv, L, n]`; ``written_table`` of scales; ``rounded`` quotients; ``clipped``
    integers, 0 to 15; ``written`` ones, `[B, Hkv, L, D]`; ``packed`` bytes, `[B, Hkv, L, D / 2]`;
    ``stored_index`` and ``stored_zero``, `[B, Hkv, L, n]`; then those of `_dequantise`.
    """
    x, past = array_of(values, part.new), array_of(values, part.scatter.input[0])
    scatter = functools.partial(scatter_rows, evaluation, part.scatter, values)
    given = {"past": past, "blocks": part.blocks, "bytes_of_integers": x.shape[-1] // 2}
    at = Steps(changes, given)
    present = scatter(past, _quantise(part, x, at))
    at["before_rounding"] = lambda: scatter(_dequantise(part, past, x, Steps({})), x)
    return {part.scatter.output[0]: present, part.read[0]: _dequantise(part, present, x, at)}


def _quantise(part: _CachePart, x: Array, at: Steps) -> Array:
    blocks = _split(part, at.set("ordered", x))
    least = blocks.min(-1)
    ranges = at.set("ranges", np.maximum(blocks.max(-1) - least, np.abs(least) / 8))
    index = np.searchsorted(part.edges, ranges)
    at["quotients"] = blocks / at.set("written_table", part.scales)[index][..., None]
    integers = at.set("rounded", np.rint(at["quotients"]))
    integers = np.clip(integers, LEAST_ZERO, LARGEST_ZERO + LARGEST_NIBBLE)
    zero_points = np.minimum(integers.min(-1), LARGEST_ZERO)
    at["integers"] = integers - zero_points[..., None]  # never below 0
    nibbles = at.set("clipped", np.minimum(at["integers"], LARGEST_NIBBLE)).reshape(x.shape)
    written = at.set("written", nibbles).astype(np.int64)
    channels = at.set("packed", join_nibbles(written))
    index, zero_points = at.set("stored_index", index), at.set("stored_zero", zero_points)
    parts = [channels, index, zero_points - LEAST_ZERO]
    return np.concatenate(parts, -1).astype(np.int64).astype(np.uint8)


def _dequantise(part: _CachePart, present: Array, new: Array, at: Steps) -> Array:
    """Return what is read of a cache.

    Steps: the ``bytes`` that are read; ``read`` integers, `[B, Hkv, S, D]`; ``read_zero`` and
    ``read_index``, `[B, Hkv, S, n]`; ``table`` of scales; ``unordered`` and ``dequantised``
    channels, `[B, Hkv, S, D]`.
    """
    end = new.shape[-1] // 2
    channels, index, zeros = np.split(at.set("bytes", present), [end, end + part.blocks], -1)
    integers = _split(part, at.set("read", split_nibbles(channels).astype(np.float64)))
    zero_points = at.set("read_zero", zeros.astype(np.float64) + LEAST_ZERO)
    index = np.clip(at.set("read_index", index.astype(int)), 0, 255)
    scales = at.set("table", part.scales)[index]
    dequantised = (integers + zero_points[..., None]) * scales[..., None]
    dequantised = at.set("unordered", dequantised.reshape(*present.shape[:-1], new.shape[-1]))
    return np.asarray(at.set("dequantised", dequantised))


def _split(part: _CachePart, x: Array) -> Array:
    return x.reshape(*x.shape[:-1], part.blocks, -1)


# -- all places in caches -----------------------------------------------------------------------


@functools.cache
def cache(*tags: str) -> Locator:
    """Return what finds caches: both parts together, keys alone and values alone.

    `tags`: What they must be: ``"int8"`` or ``"nibbles"``, ``"whole"`` or ``"blocks"`` (with block
    scales), ``"channels"`` (with a scale for each), ``"float16"``; ``"both"`` for both parts alone.
    """

    def places(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
        for find in (_whole_caches, _block_caches, _float16_caches):
            yield from (place for place in find(evaluation) if place.given["tags"].issuperset(tags))

    return places


def hadamard(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find the products of queries and of keys with a Hadamard matrix."""
    matrix = next((n for n in evaluation.initializers if n.endswith("kv_scales.hadamard")), "")
    nodes = [n for n in evaluation.nodes if n.op_type == "MatMul" and n.input[1] == matrix]
    if len(nodes) == 2:
        for operand, node in zip(("queries", "keys"), nodes, strict=True):
            yield node_place(node, operand)
