"""Tolerance of an output, from eager's error and the errors of runs with random rounding."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attn_export.cases.draw import generator
from attn_export.cases.input_patterns import FUTURE, VALUES
from attn_export.interface import Shape
from attn_export.measures import EPS_FLOAT32, Measures, eps, fill_ignored_rows, measure, zero_rows
from attn_export.reference.non_finite import determined_rows
from attn_export.results import Arrays, Case, Golden
from attn_export.rule import EAGER, FLOOR, beyond_limit, largest_tolerance
from attn_export.schema import Tolerance
from attn_export.tensorfile import is_floating

if TYPE_CHECKING:
    from attn_export.float64 import ReferenceStep
    from attn_export.quality import Budget, Quality
    from attn_export.results import LayerError, TensorNames

RUNS = ((64, 8), (250, 4), (1000, 2), (math.inf, 1))
"""Pairs of a number of rows, and the number of random runs for outputs of at most so many rows. The
worst error of few rows varies more from run to run than the worst error of many."""

_RUNS_OF_ONE_ROW = 16
"""The number of random runs where one row may have most of the error. With 4 runs, all of which
happen to round that row well, one right result in 1,000 would fail."""

_MOST_SHARP_ROWS = 250
"""The largest number of rows of which one sharp row is taken to have most of the error."""

_SHARP_PATTERNS = frozenset(content.name for content in (*VALUES, FUTURE) if content.is_sharp)

_SAFETY = {np.dtype(np.float16): 5.0}
"""Factor on the error of random rounding, by the dtype of an output. Processors may add up float16
products in float16, which the random rounding does not do."""

_USUAL_SAFETY = 2.5
"""`_SAFETY` of all other types."""

SPREAD = 4.0
"""The number of standard deviations that are added to the mean error of random rounding."""


def run_count(outputs: Arrays, contents: Collection[str]) -> tuple[int, int]:
    """Return the number of last-axis rows of the smallest output, and the number of random runs."""
    rows = min(math.prod(a.shape[:-1]) for a in outputs.values())
    # The worst of short rows is one that nearly vanishes, for any number of rows.
    short = _have_short_rows({n: a.shape for n, a in outputs.items() if is_floating(a.dtype)})
    sharp = rows <= _MOST_SHARP_ROWS and not _SHARP_PATTERNS.isdisjoint(contents)
    if short or sharp:
        return rows, _RUNS_OF_ONE_ROW
    return rows, next(runs for most, runs in RUNS if rows <= most)


def build_golden(
    case: Case, eager: Arrays, reference: Arrays, runs: Sequence[Arrays], *, in_float32: bool,
    exactly: Collection[str] = (), is_narrower: bool = False,
    recompute: Callable[[Arrays], Arrays] | None = None, noise: dict[str, Measures] | None = None,
) -> Golden:  # fmt: skip
    """Return a case with its reference and the tolerance for each output.

    `reference`: The float64 outputs.
    `runs`: The float64 outputs of runs with random rounding.
    `in_float32`: Whether the graph computes in float32 and only rounds its outputs to a narrower
    type. This does not hold for a decode, which reads keys that were rounded before.
    `exactly`: The names of outputs in a type narrower than float32 that must be equal to the
    rounded reference, except where the runs differ from it. The eps of float32 applies to them
    instead of the eps of their own type.
    `recompute`: Computes the reference of other inputs, if NaN and Inf in inputs of the case
    determine those in outputs. Default: batch elements that have them are not compared.
    `noise`: The errors of runs with random rounding, by output. Those of `runs` are written there;
    without runs, those of a case of nearly the same sizes are read.
    """
    noise = {} if noise is None else noise
    expected = {name: narrow(t, eager[name].dtype) for name, t in reference.items()}
    determined = case.judged_rows
    # In narrower graphs an infinity of the narrower type may come first.
    if recompute is not None and case.ignored_rows and not determined and not is_narrower:
        determined = determined_rows(case, (expected, reference, eager, *runs), recompute)
    tolerance: dict[str, Tolerance | None] = {}
    uncompared: dict[str, str] = {}
    for name, t in reference.items():
        # Batch elements that are not compared must not affect the tolerance.
        ignored = case.ignored_rows, determined.get(name, ())
        e = fill_ignored_rows(eager[name], expected[name], *ignored)
        if not is_floating(e.dtype):
            tolerance[name] = None
            continue
        # Rows that are 0 in the output's type must be 0, and have no relative error.
        t = np.where(zero_rows(expected[name])[..., None], 0.0, t) if t.ndim else t
        right = _last_elements(t, [run[name] for run in runs])
        rounded = [fill_ignored_rows(run[name], right, *ignored) for run in runs]
        least = EPS_FLOAT32 if name in exactly else eps(e.dtype)
        only_outputs = in_float32 and eps(e.dtype) > EPS_FLOAT32
        if runs:
            noise[name] = _noise(t, expected[name], rounded, only_outputs=only_outputs)
        error = _tolerance(
            t, e, expected[name], noise[name], only_outputs=only_outputs, least=least
        )
        if is_narrower:
            error = _within_limit(error, e.dtype)
        if bool((np.isfinite(t) & ~np.isfinite(e.astype(np.float64))).any()):
            reason = "the PyTorch module gives NaN or Inf where the float64 reference is finite"
        else:
            reason = beyond_limit(error.whole, error.row, e.dtype)
        tolerance[name] = error
        if reason:
            uncompared[name] = reason
    return Golden(case, expected, eager, tolerance, uncompared, determined=determined)


def budgeted_golden(
    case: Case, eager: Arrays, reference: Arrays, budgets: tuple[Budget, ...]
) -> Golden:
    """Return a case with its reference, which allows any error: budgets alone judge it."""
    expected = {name: narrow(t, eager[name].dtype) for name, t in reference.items()}
    any_error = Tolerance(math.inf, math.inf)
    tolerance = {n: any_error if is_floating(t.dtype) else None for n, t in expected.items()}
    return Golden(
        case, expected, eager, tolerance, {}, determined=case.judged_rows, budgets=budgets
    )


def _noise(
    t: np.ndarray, expected: np.ndarray, runs: Sequence[np.ndarray], *, only_outputs: bool
) -> Measures:
    """Return the error of random rounding in one output: `expected` is `t` in its type.

    `only_outputs`: Whether the graph computes in float32 and only rounds its outputs to the type.
    """
    if only_outputs:
        runs, t = [narrow(run, expected.dtype) for run in runs], expected
    right = _last_elements(t, runs)
    return _expected_error([_measure_run(run, right) for run in runs])


def _tolerance(
    t: np.ndarray, e: np.ndarray, expected: np.ndarray, noise: Measures, *, only_outputs: bool,
    least: float,
) -> Tolerance:  # fmt: skip
    """Return the tolerance for one output: `expected` is `t` in the type of `e`.

    `least` is the least relative error, unless only outputs are rounded.
    """
    eager_error = Measures(0.0, 0.0)
    if only_outputs:
        # Most elements are the rounded reference, and a few the number next to it.
        floor = _one_step(expected)
    else:
        floor, eager_error = Measures(least, least), measure(e, t)
    safety = _SAFETY.get(e.dtype, _USUAL_SAFETY)
    return Tolerance(
        max(safety * noise.whole, EAGER * eager_error.whole, FLOOR * floor.whole),
        max(safety * noise.row, EAGER * eager_error.row, FLOOR * floor.row),
    )


def _last_elements(array: np.ndarray, runs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the batch elements that random runs have: all, or the last ones alone."""
    return array[len(array) - len(runs[0]) :] if array.ndim and runs else array


def _within_limit(error: Tolerance, dtype: np.dtype) -> Tolerance:
    """Lower a tolerance to the limit of the output's type, if the error of the runs is within.

    Right outputs have no larger errors than the runs.
    """
    limit = largest_tolerance(dtype)
    pairs = ((error.whole, limit.whole), (error.row, limit.row))
    return Tolerance(*(min(e, most) if e <= _USUAL_SAFETY * most else e for e, most in pairs))


def _measure_run(run: np.ndarray, reference: np.ndarray) -> Measures:
    """Return the measures of a run; infinity if the run is not finite where the reference is."""
    if bool((np.isfinite(reference) & ~np.isfinite(run)).any()):
        return Measures(math.inf, math.inf)
    return measure(run, reference)


def _expected_error(runs: Sequence[Measures]) -> Measures:
    """Return the mean of each measure plus `SPREAD` standard deviations."""
    if any(run.whole == math.inf for run in runs):
        return Measures(math.inf, math.inf)
    errors = np.array([(run.whole, run.row) for run in runs])  # [runs, 2]
    # The worst of a thousand rows varies little, so one run is enough.
    spread = errors.std(axis=0, ddof=1) if len(runs) > 1 else 0.0
    whole, row = errors.mean(axis=0) + SPREAD * spread
    return Measures(float(whole), float(row))


def narrow(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return an array in another type; values beyond its range become infinite.

    `array`: An array of any shape.
    """
    with np.errstate(over="ignore"):
        return np.asarray(array.astype(dtype))


def _one_step(expected: np.ndarray) -> Measures:
    """Return the measures of an error of one eps in the largest element of the whole or a row."""
    values = np.atleast_1d(expected.astype(np.float64))
    values = np.abs(np.where(np.isfinite(values), values, 0.0))
    step = eps(expected.dtype)
    norms, largest = np.linalg.norm(values, axis=-1), values.max(axis=-1, initial=0.0)
    rows = largest[norms > 0] / norms[norms > 0]
    whole = float(np.linalg.norm(values))
    return Measures(
        step * float(values.max(initial=0.0)) / whole if whole else step,
        step * float(rows.max(initial=0.0)) if rows.size else step,
    )


# -- cases whose inputs are changed until they can be judged ------------------------------------

_MOST_CHANGES = 4
"""The largest number of times that the inputs of a case are divided by 4, or get other signs."""

_SHORT = (1, 2, 3)
"""Lengths of rows in which all elements may be near 0 at once."""


def _have_short_rows(output_shapes: Mapping[str, Shape]) -> bool:
    """Return whether an output has rows of the lengths in `_SHORT`."""
    return any(shape[-1] in _SHORT for shape in output_shapes.values() if shape)


class BaseOracle(abc.ABC):
    """Base class of what computes the reference of cases: from a module or a graph.

    Attributes:
        is_narrower: Whether the runs with random rounding round to a narrower type than the
            outputs have, as the graphs do that are judged.
    """

    is_narrower = False

    @abc.abstractmethod
    def output_shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every output; dynamic axes by name."""

    @abc.abstractmethod
    def golden(self, case: Case) -> Golden:
        """Return a case with its reference, eager's outputs, and the tolerance for each."""

    def goldens(self, cases: Sequence[Case], _: Callable[[str], None]) -> Iterator[Golden]:
        """Yield each case as `golden` returns it.

        The function is told what is being computed, where a case takes long.
        """
        return map(self.golden, cases)

    @abc.abstractmethod
    def reference(self, inputs: Arrays) -> Arrays:
        """Return the outputs of the float64 run."""

    def references(self, inputs: Sequence[Arrays]) -> list[Arrays]:
        """Return the outputs of several float64 runs."""
        return [self.reference(each) for each in inputs]

    @abc.abstractmethod
    def eager(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs of a run in the types of the graph; raises at inputs it refuses."""

    @abc.abstractmethod
    def steps(self, inputs: Arrays) -> list[ReferenceStep]:
        """Return every operation of the float64 run, after the inputs and weights."""

    @abc.abstractmethod
    def move_off_ties(self, case: Case) -> Case | None:
        """Return the case, moved away from rounding ties if it can be; None if it cannot."""

    def computable(self, cases: Sequence[Case]) -> tuple[Sequence[Case], tuple[str, ...]]:
        """Return the cases whose reference can be computed, and notes on the others."""
        return cases, ()

    def notes(self, case: Case) -> tuple[str, ...]:  # noqa: ARG002 (of a module)
        """Return notes on the reference for the reader of a report, as seen in a case."""
        return ()

    def layers(self, _: Path, __: Case, ___: TensorNames) -> tuple[Sequence[LayerError], str]:
        """Return the error of each layer of a graph in a case, and what that says; if known."""
        return (), ""

    def quality(
        self, _: Path, goldens: Sequence[Golden], __: Sequence[Budget]
    ) -> tuple[Quality | None, Sequence[Golden]]:
        """Return the distance from the float model, and cases with its outputs; there is none."""
        return None, goldens

    def reduce(self, folder: Path) -> tuple[str, ...]:  # noqa: ARG002 (of a module)
        """Reduce the golden vectors in a folder to what is stored of them, and return notes."""
        return ()

    def has_short_rows(self) -> bool:
        """Return whether all elements of a row of some output may nearly vanish at once."""
        return _have_short_rows(self.output_shapes())

    def usable(self, case: Case) -> Golden:
        """Return a case with its reference, its inputs changed until it can be judged.

        Large inputs may overflow in some modules, or amplify rounding errors until no output can
        fail: they are scaled down. If a row of few elements nearly vanishes, or if values are
        ranked that differ by less than rounding errors, the inputs get other signs.
        """

        def golden_of(case: Case) -> Golden:
            return self.golden(self.move_off_ties(case) or case)

        golden = golden_of(case)
        for power in range(1, _MOST_CHANGES + 1):
            tied, uncompared = golden.tied.keys(), golden.uncompared.keys()
            if not (tied | uncompared) or tied & uncompared:
                break  # the case can be judged, or it ranks values that are exactly equal
            if golden.tied or (not case.contents and self.has_short_rows()):
                golden = golden_of(_with_random_signs(case, power))
            else:
                golden = golden_of(_scaled(case, 0.25**power))
        return golden


def _scaled(case: Case, factor: float) -> Case:
    """Return a case with its floating inputs multiplied, except `attn_mask`."""
    inputs = dict(case.inputs)
    for name in _float_names(case):
        inputs[name] = (inputs[name] * factor).astype(inputs[name].dtype)
    about = f"{case.about}; inputs times {factor:g}"
    return dataclasses.replace(case, inputs=inputs, about=about)


def _with_random_signs(case: Case, number: int) -> Case:
    """Return a case with random signs of its floating inputs, except `attn_mask`."""
    random = generator("signs", case.name, number)
    inputs = dict(case.inputs)
    for name in _float_names(case):
        signs = random.choice(np.array([-1, 1], inputs[name].dtype), inputs[name].shape)
        inputs[name] = inputs[name] * signs
    return dataclasses.replace(case, inputs=inputs)


def _float_names(case: Case) -> list[str]:
    return [n for n, array in case.inputs.items() if n != "attn_mask" and is_floating(array.dtype)]
