"""Location of wrong elements in an output, and of the worst one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from attn_export.parity.measures import zero_rows

Index = tuple[int, ...]


def wrong_kinds(r: np.ndarray, t: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield errors beyond relative measures: a description, and a mask of the wrong elements.

    Args:
        r: A runtime's output, as float64.
        t: The truth, of the same shape and type.
    """
    if not (np.isfinite(r).all() and np.isfinite(t).all()):
        for what, test in (("NaN", np.isnan), ("+Inf", np.isposinf), ("-Inf", np.isneginf)):
            yield f"{what} in other places than the truth has them", test(r) != test(t)
    # Where t is infinite, so is r by now: such elements are compared, and count as 0 here.
    finite = np.isfinite(np.atleast_1d(t))
    zero = zero_rows(np.where(finite, t, 0.0))[..., None]
    wrong = zero & finite & (np.atleast_1d(r) != 0)
    yield "a row that has to be 0 is not", wrong.reshape(r.shape)


def worst_index(r: np.ndarray, t: np.ndarray, *, by_row: bool) -> Index:
    """Return the index of the largest difference: of the whole, or within the worst row.

    Args:
        r: A runtime's output, as float64.
        t: The truth, of the same shape and type, with at least one element.
        by_row: Whether the row counts.
    """
    d = distances(r, t)
    if by_row and d.ndim:
        norms = row_norms(t)
        shares = np.linalg.norm(d, axis=-1) / np.where(norms > 0, norms, np.inf)
        row = np.unravel_index(int(np.argmax(shares)), shares.shape)
        found = (*row, np.argmax(d[row]))
    else:
        found = np.unravel_index(int(np.argmax(d)), d.shape)
    return tuple(int(i) for i in found)


def distances(r: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return |r − t| as shares of the largest element of t; 0 if either is not finite."""
    usable = np.isfinite(r) & np.isfinite(t)
    # Of shares, squares neither overflow nor vanish.
    largest = float(np.abs(t[usable]).max(initial=0.0)) or 1.0
    return np.asarray(np.abs(np.where(usable, r, 0.0) - np.where(usable, t, 0.0)) / largest)


def row_norms(t: np.ndarray) -> np.ndarray:
    """Return ‖t_row‖ as shares of the largest element of t, `t.shape[:-1]`.

    Elements that are not finite count as 0.
    """
    finite = np.where(np.isfinite(t), t, 0.0)
    largest = float(np.abs(finite).max(initial=0.0)) or 1.0
    return np.asarray(np.linalg.norm(finite / largest, axis=-1))


def without_rows(got: np.ndarray, truth: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Return an output with the truth in the rows of the batch that are not compared.

    Args:
        got: The output of a runtime.
        truth: The right output.
        rows: The rows that are not compared.
    """
    if not rows or not got.ndim:
        return got
    got = got.copy()
    got[list(rows)] = truth[list(rows)]
    return got
