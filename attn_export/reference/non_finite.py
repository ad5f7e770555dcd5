"""NaN and infinities in outputs: the rows in which implementations that are right cannot differ.

What a batch element with NaN or Inf gives is compared where it is determined. An element of an
output that depends on a NaN must be NaN. One that does not may be a number or 0 · NaN, for instance
where a mask hides the key, and a kernel may leave such keys out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from attn_export.cases.draw import generator
from attn_export.results import Arrays, Case
from attn_export.tensorfile import is_floating

CLEAR = 1e-6
"""The smallest change, relative to the row, that shows that an element depends on an input. Smaller
ones may be of weights that vanish in a narrower type."""


def _finite_inputs(case: Case, number: int) -> Arrays:
    """Return the inputs of a case with random numbers in place of NaN and Inf."""
    random = generator("finite", case.name, number)
    inputs = dict(case.inputs)
    for name, array in inputs.items():
        if is_floating(array.dtype):
            drawn = random.standard_normal(array.shape).astype(array.dtype)
            inputs[name] = np.where(array < np.inf, array, drawn)
    return inputs


def determined_rows(
    case: Case, runs: Sequence[Arrays], recompute: Callable[[Arrays], Arrays]
) -> Mapping[str, tuple[int, ...]]:
    """Return the rows of batch elements with NaN or Inf that are compared nonetheless.

    `runs`: The outputs that must have NaN and Inf in the same places: the reference, eager's, and
    those of runs with random rounding.

    Returns:
        For each output with such rows, their numbers: rows are along the last axis, and counted
        through all others.
    """
    one, other = (recompute(_finite_inputs(case, number)) for number in range(2))
    rows: dict[str, tuple[int, ...]] = {}
    for name, t in runs[0].items():
        if t.ndim < 2 or not is_floating(t.dtype):
            continue
        kinds = [_kinds(run[name]) for run in runs]
        largest = np.abs(one[name]).max(-1, keepdims=True, initial=0.0)
        depends = np.abs(one[name] - other[name]) > CLEAR * largest
        is_determined = np.logical_and.reduce([kind == kinds[0] for kind in kinds])
        # A finite element may be NaN elsewhere, as 0 · Inf or as Inf - Inf behind a mask. So rows
        # that are all finite are not compared, nor those with zeros.
        is_determined &= np.where(kinds[0] == 0, t != 0, depends)
        of_row = is_determined.all(-1) & (kinds[0] != 0).any(-1)
        of_row[np.setdiff1d(np.arange(len(t)), case.ignored_rows)] = False
        if of_row.any():
            rows[name] = tuple(np.flatnonzero(of_row).tolist())
    return rows


def _kinds(array: np.ndarray) -> np.ndarray:
    """Return 0 for finite elements, and other numbers for NaN, Inf and -Inf."""
    x = array.astype(np.float64)
    return np.asarray(np.isnan(x) + 2 * np.isposinf(x) + 3 * np.isneginf(x))
