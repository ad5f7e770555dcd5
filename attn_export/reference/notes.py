"""Notes on the reference of a user's module, for the reader of a report."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch

from attn_export.cases.draw import generator
from attn_export.errors import first_few
from attn_export.export.subject import Subject
from attn_export.interface import BATCH, Shape
from attn_export.measures import eps, measure
from attn_export.reference.float64_mode import ComputeInFloat64
from attn_export.reference.tolerance import BaseOracle
from attn_export.results import Arrays, Case, Detail
from attn_export.rule import EAGER
from attn_export.source_location import is_user_file, show
from attn_export.tensorfile import is_floating

# -- calls by which a module tests whether it is being exported or compiled ---------------------

_EXPORT_TESTS = (
    torch.compiler.is_exporting, torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling,
    torch.onnx.is_in_onnx_export, torch.jit.is_tracing,  # type: ignore[attr-defined]
)  # fmt: skip
"""Functions that return something else during an export than in a plain call."""


def find_export_tests(run: Callable[[], Any]) -> list[str]:
    """Return the calls of `_EXPORT_TESTS` in the user's code: ``is_exporting() at mine.py:12``."""
    names = {function.__code__: function.__name__ for function in _EXPORT_TESTS}
    calls: dict[str, None] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event == "call" and frame.f_code in names and caller is not None:
            file = caller.f_code.co_filename
            if is_user_file(file):
                calls[f"{names[frame.f_code]}() at {show((file, caller.f_lineno))}"] = None

    before: Any = sys.getprofile()
    if before is not None and not callable(before):
        return []  # a profiler written in C, such as cProfile, cannot be restored
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(calls)


# -- notes for the reader of a report on the reference of a user's module -------------------------

STEP = 2.0**-22
"""The relative change of inputs by which precision is measured: twice eps of float32."""

POOR = 1e-9
"""The relative error of the reference above which there is a note."""

FAR = 256
"""The distance of a module from its reference above which there is a note, in units of eps."""


@dataclasses.dataclass(frozen=True)
class ChangedInputs:
    """A case and what its inputs are changed to: notes say what this does to the reference.

    Attributes:
        moved: Inputs of which the floating ones are changed by a random share of up to `STEP`, down
            and up; empty if none is.
        mixed: Inputs with other sequences beside the first one of the batch; None if it has none.
        batch: The number of sequences.
    """

    case: Case
    moved: tuple[Arrays, ...]
    mixed: Arrays | None
    batch: int

    @classmethod
    def of(cls, subject: Subject, case: Case) -> ChangedInputs:
        """Change the inputs of a case."""
        axis = BATCH if BATCH in case.sizes else subject.roles.axis(BATCH)
        return cls(case, _moved(case.inputs), _mixed(subject, case, axis), case.sizes.get(axis, 1))

    @property
    def all(self) -> tuple[Arrays, ...]:
        """Each of the inputs."""
        return self.moved if self.mixed is None else (*self.moved, self.mixed)


def reference_notes(
    oracle: BaseOracle, subject: Subject, changed: ChangedInputs
) -> tuple[str, ...]:
    """Return notes on the reference of a module, as seen in a case."""
    return (
        *subject.operators.notes(),
        *_far_from_reference(oracle, changed.case),
        *_mixing_notes(oracle, changed),
    )


def code_notes(
    oracle: BaseOracle, widening: ComputeInFloat64 | None, changed: ChangedInputs,
    export_tests: Sequence[str],
) -> tuple[str, ...]:  # fmt: skip
    """Return notes on what the code of a module asks for, which concern its author.

    `widening`: The mode in which its float64 copy runs.
    `export_tests`: What `find_export_tests` finds in a run.
    """
    return (*_precision_notes(oracle, widening, changed), *_export_notes(export_tests))


def fixed_note(inputs: Mapping[str, Shape]) -> tuple[str, ...]:
    """Return a note on the inputs of a user's module that have fixed sizes in the graph, if any."""
    fixed = {
        name: shape for name, shape in inputs.items() if any(isinstance(a, int) for a in shape)
    }
    shown = ", ".join(f"{name} [{', '.join(map(str, s))}]" for name, s in fixed.items())
    return (f"fixed axes were not varied: {shown}",) if fixed else ()


def _mixed(subject: Subject, case: Case, batch: str) -> Arrays | None:
    """Return inputs in which the sequences beside the first one are others, if there are any.

    `batch`: An axis that the user calls so counts as one, whatever it does.
    """
    axes = subject.axes
    names = {n for n, a in case.inputs.items() if axes[n].get(0) == batch and is_floating(a.dtype)}
    if not names or case.sizes.get(batch, 1) < 2:
        return None
    other = dict(case.inputs)
    for name in names:
        array = other[name] = case.inputs[name].copy()
        # Infinite elements belong to a mask.
        array[1:] = np.where(np.isfinite(array[1:]), -2.5 * array[1:], array[1:])
    return other


def _mixing_notes(oracle: BaseOracle, changed: ChangedInputs) -> Iterator[str]:
    """Yield a note if the elements of a batch depend on one another."""
    if changed.mixed is None:
        return
    before, (after,) = oracle.reference(changed.case.inputs), oracle.references([changed.mixed])
    for name, t in before.items():
        batch_first = t.ndim > 0 and len(t) == changed.batch and is_floating(t.dtype)
        if batch_first and measure(after[name][:1], t[:1]).whole > POOR:
            yield (
                f"rows of a batch depend on one another: {name} of row 0 changes with the "
                "inputs of the rows beside it"
            )
            return


def _export_notes(calls: Sequence[str]) -> Iterator[str]:
    """Yield a note if the module tests whether it is being exported."""
    if calls:
        yield (
            f"the model behaves differently under torch.export ({first_few(calls)}); graph and "
            "reference took different branches"
        )


def _far_from_reference(oracle: BaseOracle, case: Case) -> Iterator[str]:
    eager, reference = oracle.eager(case.inputs), oracle.reference(case.inputs)
    for name, e in eager.items():
        if is_floating(e.dtype):
            off = measure(e, reference[name]).whole
            if off > FAR * eps(e.dtype):
                yield (
                    f"{name} of the PyTorch module is itself {off:.0e} from the float64 reference, "
                    f"more than its type explains; the tolerance is {EAGER:g} times that"
                )
                return


def _precision_notes(
    oracle: BaseOracle, widening: ComputeInFloat64 | None, changed: ChangedInputs
) -> Iterator[str]:
    error = precision(oracle, changed)
    lines = [line for line in widening.lines if line] if widening else []
    error_text = f"{error:.0e} in relative L2"
    if lines:
        says = f"the reference ignores the model's casts to float32 or less at {first_few(lines)}"
        yield (Detail, str)[error > POOR](f"{says} (effect: {error_text})")
    elif error > POOR:
        yield f"the float64 reference is itself accurate to {error_text} only"


def precision(oracle: BaseOracle, changed: ChangedInputs) -> float:
    """Return an estimate of the relative L2 error of the reference itself.

    For a smooth function f in float64, (f(x + δ) + f(x − δ)) / 2 − f(x) is of the order of δ². Here
    δ is a random change of x by a share of up to `STEP`. Parts of f that compute in a narrower type
    add their rounding errors to that difference.
    """
    if not changed.moved:
        return 0.0
    at, (before, after) = oracle.reference(changed.case.inputs), oracle.references(changed.moved)
    errors = [
        measure((before[name] + after[name]) / 2, t).whole
        for name, t in at.items()
        if is_floating(t.dtype)
    ]
    return max(errors, default=0.0)


def _moved(inputs: Arrays) -> tuple[Arrays, ...]:
    noise = {
        name: STEP * generator("precision", name).uniform(-1, 1, array.shape)
        for name, array in inputs.items()
        if is_floating(array.dtype)
    }
    return tuple(
        {**inputs, **{n: inputs[n].astype(np.float64) * (1 + sign * d) for n, d in noise.items()}}
        for sign in (-1, 1)
        if noise
    )
