"""A graph or a module in float64, value by value, with each step open to change."""

from __future__ import annotations

import dataclasses

from attn_export.tensorfile import Array


@dataclasses.dataclass(frozen=True)
class ReferenceStep:
    """One operation of a reference in its float64 run.

    Attributes:
        line: The line of the user's file; "" if there is none.
        reads: The indices of the earlier steps whose results it reads.
    """

    operation: str
    line: str
    value: Array
    reads: tuple[int, ...]
