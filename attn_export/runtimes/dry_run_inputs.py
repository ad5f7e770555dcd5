"""Inputs of a dry run: sizes by the names of axes, contents that mean a past of that length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attn_export.errors import GraphError, printable
from attn_export.runtimes.dry_run_timeline import ONNX_NAMES
from attn_export.tensorproto import DTYPES

if TYPE_CHECKING:
    import numpy as np
    import onnx

MOST_BYTES = 2 << 30
"""Largest size of all inputs together."""

LENGTHS = {"seqlens_k": -1, "total_sequence_length": 0}
"""Integer inputs of GroupQueryAttention, and what is to be added to the total length."""

PASTS = (("present", "past"), ("present", "past_key_values"))
"""The starts of the names of caches after and before a step."""

ENDS_OF_GQA = {5: "seqlens_k", 6: "total_sequence_length"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a step.

    Attributes:
        name: The name of the step.
        batch: B.
        query_len: L.
        past_len: P.
    """

    name: str
    batch: int
    query_len: int
    past_len: int

    def of_axis(self, axis: str) -> int:
        """Return the size of an axis by its name; 1 of one that is unknown."""
        total = self.past_len + self.query_len
        known = {
            "batch": self.batch, "query_len": self.query_len, "past_len": self.past_len,
            "total_len": total, "key_len": total, "capacity": -(-total // 64) * 64,
            "batch_size": self.batch, "sequence_length": self.query_len,
            "past_sequence_length": self.past_len, "total_sequence_length": total,
        }  # fmt: skip
        return known.get(axis, 1)


def steps_of(
    shapes: Sequence[Sequence[Any]], batch: int, query_len: int | None, past_len: int | None
) -> list[Sizes]:
    """Return the steps to run: the sizes that were given, or a prefill and a decode.

    Args:
        shapes: The shape of each input; dynamic axes by name.
        batch: B.
        query_len: L, if it was given.
        past_len: P, if it was given.
    """
    axes = {axis for shape in shapes for axis in shape if isinstance(axis, str)}
    has_past = bool(axes & {"past_len", "capacity", "past_sequence_length"})
    if query_len is not None or past_len is not None:
        query = query_len or 1
        return [Sizes("step", batch, query, (past_len or 0) if has_past else 0)]
    takes_many = bool(axes & {"query_len", "sequence_length"})
    prefill = [Sizes("prefill", batch, 512, 0)] if takes_many or not has_past else []
    return [*prefill, *([Sizes("decode", batch, 1, 1023)] if has_past else [])]


def inputs_of(ends: Sequence[Any], sizes: Sizes, meanings: Mapping[str, str]) -> dict[str, Any]:
    """Return arrays for the inputs of a session.

    Args:
        ends: The session's description of its inputs: name, type, shape.
        sizes: The sizes of axes.
        meanings: Which inputs are lengths of GroupQueryAttention.

    Raises:
        GraphError: If an input has no tensor type that is known here, or they are too large.
    """
    import numpy as np

    made: dict[str, np.ndarray] = {}
    left = MOST_BYTES
    for end in ends:
        dtype = _dtype(end)
        shape = [axis if isinstance(axis, int) else sizes.of_axis(str(axis)) for axis in end.shape]
        if min(shape, default=0) < 0:
            raise GraphError(f"input {printable(end.name, 60)} has the shape {shape}")
        left -= _bytes(shape, dtype.itemsize)
        if left < 0:
            raise GraphError(
                f"inputs of {sizes} take more than {MOST_BYTES >> 30} GiB; choose smaller sizes"
            )
        made[end.name] = np.full(shape, _content(end.name, dtype, sizes, meanings), dtype)
    return made


def _bytes(shape: Sequence[int], itemsize: int) -> int:
    count = itemsize
    for size in shape:
        count *= size
    return count


def _dtype(end: Any) -> np.dtype[Any]:
    from attn_export.tensorfile import numpy_dtype

    inside = str(end.type).removeprefix("tensor(").removesuffix(")")
    name = ONNX_NAMES.get(inside, inside)
    if name not in DTYPES.values():
        raise GraphError(f"input {printable(end.name, 60)} is {printable(end.type, 60)}: no tensor")
    return numpy_dtype(name)


def _content(name: str, dtype: Any, sizes: Sizes, meanings: Mapping[str, str]) -> Any:
    if dtype.kind == "b":
        return True
    if dtype.kind not in "iu" or dtype.itemsize < 4:
        return 0  # integers of fewer bits are those of a cache, not lengths
    total = sizes.past_len + sizes.query_len
    return total + LENGTHS[meanings[name]] if name in meanings else sizes.past_len


def lengths_in(model: onnx.ModelProto) -> dict[str, str]:
    """Return the inputs of a graph that are lengths for GroupQueryAttention, with which."""
    found = {}
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            for place, meaning in ENDS_OF_GQA.items():
                if place < len(node.input):
                    found[node.input[place]] = meaning
    return found


def caches_in_place(model: onnx.ModelProto) -> dict[str, str]:
    """Return the outputs that are an input's buffer in a decoding loop, with that input.

    They are caches of one shape before and after: ``present_key`` and ``past_key``.
    """
    given = {end.name: end for end in model.graph.input}
    found = {}
    for end in model.graph.output:
        for now, before in PASTS:
            past = given.get(end.name.replace(now, before, 1))
            if end.name.startswith(now) and past is not None and past.type == end.type:
                found[end.name] = past.name
    return found
