"""The user's own tolerances."""

from __future__ import annotations

import dataclasses
import math

from attn_export.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gate of the user's beside the rule: |r − e| ≤ atol + rtol·|e|. It only tightens.

    Attributes:
        atol: Absolute part; None with rtol None for no gate.
        rtol: Relative part.
    """

    atol: float | None = None
    rtol: float | None = None

    def __post_init__(self) -> None:
        for name in ("atol", "rtol"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{name} has to be a finite number, at least 0; got {value}")

    @property
    def is_set(self) -> bool:
        """Return whether there is a gate."""
        return self.atol is not None or self.rtol is not None
