"""Distance of an array from the truth: relative L2 over the whole and over rows."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Measures:
    """Relative L2 distances from the truth.

    Attributes:
        whole: ‖x − t‖ / ‖t‖ over all finite elements of t; 0 where t is all zero.
        row: The largest ‖x_row − t_row‖ / ‖t_row‖ over rows of the last axis with t_row ≠ 0.
    """

    whole: float
    row: float


def measure(x: np.ndarray, truth: np.ndarray) -> Measures:
    """Measure `x` against `truth`, of one shape, where both are finite.

    Infinities and NaN count as 0 on both sides: whether they sit in the same places is
    another question.

    Args:
        x: An output, of any shape; rows are along the last axis.
        truth: The float64 truth, of the same shape.
    """
    t, r = truth.astype(np.float64, copy=False), x.astype(np.float64, copy=False)
    usable = np.isfinite(t) & np.isfinite(r)
    if usable.all():
        difference = r - t
    else:
        t, difference = (
            np.where(usable, t, 0.0),
            np.where(usable, r, 0.0) - np.where(usable, t, 0.0),
        )
    # Squares of float64 overflow or vanish; of shares of the largest element they do not.
    largest = float(np.abs(t).max(initial=0.0))
    if not largest:
        return Measures(0.0, 0.0)
    t, difference = t / largest, difference / largest
    # Squared norms of the rows; the whole is their sum.
    rows_t = np.square(np.atleast_1d(t)).sum(axis=-1)
    rows_d = np.square(np.atleast_1d(difference)).sum(axis=-1)
    nonzero = rows_t > 0
    if not nonzero.any():
        return Measures(0.0, 0.0)
    whole = float(np.sqrt(rows_d.sum() / rows_t.sum()))
    row = float(np.sqrt(np.max(rows_d[nonzero] / rows_t[nonzero])))
    return Measures(whole, row)


def zero_rows(truth: np.ndarray) -> np.ndarray:
    """Return a mask `truth.shape[:-1]` of the rows of the last axis that are 0 in every element."""
    return np.asarray((np.atleast_1d(truth) == 0).all(axis=-1))


def eps(dtype: np.dtype) -> float:
    """Return the distance from 1 to the next number of a floating point type."""
    import ml_dtypes  # knows bfloat16 besides numpy's own types

    return float(ml_dtypes.finfo(dtype).eps)
