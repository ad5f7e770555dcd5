"""The steps by which a graph keeps keys and values as 4 bits by block, to be changed one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from attn_export.diagnose.in_integer_cache import Change, scatter_into_cache
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.diagnose.evaluate import Evaluation, Values

LARGEST = 15
"""The largest integer of 4 bits."""

LEAST_ZERO, LARGEST_ZERO = -128, 127
"""The zero points; a byte holds one less the least."""


def _same(x: Array) -> Array:
    return x


@dataclasses.dataclass(frozen=True)
class BlockSteps:
    """The steps by which blocks are written and read; without changes the right ones.

    Attributes:
        ordered: Of new channels, before they are split into blocks, `[B, Hkv, L, D]`.
        ranges: Of the ranges that scales are found from, `[B, Hkv, L, n]`.
        stored_index: Of the indices that are stored.
        stored_zero: Of the zero points that are stored, from -128 to 127.
        written: Of new integers from 0 to 15, `[B, Hkv, L, D]`.
        packed: Of new bytes of channels, `[B, Hkv, L, D / 2]`.
        rounds: From quotients to whole numbers.
        clips: Of integers less their zero point, to 0 to 15.
        row: Of the bytes that are read, `[B, Hkv, S, D / 2 + 2 n]`.
        read_index: Of the indices that are read, `[B, Hkv, S, n]`.
        read_zero: Of the zero points that are read.
        read: Of the integers that are read, `[B, Hkv, S, D]`.
        table: Of the scales of all bytes as they are read, `[256]`.
        written_table: The same as values are divided by them.
        unordered: Of what is read, `[B, Hkv, S, D]`.
        stale: Of the bytes behind the channels, of scales and zero points, those that are read from
            the cache as it was before: a slice of `[2 n]`.
        unrounded: Whether new tokens are read as they were before.
    """

    ordered: Change = _same
    ranges: Change = _same
    stored_index: Change = _same
    stored_zero: Change = _same
    written: Change = _same
    packed: Change = _same
    rounds: Change = np.rint
    clips: Change = lambda x: np.minimum(x, LARGEST)
    row: Change = _same
    read_index: Change = _same
    read_zero: Change = _same
    read: Change = _same
    table: Change = _same
    written_table: Change = _same
    unordered: Change = _same
    stale: slice | None = None
    unrounded: bool = False


@dataclasses.dataclass(frozen=True)
class BlockPart:
    """Keys or values of a cache by block in a graph.

    Attributes:
        scales: The scale that each byte stands for, `[256]`.
        edges: The largest range of each scale but the last, `[255]`.
        new: The name of the new rows, `[B, Hkv, L, D]`.
        scatter: The node that writes them.
        meant: The name of what is read, `[B, Hkv, S, D]`.
        blocks: The number of blocks.
    """

    scales: Array
    edges: Array
    new: str
    scatter: onnx.NodeProto
    meant: str
    blocks: int

    def replaced(
        self, evaluation: Evaluation, steps: BlockSteps, values: Values
    ) -> dict[str, Array]:
        """Return the cache, and what is read of it, by other steps.

        Args:
            evaluation: The right graph.
            steps: The steps.
            values: All values of the graph.
        """
        x, past = values[self.new], values[self.scatter.input[0]]
        assert x is not None
        assert past is not None
        present = scatter_into_cache(self.scatter, evaluation, values, past, self._row(x, steps))
        read = present
        if steps.stale is not None:
            read, behind = present.copy(), slice(x.shape[-1] // 2, None)
            read[..., behind][..., steps.stale] = past[..., behind][..., steps.stale]
        meant = self._meant(read, x.shape[-1], steps)
        if steps.unrounded:
            before = self._meant(past, x.shape[-1], BlockSteps())
            meant = scatter_into_cache(self.scatter, evaluation, values, before, x)
        return {self.scatter.output[0]: present, self.meant: meant}

    def _row(self, x: Array, steps: BlockSteps) -> Array:
        blocks = self._split(steps.ordered(x))
        least = blocks.min(-1)
        ranges = np.maximum(blocks.max(-1) - least, np.abs(least) / 8)
        index = np.searchsorted(self.edges, steps.ranges(ranges))
        scales = steps.written_table(self.scales)[index]
        whole = steps.rounds(blocks / scales[..., None])
        whole = np.clip(whole, LEAST_ZERO, LARGEST_ZERO + LARGEST)
        zero = np.minimum(whole.min(-1), LARGEST_ZERO)
        halves = steps.clips(whole - zero[..., None]).reshape(x.shape)
        written = steps.written(halves).astype(np.int64)
        channels = steps.packed(written[..., ::2] + 16 * written[..., 1::2])
        stored = [channels, steps.stored_index(index), steps.stored_zero(zero) - LEAST_ZERO]
        return np.concatenate(stored, -1).astype(np.int64).astype(np.uint8)

    def _meant(self, row: Array, width: int, steps: BlockSteps) -> Array:
        channels, index, zero = np.split(steps.row(row), [width // 2, width // 2 + self.blocks], -1)
        halves = np.stack([channels & 15, channels >> 4], -1).astype(np.float64)
        numbers = self._split(steps.read(halves.reshape(*row.shape[:-1], width)))
        zeros = steps.read_zero(zero.astype(np.float64) + LEAST_ZERO)
        scales = steps.table(self.scales)[np.clip(steps.read_index(index.astype(int)), 0, 255)]
        meant = (numbers + zeros[..., None]) * scales[..., None]
        return steps.unordered(meant.reshape(*row.shape[:-1], width))

    def _split(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.blocks, -1)


def block_parts(evaluation: Evaluation) -> dict[str, BlockPart]:
    """Return the keys and the values of a cache by block, as far as the graph has them."""
    tables = [
        next((name for name in evaluation.initializers if name.endswith(f"kv_scales.{part}")), "")
        for part in ("steps", "octaves", "eighths")
    ]
    if not all(tables):
        return {}
    scales, octaves, eighths = (evaluation.initializers[name] for name in tables)
    edges = np.append(eighths, np.append(octaves, np.inf)[:, None], axis=1).ravel()[:-1]
    found = {}
    for name, past in (("keys", "past_key"), ("values", "past_value")):
        scatters = [
            n for n in evaluation.nodes if n.op_type == "TensorScatter" and n.input[0] == past
        ]
        if len(scatters) != 1:
            continue
        ends = _ends(evaluation, scatters[0], tables[0])
        if ends is not None:
            found[name] = BlockPart(scales.ravel(), edges, *ends)
    return found


def _ends(
    evaluation: Evaluation, scatter: onnx.NodeProto, steps: str
) -> tuple[str, onnx.NodeProto, str, int] | None:
    """Return the name of the new rows, the node, the name of what is read, and the blocks."""
    by_scale = {n.output[0] for n in evaluation.nodes if n.input[:1] == [steps]}
    divided = [
        node for node in _above(evaluation, scatter.input[1])
        if node.op_type == "Div" and node.input[1] in by_scale
    ]  # fmt: skip
    read = [
        node for node in evaluation.nodes
        if node.op_type == "Mul" and node.input[1] in by_scale
        and scatter in list(_above(evaluation, node.output[0]))
    ]  # fmt: skip
    if len(divided) != 1 or len(read) != 1:
        return None
    split = evaluation.producer[divided[0].input[0]]
    joined = [node for node in evaluation.nodes if read[0].output[0] in node.input]
    shape = evaluation.initializers.get(split.input[1]) if len(split.input) > 1 else None
    if len(joined) != 1 or shape is None:
        return None
    return split.input[0], scatter, joined[0].output[0], int(shape[-2])


def _above(evaluation: Evaluation, name: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that a value is computed from."""
    waiting, seen = [name], set[str]()
    while waiting:
        node = evaluation.producer.get(waiting.pop())
        if node is not None and node.output[0] not in seen:
            seen.add(node.output[0])
            yield node
            waiting += [given for given in node.input if given]
