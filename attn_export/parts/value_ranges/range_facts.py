"""What the values of a graph are beside the limits of a narrow format."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from attn_export.measures import measure
from attn_export.parts.value_ranges.float_formats import FloatFormat
from attn_export.tensorfile import Array, to_float64

_BLOCK = 2**22
"""The number of elements that are looked at together."""


@dataclasses.dataclass(frozen=True)
class RangeFacts:
    """The magnitudes of a value over all inputs.

    Attributes:
        name: The name of the value.
        node: The name of the node that makes it; "" for inputs and weights.
        operator: Its operator, or ``"input"`` or ``"weight"``.
        index: The index of the node; -1 for inputs and weights.
        largest: The largest finite magnitude.
        smallest: The smallest magnitude other than 0; infinite if there is none.
        overflow: The largest share of elements that become infinite.
        subnormal: The largest share that has fewer digits or becomes 0.
        flushed: The largest share that becomes 0.
        loss: The largest relative L2 error of a row that the limits alone make; inf with overflow.
        coarse: Whether its elements are whole numbers, of which some become others.
    """

    name: str
    node: str
    operator: str
    index: int
    largest: float = 0.0
    smallest: float = math.inf
    overflow: float = 0.0
    subnormal: float = 0.0
    flushed: float = 0.0
    loss: float = 0.0
    coarse: bool = False

    def margin(self, format_: FloatFormat) -> float:
        """Return the bits between the largest magnitude and the limit; negative beyond it."""
        return math.log2(format_.largest / self.largest) if self.largest else math.inf

    def joined(self, other: RangeFacts) -> RangeFacts:
        """Return the facts over the inputs of both."""
        names = ("largest", "overflow", "subnormal", "flushed", "loss", "coarse")
        return dataclasses.replace(
            self, smallest=min(self.smallest, other.smallest),
            **{name: max(getattr(self, name), getattr(other, name)) for name in names},
        )  # fmt: skip


def facts_of(about: tuple[str, str, str, int], x: Array, format_: FloatFormat) -> RangeFacts:
    """Return facts on an array.

    `about`: The name, node, operator and index.
    `x`: A floating array of any type and shape.
    """
    if x.size > _BLOCK:
        rows = np.atleast_2d(x.reshape(-1, x.shape[-1]))
        step, facts = max(1, _BLOCK // x.shape[-1]), RangeFacts(*about)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            found = facts_of(about, part, format_)
            share = part.size / x.size
            found = dataclasses.replace(
                found, overflow=found.overflow * share, subnormal=found.subnormal * share,
                flushed=found.flushed * share,
            )  # fmt: skip
            facts = _summed(facts, found)
        return facts
    if x.dtype.itemsize < np.dtype(np.float32).itemsize:
        x = to_float64(x)
    sizes = np.abs(x)
    largest, smallest = (float(end) for end in (sizes.max(initial=0.0), sizes.min(initial=np.inf)))
    if not (smallest > 0 and largest < np.inf):
        usable = np.isfinite(sizes)
        largest = float(np.max(sizes, where=usable, initial=0.0))
        smallest = float(np.min(sizes, where=sizes > 0, initial=np.inf))
    coarse = largest > 2 / format_.eps and _is_coarse(x, format_)
    overflow = float(format_.overflows(x).mean()) if largest > format_.largest else 0.0
    if smallest >= format_.smallest and not overflow:
        return RangeFacts(*about, largest, smallest, coarse=coarse)
    loss = format_.loss_bound(sizes)
    if overflow:
        loss = math.inf
    elif loss > format_.eps:
        x = to_float64(x)
        loss = measure(format_.only_limited(x), x).row
    small = sizes[sizes < format_.smallest]
    subnormal, flushed = (
        float(mask.sum() / x.size) for mask in (format_.subnormal(small), format_.flushed(small))
    )
    return RangeFacts(*about, largest, smallest, overflow, subnormal, flushed, loss, coarse)


def _is_coarse(x: Array, format_: FloatFormat) -> bool:
    """Return whether an array has whole numbers alone, of which some become others."""
    first = x.flat[0]
    if first != np.rint(first):
        return False
    x = to_float64(x[np.isfinite(x) & (np.abs(x) <= format_.largest)])
    return bool(x.size and (x == np.rint(x)).all() and (format_.rounded(x) != x).any())


def _summed(one: RangeFacts, other: RangeFacts) -> RangeFacts:
    joined = one.joined(other)
    shares = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("overflow", "subnormal", "flushed")
    }
    return dataclasses.replace(joined, **shares)
