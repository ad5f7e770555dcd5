"""Steps of writing and reading a KV cache of 4 bits with block scales, each of them replaceable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import onnx

from attn_export.explain.mistake import (
    ArrayChange,
    array_of,
    cache_scatters,
    scatter_into_cache,
    unchanged,
)
from attn_export.float64.contrib_operators import unpack_nibbles
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

LARGEST_NIBBLE = 15
"""The largest integer of 4 bits."""

LEAST_ZERO_POINT, LARGEST_ZERO_POINT = -128, 127
"""Range of zero points; a byte holds the zero point minus `LEAST_ZERO_POINT`."""


@dataclasses.dataclass(frozen=True)
class BlockSteps:
    """Steps of writing and reading a cache, as changes of values. The defaults are right.

    n is the number of blocks of a token. A token of the cache is D / 2 bytes with two integers
    each, n bytes with the indices of scales, and n bytes with zero points.

    Attributes:
        ordered: Changes the order of new channels before the split into blocks, `[B, Hkv, L, D]`.
        ranges: Changes the value ranges from which scales are chosen, `[B, Hkv, L, n]`.
        stored_index: Changes the scale indices that are written, `[B, Hkv, L, n]`.
        stored_zero: Changes the zero points that are written, `[B, Hkv, L, n]`, -128 to 127.
        written: Changes the integers that are written, `[B, Hkv, L, D]`, 0 to 15.
        packed: Changes the bytes with integers that are written, `[B, Hkv, L, D / 2]`.
        clips: Clips integers minus their zero point at 15; they are never below 0.
        read_bytes: Changes the bytes that are read, `[B, Hkv, S, D / 2 + 2 n]`.
        read_index: Changes the scale indices that are read, `[B, Hkv, S, n]`.
        read_zero: Changes the zero points that are read, `[B, Hkv, S, n]`.
        read: Changes the integers that are read, `[B, Hkv, S, D]`.
        table: Changes the table of scales for reading, `[256]`.
        written_table: Changes the table of scales for writing, `[256]`.
        unordered: Changes the order of dequantised channels, `[B, Hkv, S, D]`.
        stale: Slice of the 2 n bytes of scales and zero points that is read from the cache before
            the write; None to read the written ones.
        unrounded: Whether new tokens are read as they were before quantisation.
    """

    ordered: ArrayChange = unchanged
    ranges: ArrayChange = unchanged
    stored_index: ArrayChange = unchanged
    stored_zero: ArrayChange = unchanged
    written: ArrayChange = unchanged
    packed: ArrayChange = unchanged
    rounds: ArrayChange = np.rint
    clips: ArrayChange = lambda x: np.minimum(x, LARGEST_NIBBLE)
    read_bytes: ArrayChange = unchanged
    read_index: ArrayChange = unchanged
    read_zero: ArrayChange = unchanged
    read: ArrayChange = unchanged
    table: ArrayChange = unchanged
    written_table: ArrayChange = unchanged
    unordered: ArrayChange = unchanged
    stale: slice | None = None
    unrounded: bool = False


@dataclasses.dataclass(frozen=True)
class BlockPart:
    """The keys, or the values, of a cache with block scales in a graph.

    Attributes:
        scales: The scale of each index, `[256]`.
        edges: The largest value range of each scale but the last, `[255]`.
        new: The name of the new tokens before quantisation, `[B, Hkv, L, D]`.
        dequantised: The name of the dequantised cache, `[B, Hkv, S, D]`.
    """

    scales: Array
    edges: Array
    new: str
    scatter: onnx.NodeProto
    dequantised: str
    blocks: int

    def replaced(
        self, evaluation: Evaluation, steps: BlockSteps, values: Values
    ) -> dict[str, Array]:
        """Return the cache and its dequantised values, computed with other steps."""
        x, past = array_of(values, self.new), array_of(values, self.scatter.input[0])
        new = self._quantise(x, steps)
        present = scatter_into_cache(self.scatter, evaluation, values, past, new)
        bytes_read = present
        if steps.stale is not None:
            bytes_read, first = present.copy(), x.shape[-1] // 2
            bytes_read[..., first:][..., steps.stale] = past[..., first:][..., steps.stale]
        dequantised = self._dequantise(bytes_read, x.shape[-1], steps)
        if steps.unrounded:
            past_values = self._dequantise(past, x.shape[-1], BlockSteps())
            dequantised = scatter_into_cache(self.scatter, evaluation, values, past_values, x)
        return {self.scatter.output[0]: present, self.dequantised: dequantised}

    def _quantise(self, x: Array, steps: BlockSteps) -> Array:
        blocks = self._split(steps.ordered(x))
        least = blocks.min(-1)
        ranges = np.maximum(blocks.max(-1) - least, np.abs(least) / 8)
        index = np.searchsorted(self.edges, steps.ranges(ranges))
        scales = steps.written_table(self.scales)[index]
        integers = steps.rounds(blocks / scales[..., None])
        integers = np.clip(integers, LEAST_ZERO_POINT, LARGEST_ZERO_POINT + LARGEST_NIBBLE)
        zero_points = np.minimum(integers.min(-1), LARGEST_ZERO_POINT)
        nibbles = steps.clips(integers - zero_points[..., None]).reshape(x.shape)
        stored_nibbles = steps.written(nibbles).astype(np.int64)
        channels = steps.packed(stored_nibbles[..., ::2] + 16 * stored_nibbles[..., 1::2])
        parts = [
            channels,
            steps.stored_index(index),
            steps.stored_zero(zero_points) - LEAST_ZERO_POINT,
        ]
        return np.concatenate(parts, -1).astype(np.int64).astype(np.uint8)

    def _dequantise(self, cache: Array, head_dim: int, steps: BlockSteps) -> Array:
        channels, index, zero_bytes = np.split(
            steps.read_bytes(cache), [head_dim // 2, head_dim // 2 + self.blocks], -1
        )
        integers = self._split(steps.read(unpack_nibbles(channels).astype(np.float64)))
        zero_points = steps.read_zero(zero_bytes.astype(np.float64) + LEAST_ZERO_POINT)
        scales = steps.table(self.scales)[np.clip(steps.read_index(index.astype(int)), 0, 255)]
        dequantised = (integers + zero_points[..., None]) * scales[..., None]
        return steps.unordered(dequantised.reshape(*cache.shape[:-1], head_dim))

    def _split(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.blocks, -1)


def block_parts(evaluation: Evaluation) -> dict[str, BlockPart]:
    """Return the keys and the values of a cache with block scales, if the graph has both."""
    # Tables of `attention.block_scales`: the scale of each index, and the largest range of each
    # octave of scales, and of each scale within an octave.
    tables = [
        next((name for name in evaluation.initializers if name.endswith(f"kv_scales.{part}")), "")
        for part in ("steps", "octaves", "eighths")
    ]
    if not all(tables):
        return {}
    scales, octaves, eighths = (evaluation.initializers[name] for name in tables)
    edges = np.append(eighths, np.append(octaves, np.inf)[:, None], axis=1).ravel()[:-1]
    parts = {}
    for name, scatter in cache_scatters(evaluation).items():
        found = _find_values(evaluation, scatter, tables[0])
        if found is None:
            return {}
        new, dequantised, blocks = found
        parts[name] = BlockPart(scales.ravel(), edges, new, scatter, dequantised, blocks)
    return parts


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
