"""`Input`: description of one input of a graph."""

from __future__ import annotations

import dataclasses

Shape = tuple[str | int, ...]
"""Sizes, and names of dynamic axes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """One input of a graph.

    Attributes:
        shape: Its axes; dynamic ones by name.
        dtype: As numpy names it, or ``"bfloat16"``.
        low: The least value of an integer input.
        high: The largest value of an integer input, itself included, or the name of the size
            that it is.
        first: Of a bool input, what every row of its last axis starts with: a mask in which True
            means "may attend" starts with True, one in which it means "hidden" with False. None
            where rows start differently.
        hides: Whether a floating point input is a mask with -inf in it, besides `attn_mask`.
    """

    shape: Shape
    dtype: str = "float32"
    low: int = 0
    high: int | str = 0
    first: bool | None = True
    hides: bool = False
