"""Where in an output something is wrong, and where it is worst."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from attn_export.parity.measures import zero_rows

Index = tuple[int, ...]


def wrong_kinds(r: np.ndarray, t: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """What no relative error measures: a description, and which elements are wrong so.

    Args:
        r: What a runtime gave, as float64.
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
    """The largest difference: of the whole, or within the row of the largest relative error.

    Args:
        r: What a runtime gave, as float64.
        t: The truth, of the same shape and type, with at least one element.
        by_row: Which of the two.
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
    """|r − t| as shares of the largest element of t; 0 where one of the two is not finite."""
    usable = np.isfinite(r) & np.isfinite(t)
    # Of shares, squares neither overflow nor vanish.
    largest = float(np.abs(t[usable]).max(initial=0.0)) or 1.0
    return np.asarray(np.abs(np.where(usable, r, 0.0) - np.where(usable, t, 0.0)) / largest)


def row_norms(t: np.ndarray) -> np.ndarray:
    """‖t_row‖ as shares of the largest element of t, `t.shape[:-1]`; what is not finite is 0."""
    finite = np.where(np.isfinite(t), t, 0.0)
    largest = float(np.abs(finite).max(initial=0.0)) or 1.0
    return np.asarray(np.linalg.norm(finite / largest, axis=-1))


def without_rows(got: np.ndarray, truth: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Return an output with the truth in the rows of the batch that are not compared."""
    if not rows or not got.ndim:
        return got
    got = got.copy()
    got[list(rows)] = truth[list(rows)]
    return got
