"""The steps by which a graph keeps keys and values as integers, so that each can be changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.diagnose.evaluate import Evaluation, Values

Change = Callable[[Array], Array]

MIDDLE = 8
"""The addition to an integer of 4 bits that makes it 0 to 15."""


def _same(x: Array) -> Array:
    return x


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps by which a cache is written and read; without changes the right ones.

    Attributes:
        write_scale: Of the scale that new rows are divided by.
        read_scale: Of the scale that integers are multiplied by.
        rounds: From quotients to whole numbers.
        limits: Of the least and the largest integer.
        written: Of new integers, `[B, Hkv, L, D]`.
        packed: Of new bytes, as they are stored.
        kept: Of the whole cache, in integers, after it was written.
        read: Of the integers that are read, `[B, Hkv, S, D]`.
        unrounded: Whether new rows are read as they were before.
    """

    write_scale: Change = _same
    read_scale: Change = _same
    rounds: Change = np.rint
    limits: Callable[[int, int], tuple[int, int]] = lambda low, high: (low, high)
    written: Change = _same
    packed: Change = _same
    kept: Change = _same
    read: Change = _same
    unrounded: bool = False


@dataclasses.dataclass(frozen=True)
class CachePart:
    """Keys or values of a cache of integers in a graph.

    Attributes:
        scale: Its scale.
        new: The name of the new rows, `[B, Hkv, L, D]`, before they are divided.
        scatter: The node that writes them.
        meant: The name of what the integers stand for, `[B, Hkv, S, D]`.
    """

    scale: Array
    new: str
    scatter: onnx.NodeProto
    meant: str

    def replaced(self, evaluation: Evaluation, steps: Steps, values: Values) -> dict[str, Array]:
        """Return the cache, and what is read of it, by other steps.

        Args:
            evaluation: The right graph.
            steps: The steps.
            values: All values of the graph.
        """
        x, past = values[self.new], values[self.scatter.input[0]]
        assert x is not None
        assert past is not None
        in_bytes = past.dtype == np.uint8
        low, high = steps.limits(*((-8, 7) if in_bytes else (-128, 127)))
        whole = steps.rounds(x / steps.write_scale(self.scale))
        if in_bytes:
            rows = steps.packed(_packed(steps.written(np.clip(whole, low, high))))
        else:  # QuantizeLinear saturates after it has added the zero point
            rows = np.clip(steps.written(whole), low, high)
        present = self._written(evaluation, values, past, rows.astype(np.int64).astype(past.dtype))
        present = steps.kept(present).astype(past.dtype)
        read = steps.read(_unpacked(present) if in_bytes else present.astype(np.float64))
        meant = read * steps.read_scale(self.scale)
        if steps.unrounded:
            before = (_unpacked(past) if in_bytes else past) * self.scale
            meant = self._written(evaluation, values, before, x)
        return {self.scatter.output[0]: present, self.meant: meant}

    def _written(self, evaluation: Evaluation, values: Values, past: Array, new: Array) -> Array:
        given = dict(zip(self.scatter.input[:2], (past, new), strict=True))
        return evaluation.compute_node(self.scatter, {**values, **given})[self.scatter.output[0]]


def _packed(q: Array) -> Array:
    halves = q.astype(np.int64) + MIDDLE
    return np.asarray((halves[..., ::2] + 16 * halves[..., 1::2]) % 256)


def _unpacked(stored: Array) -> Array:
    halves = np.stack([stored & 15, stored >> 4], axis=-1).astype(np.float64) - MIDDLE
    return halves.reshape(*stored.shape[:-1], -1)


def cache_parts(evaluation: Evaluation) -> dict[str, CachePart]:
    """Return the keys and the values of a cache of integers, as far as the graph has them."""
    found = {}
    for name, part in (("keys", "k_scale"), ("values", "v_scale")):
        scale = next((n for n in evaluation.initializers if n.endswith(f"kv_scales.{part}")), None)
        users = [node for node in evaluation.nodes if scale is not None and scale in node.input]
        writing = [node for node in users if node.op_type in ("Div", "QuantizeLinear")]
        reading = [node for node in users if node.op_type == "Mul"]
        past = "past_key" if name == "keys" else "past_value"
        scatters = [
            n for n in evaluation.nodes if n.op_type == "TensorScatter" and n.input[0] == past
        ]
        if scale is not None and len(writing) == len(reading) == len(scatters) == 1:
            found[name] = CachePart(
                evaluation.initializers[scale], writing[0].input[0], scatters[0],
                reading[0].output[0],
            )  # fmt: skip
    return found
