"""The user's own tolerances."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gate of the user's beside the rule: |r − e| ≤ atol + rtol·|e|. It only tightens.

    Attributes:
        atol: Absolute part; None with rtol None for no gate.
        rtol: Relative part.
    """

    atol: float | None = None
    rtol: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is a gate."""
        return self.atol is not None or self.rtol is not None
