"""Golden values that tests write by hand."""

from __future__ import annotations

import numpy as np

from attn_export.results import Arrays, Case, Golden
from attn_export.schema import Tolerance

TOLERANCE = Tolerance(whole=1e-3, row=1e-2)
"""Far from rounding errors, so that a test can be just inside or just outside."""


def made_golden(
    expected: Arrays,
    eager: Arrays | None = None,
    *,
    tolerance: Tolerance | None = TOLERANCE,
    uncompared: dict[str, str] | None = None,
    case: str = "base",
    inputs: Arrays | None = None,
) -> Golden:
    """Return a golden of these outputs; eager equals them by default."""
    return Golden(
        case=Case(case, "probe", {}, inputs or {}, ""),
        expected=expected,
        eager=expected if eager is None else eager,
        tolerance={
            name: tolerance if np.issubdtype(array.dtype, np.floating) else None
            for name, array in expected.items()
        },
        uncompared=uncompared or {},
    )
