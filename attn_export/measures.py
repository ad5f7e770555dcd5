"""Distance of an array from the reference: relative L2 over the whole and over rows.

The Python kit ships this file, so it must not import anything of this package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

_SAFE = (1e-100, 1e100)
"""The magnitudes between which squares neither overflow nor underflow in float64."""


@dataclasses.dataclass(frozen=True)
class Measures:
    """Relative L2 distances from the reference.

    Attributes:
        whole: ‖x − t‖ / ‖t‖ over all elements that are finite in both; 0 where t is all zero.
        row: The largest ‖x_row − t_row‖ / ‖t_row‖ over rows of the last axis with t_row ≠ 0.
    """

    whole: float
    row: float


def measure(x: np.ndarray, reference: np.ndarray) -> Measures:
    """Return the relative L2 distances of `x` from the reference.

    Elements that are infinite or NaN in one array count as 0 in both; `wrong_kinds` compares them.

    `x`: An output, of any shape; rows are along the last axis.
    `reference`: The float64 reference, of the same shape.
    """
    t, r = reference.astype(np.float64, copy=False), x.astype(np.float64, copy=False)
    if not (np.isfinite(t).all() and np.isfinite(r).all()):
        usable = np.isfinite(t) & np.isfinite(r)
        t, r = np.where(usable, t, 0.0), np.where(usable, r, 0.0)
    difference = r - t
    largest = max(float(t.max(initial=0.0)), -float(t.min(initial=0.0)))
    if not largest:
        return Measures(0.0, 0.0)
    if not _SAFE[0] < largest < _SAFE[1]:
        t, difference = t / largest, difference / largest
    # Squared norms of the rows; the whole is their sum.
    rows_t, rows_d = (
        np.einsum("...i,...i->...", a, a) for a in map(np.atleast_1d, (t, difference))
    )
    nonzero = rows_t > 0
    if not nonzero.any():
        return Measures(0.0, 0.0)
    whole = float(np.sqrt(rows_d.sum() / rows_t.sum()))
    row = float(np.sqrt(np.max(rows_d[nonzero] / rows_t[nonzero])))
    return Measures(whole, row)


def zero_rows(reference: np.ndarray) -> np.ndarray:
    """Return a mask of the rows of the last axis that are 0 in every element."""
    return np.asarray((np.atleast_1d(reference) == 0).all(axis=-1))


def eps(dtype: np.dtype) -> float:
    """Return the distance from 1 to the next number of a floating point type."""
    if dtype.kind == "f":
        return float(np.finfo(dtype).eps)
    import ml_dtypes  # knows bfloat16

    return float(ml_dtypes.finfo(dtype).eps)


EPS_FLOAT32 = eps(np.dtype(np.float32))


def measure_strictly(x: np.ndarray, reference: np.ndarray) -> Measures:
    """Return the relative L2 distances of `x`, or infinity where `measure` would ignore an error.

    They are infinite if the shapes differ, if `x` has NaN or infinities at other indices than the
    reference, or if a row that must be 0 is not.

    `x`: An array of any shape.
    `reference`: The reference, of any shape.
    """
    if x.shape != reference.shape:
        return Measures(np.inf, np.inf)
    r, t = x.astype(np.float64), reference.astype(np.float64)
    if any(wrong.any() for _, wrong in wrong_kinds(r, t)):
        return Measures(np.inf, np.inf)
    return measure(r, t)


# -- location of wrong elements in an output, and of the worst one ------------------------------


Index = tuple[int, ...]


def wrong_kinds(r: np.ndarray, t: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield errors that have no relative size: a description, and a mask of the wrong elements.

    These are NaN and infinities at other indices than in the reference, and elements that are not 0
    in a row that is 0 in the reference.

    `r`: A runtime's output, float64.
    `t`: The reference, float64, of the same shape.
    """
    finite = np.isfinite(np.atleast_1d(t))
    if not (finite.all() and np.isfinite(r).all()):
        for name, test in (("NaN", np.isnan), ("+Inf", np.isposinf), ("-Inf", np.isneginf)):
            yield f"{name} in other places than in the reference", test(r) != test(t)
    # Infinite elements of t were compared above, and count as 0 here.
    zero = zero_rows(t if finite.all() else np.where(finite, t, 0.0))[..., None]
    if zero.any():
        wrong = zero & finite & (np.atleast_1d(r) != 0)
        yield "a row that must be 0 is not", wrong.reshape(r.shape)


def worst_index(r: np.ndarray, t: np.ndarray, *, by_row: bool) -> Index:
    """Return the index of the largest difference: in the whole output, or in its worst row.

    `r`: A runtime's output, float64.
    `t`: The reference, float64, of the same shape, with at least one element.
    """
    d = scaled_differences(r, t)
    if by_row and d.ndim:
        norms = row_norms(t)
        shares = np.linalg.norm(d, axis=-1) / np.where(norms > 0, norms, np.inf)
        row = np.unravel_index(int(np.argmax(shares)), shares.shape)
        index = (*row, np.argmax(d[row]))
    else:
        index = np.unravel_index(int(np.argmax(d)), d.shape)
    return tuple(int(i) for i in index)


def scaled_differences(r: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return |r − t| as shares of the largest element of t; 0 if either is not finite.

    `r`: A runtime's output, float64.
    `t`: The reference, float64, of the same shape.
    """
    usable = np.isfinite(r) & np.isfinite(t)
    # Squares of shares neither overflow nor underflow.
    largest = float(np.abs(t[usable]).max(initial=0.0)) or 1.0
    return np.asarray(np.abs(np.where(usable, r, 0.0) - np.where(usable, t, 0.0)) / largest)


def element_errors(r: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return |r − t|: 0 where both are the same infinity or NaN, infinite where one is not finite.

    `r`: A runtime's output, float64.
    `t`: The reference, float64, of the same shape.
    """
    same = (r == t) | (np.isnan(r) & np.isnan(t))
    with np.errstate(invalid="ignore", over="ignore"):  # Inf - Inf, and sums beyond float64
        errors = np.abs(r - t)
    return np.where(same, 0.0, np.where(np.isnan(errors), np.inf, errors))


def row_norms(t: np.ndarray) -> np.ndarray:
    """Return ‖t_row‖ as shares of the largest element of t, `t.shape[:-1]`.

    Elements that are not finite count as 0.
    """
    finite = np.where(np.isfinite(t), t, 0.0)
    largest = float(np.abs(finite).max(initial=0.0)) or 1.0
    return np.asarray(np.linalg.norm(finite / largest, axis=-1))


def judged_rows(
    shape: Sequence[int], rows: Sequence[int], compared: Sequence[int] = ()
) -> np.ndarray:
    """Return a mask `[B, ...]` of the rows along the last axis that are compared.

    `rows`: The batch elements that are not, but for the rows `compared`.
    """
    judged = np.ones(tuple(shape[:-1]), bool)
    judged[list(rows)] = False
    judged.reshape(-1)[list(compared)] = True
    return judged


def fill_ignored_rows(
    got: np.ndarray, reference: np.ndarray, rows: Sequence[int], compared: Sequence[int] = ()
) -> np.ndarray:
    """Return an output whose batch elements that are not compared are those of the reference.

    `got`: A runtime's output, `[B, ...]`.
    `reference`: The reference, of the same shape.
    """
    if not rows or not got.size or not got.ndim:
        return got
    filled = got.copy()
    filled[list(rows)] = reference[list(rows)]
    if compared:
        by_row = filled.reshape(-1, got.shape[-1])
        actual, right = got.reshape(by_row.shape)[list(compared)], by_row[list(compared)]
        # 0 · Inf and Inf - Inf are NaN, so right implementations may differ in the kind.
        alike = ~np.isfinite(actual) & ~np.isfinite(right)
        by_row[list(compared)] = np.where(alike, right, actual)
        filled = by_row.reshape(got.shape)
    return filled
