"""Inputs of a dry run: sizes from the names of axes, and lengths that fit these sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attn_export.errors import GraphError, UsageError, printable
from attn_export.runtimes.engines.ort_cpu import dtype_name
from attn_export.tensorproto import DTYPES

if TYPE_CHECKING:
    import numpy as np
    import onnx

MOST_BYTES = 2 << 30
"""The largest size of all inputs of a step together, in bytes."""

LENGTHS = {5: -1, 6: 0}
"""The indices of `seqlens_k` and `total_sequence_length` among the inputs of GroupQueryAttention,
with the value to add to the total length for each."""

_INDICES = ("input_ids", "logit_index")
"""Inputs of whole models that are no lengths, and for which 0 is always valid."""

_PASTS = (("present", "past"), ("present", "past_key_values"))
"""Prefixes of the names of a cache after a step and before it."""


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The sizes of a step of a dry run."""

    name: str
    batch: int
    query_len: int
    past_len: int

    def of_axis(self, axis: str) -> int:
        """Return the size of an axis by its name; 1 if the name is unknown."""
        return self.by_axis().get(axis, 1)

    def by_axis(self) -> dict[str, int]:
        """Return the size of every axis whose name is known."""
        total = self.past_len + self.query_len
        return {
            "batch": self.batch, "query_len": self.query_len, "past_len": self.past_len,
            "total_len": total, "key_len": total, "capacity": -(-total // 64) * 64,
            "batch_size": self.batch, "sequence_length": self.query_len,
            "past_sequence_length": self.past_len, "total_sequence_length": total,
        }  # fmt: skip


def steps_of(
    shapes: Sequence[Sequence[Any]], batch: int, query_len: int | None, past_len: int | None
) -> list[StepSizes]:
    """Return the steps to run: one of the requested sizes, or else a prefill and a decode.

    `shapes`: The shape of each input, with names for dynamic axes.
    """
    axes = {axis for shape in shapes for axis in shape if isinstance(axis, str)}
    has_past = bool(axes & {"past_len", "capacity", "past_sequence_length"})
    if query_len is not None or past_len is not None:
        query = query_len or 1
        return [StepSizes("step", batch, query, (past_len or 0) if has_past else 0)]
    takes_many = bool(axes & {"query_len", "sequence_length"})
    prefill = [StepSizes("prefill", batch, 512, 0)] if takes_many or not has_past else []
    return [*prefill, *([StepSizes("decode", batch, 1, 1023)] if has_past else [])]


def unknown_axes(shapes: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    """Return a note on axes of inputs whose names say no size, if there are any."""
    known = StepSizes("", 1, 1, 1).by_axis()
    axes = {axis for shape in shapes for axis in shape if isinstance(axis, str)}
    names = ", ".join(printable(axis, 60) for axis in sorted(axes - {*known, ""}))
    return (f"axes of unknown meaning have the size 1: {names}",) if names else ()


def inputs_of(
    ends: Sequence[Any],
    sizes: StepSizes,
    lengths: Mapping[str, int],
    roles: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Return arrays for the inputs of a session.

    `ends`: The session's descriptions of its inputs: name, type, shape.
    """
    import numpy as np

    arrays: dict[str, np.ndarray] = {}
    remaining = MOST_BYTES
    for end in ends:
        dtype = _dtype(end)
        named = [roles.get(axis, axis) for axis in end.shape]
        shape = [axis if isinstance(axis, int) else sizes.of_axis(str(axis)) for axis in named]
        if min(shape, default=0) < 0:
            raise GraphError(f"input {printable(end.name, 60)} has the shape {shape}")
        remaining -= math.prod(shape) * dtype.itemsize
        if remaining < 0:
            is_fixed = all(isinstance(axis, int) for axis in end.shape)
            raise (GraphError if is_fixed else UsageError)(
                f"inputs take more than {MOST_BYTES >> 30} GiB with batch {sizes.batch}, query_len "
                f"{sizes.query_len}, past_len {sizes.past_len}; choose smaller sizes"
            )
        arrays[end.name] = np.full(shape, _content(end.name, dtype, sizes, lengths), dtype)
    return arrays


def _dtype(end: Any) -> np.dtype[Any]:
    from attn_export.tensorfile import numpy_dtype

    name = dtype_name(str(end.type))
    if name not in DTYPES.values():
        raise GraphError(f"input {printable(end.name, 60)} is {printable(end.type, 60)}: no tensor")
    return numpy_dtype(name)


def _content(name: str, dtype: Any, sizes: StepSizes, lengths: Mapping[str, int]) -> Any:
    if dtype.kind == "b":
        return True
    if dtype.kind not in "iu" or dtype.itemsize < 4 or name in _INDICES:
        return 0  # integers of fewer bits are elements of a cache, not lengths
    total = sizes.past_len + sizes.query_len
    return total + lengths[name] if name in lengths else sizes.past_len


def lengths_in(model: onnx.ModelProto) -> dict[str, int]:
    """Return the graph's inputs that are lengths for GroupQueryAttention, as in `LENGTHS`."""
    return {
        node.input[index]: added
        for node in model.graph.node
        if node.op_type == "GroupQueryAttention"
        for index, added in LENGTHS.items()
        if index < len(node.input)
    }


def caches_in_place(model: onnx.ModelProto) -> dict[str, str]:
    """Return the outputs that a decoding loop may write into the buffer of an input.

    They are caches whose shape a step does not change, such as ``present_key`` for ``past_key``.

    Returns:
        The name of the input, by the name of the output.
    """
    inputs = {end.name: end for end in model.graph.input}
    bound = {}
    for end in model.graph.output:
        for now, before in _PASTS:
            past = inputs.get(end.name.replace(now, before, 1))
            if end.name.startswith(now) and past is not None and past.type == end.type:
                bound[end.name] = past.name
    return bound
