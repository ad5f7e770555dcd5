"""How far one array is from the truth: relative L2 over the whole and over rows."""

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
    """
    t = truth.astype(np.float64)
    usable = np.isfinite(t) & np.isfinite(x.astype(np.float64))
    t = np.where(usable, t, 0.0)
    difference = np.where(usable, x.astype(np.float64), 0.0) - t
    total = float(np.linalg.norm(t))
    whole = float(np.linalg.norm(difference)) / total if total else 0.0
    if not t.size:
        return Measures(0.0, 0.0)
    rows_t = np.linalg.norm(np.atleast_1d(t), axis=-1)
    rows_d = np.linalg.norm(np.atleast_1d(difference), axis=-1)
    nonzero = rows_t > 0
    row = float(np.max(rows_d[nonzero] / rows_t[nonzero])) if nonzero.any() else 0.0
    return Measures(whole, row)


def zero_rows(truth: np.ndarray) -> np.ndarray:
    """Which rows of the last axis are 0 in every element: `truth.shape[:-1]`."""
    return np.asarray((np.atleast_1d(truth) == 0).all(axis=-1))


def eps(dtype: np.dtype) -> float:
    """The distance from 1 to the next number of a floating point type."""
    import ml_dtypes  # knows bfloat16 besides numpy's own types

    return float(ml_dtypes.finfo(dtype).eps)


def is_floating(dtype: np.dtype) -> bool:
    """Whether a type is floating point, bfloat16 included."""
    return np.issubdtype(dtype, np.floating) or dtype.name == "bfloat16"
