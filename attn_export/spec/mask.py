"""The type and shape of a mask, as text: ``bool[B,1,1,S]``."""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Self

from attn_export.errors import SpecError

_MASK_AXES: Final = ("B", "H", "L", "S")


@dataclasses.dataclass(frozen=True, slots=True)
class MaskSpec:
    """The type and shape of `attn_mask`, as written in a spec: ``bool[B,1,1,S]``.

    Attributes:
        dtype: ``"bool"`` (True = may attend) or ``"float"`` (added to the scores).
        axes: Two to four of ``"B"``, ``"H"``, ``"L"``, ``"S"`` or ``"1"``,
            right-aligned to `[B, H, L, S]`, the last one always ``"S"``.
    """

    dtype: str
    axes: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text such as ``"bool[B,1,1,S]"``."""
        match = re.fullmatch(r"(bool|float)\[([\w,\s]+)\]", text.strip())
        axes = tuple(a.strip() for a in match[2].split(",")) if match else ()
        rule = 'attn_mask is "none" or a dtype and a shape such as "bool[B,1,1,S]" or "float[L,S]"'
        if not match or not 2 <= len(axes) <= 4:
            raise SpecError(f"{rule}; got {text!r}")
        if axes[-1] != "S":
            raise SpecError(f"the last axis of attn_mask is S (key length); got {text!r}")
        for axis, allowed in zip(axes, _MASK_AXES[-len(axes) :], strict=True):
            if axis not in (allowed, "1") or (axis == "1" and allowed == "S"):
                raise SpecError(
                    f"attn_mask is right-aligned to [B,H,L,S], so its axis {axis!r} must be "
                    f"{allowed!r} or '1'; got {text!r}"
                )
        return cls(match[1], axes)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(self.axes)}]"
