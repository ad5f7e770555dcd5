"""The largest error that a case may allow and still be evidence."""

from __future__ import annotations

import numpy as np

from attn_export.parity.measures import eps
from attn_export.results import Allowed

WHOLE, ROW = 2.0**17, 2.0**20
"""The largest allowed errors of an output and of a row, in units of eps of its dtype."""

MOST_WHOLE, MOST_ROW = 1 / 8, 1 / 2
"""The same as shares of the output: beyond them a wrong output passes for a right one."""


def largest_allowed(dtype: np.dtype) -> Allowed:
    """Return the largest allowed errors of an output of a floating dtype.

    For float32 they are 1/64 of the whole output, and 1/8 of a row.
    """
    step = max(eps(dtype), eps(np.dtype(np.float32)))
    return Allowed(min(WHOLE * step, MOST_WHOLE), min(ROW * step, MOST_ROW))


def beyond_limit(allowed: Allowed, dtype: np.dtype) -> str:
    """Return why an allowed error is too large for evidence, or "" where it is not.

    Args:
        allowed: The allowed error.
        dtype: The type of the output.
    """
    limit = largest_allowed(dtype)
    for name in ("whole", "row"):
        error, most = getattr(allowed, name), getattr(limit, name)
        if not error <= most:  # so that NaN is too large
            return (
                f"no evidence: an error of {error:.2g} over {_OVER[name]} would be allowed, and "
                f"{most:.2g} is the most for {dtype.name}"
            )
    return ""


_OVER = {"whole": "the whole output", "row": "one row"}
