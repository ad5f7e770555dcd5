"""Reference, eager and tolerance, from the module itself.

*eager* is a run of the module itself. *reference* is a run of its float64 copy with PyTorch's math
backend, since the CPU flash kernel turns a row of NaN into 0 and an overflow into a number. The
tolerance is what rounding explains: see `docs/parity.md`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from attn_export.cases.draw import seed_of
from attn_export.cases.plan import GOLDEN_BYTES
from attn_export.errors import ExportError, one_line
from attn_export.export.subject import Subject
from attn_export.export.trees import to_numpy, to_torch
from attn_export.interface import BATCH, Shape
from attn_export.measures import EPS_FLOAT32, Measures, eps
from attn_export.reference.float64_mode import (
    ComputeInFloat64,
    widened_arrays,
    widened_copy,
    widening_of,
)
from attn_export.reference.operations import Recording, RoundingRecorder, math_backend, threads
from attn_export.reference.rounding import RandomRounding
from attn_export.reference.tolerance import BaseOracle, budgeted_golden, build_golden, run_count
from attn_export.results import WHOLE_DECODE, Arrays, Case, Golden
from attn_export.tensorfile import is_floating

if TYPE_CHECKING:
    from attn_export.float64 import ReferenceStep
    from attn_export.quality import Budget, Quality
    from attn_export.reference.notes import ChangedInputs
    from attn_export.reference.ties import TieOrder

WIDER, TIED_RUNS = 8.0, 4
"""The factor on rounding errors, and the number of runs, by which whole-number outputs of a user's
module are found that rounding may change."""

_MOST_JOINED = 128
"""The most rows of an output for which several random runs are stacked along the batch axis."""

ONE_THREAD_BELOW = 4_000_000
_LARGE_CASE = 60_000
"""Modules with fewer parameters run on one thread, except in cases with inputs of so many elements:
handing over smaller matrices takes as long as computing them."""

_FLOAT_BYTES = GOLDEN_BYTES // 2
"""The most bytes of outputs of a float model that are stored, with evidence beside them."""

_SAMPLED_CASE = 8_000
"""The number of elements of random inputs from which on one batch element is run with random
rounding."""


class Oracle(BaseOracle):
    """Source of the expected outputs of a subject.

    `subject`: The subject; its module is copied to float64 once, except for large weights.
    `module`: The float module from which `budgets` limit the distance of one of other weights;
        default: the subject's.

    Attributes:
        precise: The float64 copy.
        exactly: Outputs in a narrow type that must be equal, as for `build_golden`.
        widening: The mode that makes the copy compute in float64 where the module asks for a
            narrower type or a large weight has one. None for a small layer of ours, which never
            uses a narrower type than its inputs.
    """

    exactly: Collection[str] = ()

    def __init__(
        self, subject: Subject, least_eps: float = 0.0, module: nn.Module | None = None,
        budgets: tuple[Budget, ...] = (),
    ) -> None:  # fmt: skip
        self.subject, self.budgets = subject, budgets
        self._least_eps, self.is_narrower = least_eps, least_eps > 0
        try:
            self.precise = self.widened(module or subject.module)
        except Exception as error:
            raise ExportError(f"the module has no float64 copy: {one_line(error)}") from error
        self.widening = (
            widening_of(self.precise) if subject.traits.is_attention else ComputeInFloat64()
        )
        self._ranks = self._chooses = False  # known once it was run
        self._noise: dict[tuple[int, ...], dict[str, Measures]] = {}
        self._size = sum(parameter.numel() for parameter in subject.module.parameters())
        narrow = set(subject.narrow_dtypes().values())
        # Graphs with bfloat16 outputs compute in float32, but for those in the dialect `cuda`.
        self._computes_in_float32 = "bfloat16" in narrow
        self._computes_in_float16 = bool(narrow) and not self._computes_in_float32

    def widened(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module in float64."""
        return widened_copy(module)

    def output_shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every output; dynamic axes by name."""
        return self.subject.output_shapes()

    def golden(self, case: Case) -> Golden:
        """Return the case with its reference, eager's outputs, and the tolerance for each."""
        with self._threads_for(case):
            if not self.budgets:
                return self._golden(case)
            eager, reference = self.eager(case.inputs), self.reference(case.inputs)
            return budgeted_golden(case, eager, reference, self.budgets)

    def move_off_ties(self, case: Case) -> Case | None:
        """Return the case: a module rounds to no narrower type inside."""
        return case

    def _threads_for(self, case: Case) -> AbstractContextManager[None]:
        """Let PyTorch use several threads for large modules and cases, else one."""
        is_large = _input_size(case) >= _LARGE_CASE or self._size >= ONE_THREAD_BELOW
        return threads(torch.get_num_threads() if is_large else 1)

    def notes(self, case: Case) -> tuple[str, ...]:
        """Return notes on the reference of a user's module; none on a layer of ours."""
        if self.subject.traits.is_attention:
            return ()
        from attn_export.reference.notes import code_notes, fixed_note, reference_notes

        inputs = self.subject.input_descriptions()
        shapes = {name: described.shape for name, described in inputs.items()}
        changed = self.changed(case)
        of_reference = reference_notes(self, self.subject, changed)
        of_code = code_notes(self, self.widening, changed, self.export_tests(case.inputs))
        return (*fixed_note(shapes), *of_reference, *of_code)

    def changed(self, case: Case) -> ChangedInputs:
        """Return changed inputs of the case of which there are notes."""
        from attn_export.reference.notes import ChangedInputs

        return ChangedInputs.of(self.subject, case)

    def export_tests(self, inputs: Arrays) -> Sequence[str]:
        """Return what `find_export_tests` finds in a run."""
        from attn_export.reference.notes import find_export_tests

        # In a dict of their own, as outputs may be known by the inputs.
        return find_export_tests(lambda: self.eager(dict(inputs)))

    def reduce(self, folder: Path) -> tuple[str, ...]:
        """Reduce the golden vectors in a folder to what is stored of them, and return notes."""
        from attn_export.reference.stored_evidence import reduce_if_large

        return reduce_if_large(folder, GOLDEN_BYTES)

    def quality(
        self, folder: Path, goldens: Sequence[Golden], budgets: Sequence[Budget]
    ) -> tuple[Quality | None, Sequence[Golden]]:
        """Return the distance from the weights before rounding, and store them if small."""
        from attn_export.bundle.quality_vectors import measure_outputs, with_floats, write_quality

        numbers = self._measured_cases(goldens)
        chosen = [goldens[number] for number in numbers]
        with self._as_before():
            floats = self._references_before([golden.case.inputs for golden in chosen])
        quality, stored = measure_outputs(floats, chosen, budgets)
        if sum(array.nbytes for outputs in stored for array in outputs.values()) <= _FLOAT_BYTES:
            write_quality(folder, numbers, stored, quality)
        return quality, with_floats(goldens, dict(zip(numbers, stored, strict=True)))

    def _references_before(self, inputs: Sequence[Arrays]) -> list[Arrays]:
        """Return the outputs of float64 runs of the module, which has its weights before rounding.

        `inputs`: Those of each run.
        """
        before = Oracle(self.subject)
        return [before.reference(each) for each in inputs]

    def _measured_cases(self, goldens: Sequence[Golden]) -> list[int]:
        """Return the indices of the cases in which the distance is measured."""
        from attn_export.bundle.quality_vectors import quality_cases

        return quality_cases(goldens)

    def _as_before(self) -> AbstractContextManager[None]:
        """Let the module have its weights before rounding in this block."""
        assert self.subject.linears is not None, "no integers, and so no budget"
        return self.subject.linears.as_before()

    def _golden(self, case: Case) -> Golden:
        eager = self.eager(case.inputs)
        reference = self.reference(case.inputs)
        noise = self._noise.setdefault(_size_group(case), {}) if self._is_sampled(case) else {}
        golden = build_golden(
            case, eager, reference, [] if noise else self.noisy_runs(case, eager), noise=noise,
            in_float32=self._computes_in_float32 and case.kind != WHOLE_DECODE,
            is_narrower=self.is_narrower, exactly=self.exactly,
            recompute=None if self._chooses else self.reference,
        )  # fmt: skip
        return golden if self.subject.traits.is_attention else self._with_ties(golden, reference)

    def _with_ties(self, golden: Golden, reference: Arrays) -> Golden:
        """Return the golden of a user's module, with the elements that ties decide marked."""
        from attn_export.reference.ties import ORDERS, TieOrder, mark_ties

        inputs, rounded = golden.case.inputs, []
        orders = [self.reference(inputs, TieOrder(order)) for order in ORDERS if self._ranks]
        if not all(is_floating(array.dtype) for array in reference.values()):
            rounded = self.noisy_runs(golden.case, golden.eager, WIDER, TIED_RUNS)
        return mark_ties(golden, reference, orders, rounded)

    def eager(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs of the module itself, run on one thread.

        The number of threads changes the order of additions, and so the sums of float32 products.
        """
        with torch.inference_mode(), threads(1):
            return to_numpy(self.subject.call(self.subject.module, to_torch(inputs)))

    def reference(self, inputs: Arrays, order: TieOrder | None = None) -> dict[str, np.ndarray]:
        """Return the outputs of the float64 copy."""
        tensors = to_torch(widened_arrays(inputs))
        try:
            with math_backend(self.widening, order, self._decisions(inputs)(tensors)):
                return to_numpy(self.subject.call(self.precise, tensors))
        except ExportError as error:
            raise ExportError(
                f"in its float64 copy, {error}; constants must be buffers, or of x.dtype"
            ) from error

    def steps(self, inputs: Arrays) -> list[ReferenceStep]:
        """Return every operation of the float64 run, after the inputs and weights."""
        tensors = to_torch(widened_arrays(inputs))
        weights = {**dict(self.precise.named_parameters()), **dict(self.precise.named_buffers())}
        with self.places() as place:
            recording = Recording({**tensors, **weights}, place)
            with math_backend(self.widening, recording):
                self.subject.call(self.precise, tensors)
        return recording.steps

    def places(self) -> AbstractContextManager[Callable[[], str] | None]:
        """Return a context with a function that returns the path of the module that runs."""
        return contextlib.nullcontext()

    def noisy_runs(
        self, case: Case, eager: Arrays, wider: float = 1.0, least: int = 1,
        settled: Callable[[range], AbstractContextManager[None]] | None = None,
    ) -> list[Arrays]:  # fmt: skip
        """Return the outputs of float64 runs with random rounding as large as the graph's.

        Each rounding error is `wider` times as large, and there are at least `least` runs.
        `settled`: Lets the copy keep numbers of runs that are stacked along the batch axis.
        """
        fewest, count = run_count(eager, case.contents)
        count = max(count, least)
        run = self.noisy_run(case, eager, wider, settled)
        inputs = widened_arrays(self._sampled(case))
        if fewest > _MOST_JOINED or not self._can_stack_runs(inputs):
            return [run(number, inputs) for number in range(count)]
        joined = {
            name: np.concatenate([a] * count) if self.has_batch(name) else a
            for name, a in inputs.items()
        }
        by_run = {n: np.split(a, count) for n, a in run(0, joined, count).items()}
        return [{name: runs[number] for name, runs in by_run.items()} for number in range(count)]

    def noisy_run(
        self, case: Case, eager: Arrays, wider: float = 1.0,
        settled: Callable[[range], AbstractContextManager[None]] | None = None,
    ) -> Callable[..., Arrays]:  # fmt: skip
        """Return a function of a number, of widened inputs and of how many are stacked there.

        It makes one of `noisy_runs`.
        """
        types = [eps(a.dtype) for a in eager.values() if is_floating(a.dtype)]
        in_float32 = self._computes_in_float32 or settled is not None
        step = EPS_FLOAT32 if in_float32 else max(types, default=EPS_FLOAT32)
        step = wider * max(step, self._least_eps)
        steps = self._rounding_steps(case.inputs) if wider == 1 else ()
        decisions = self._decisions(case.inputs)

        def run(number: int, arrays: Arrays, copies: int = 1) -> Arrays:
            tensors = to_torch(arrays)
            mode = RandomRounding(
                step, wider * EPS_FLOAT32, seed_of(case.name, number), copies=copies,
                steps=steps, widening=self.widening,
            )  # fmt: skip
            runs = range(number, number + copies)
            with settled(runs) if settled else contextlib.nullcontext():
                outputs = self._noisy(tensors, mode, decisions(tensors))
            self._ranks |= mode.ranks
            self._chooses |= mode.chooses
            return outputs

        return run

    def _rounding_steps(self, inputs: Arrays) -> Sequence[tuple[str, float]]:
        """Return what rounds in the module's own types, if it computes in float16."""
        recorder = RoundingRecorder()
        if self._computes_in_float16:
            with math_backend(recorder):
                self.subject.call(self.subject.module, to_torch(inputs))
        return recorder.steps

    def _is_sampled(self, case: Case) -> bool:
        """Return whether one batch element is run with random rounding: random inputs are alike.

        So are cases whose sizes lie next to the same blocks. Rows of few elements are not: the
        worst error is that of the row that nearly vanishes.
        """
        is_plain = not case.contents and not case.ignored_rows and case.kind != WHOLE_DECODE
        if not self.subject.traits.is_attention or self.has_short_rows():
            return False
        return _input_size(case) >= _SAMPLED_CASE and is_plain and self._can_stack_runs(case.inputs)

    def _sampled(self, case: Case) -> Arrays:
        """Return the inputs of runs with random rounding: of some cases the last batch element."""
        # It has the longest past of a cache in place.
        if not self._is_sampled(case):
            return case.inputs
        return {name: a[-1:] if self.has_batch(name) else a for name, a in case.inputs.items()}

    def _decisions(self, inputs: Arrays) -> Callable[[Any], AbstractContextManager[Any]]:
        """Return a mode, from its tensors, for float64 runs that decide as the module does."""
        if self.subject.traits.is_attention:  # it decides nothing without its inputs
            return contextlib.nullcontext
        from attn_export.reference.decisions import Decisions

        own = {n: x.to(self.subject.inputs[n].dtype) for n, x in to_torch(inputs).items()}
        with math_backend(recorded := Decisions(own.values())):
            self.subject.call(self.subject.module, own)
        if not recorded.made:  # a mode more would double the time of loops
            return contextlib.nullcontext
        return lambda tensors: Decisions(tensors.values(), recorded.made)

    def _noisy(self, tensors: Any, *modes: AbstractContextManager[Any]) -> Arrays:
        with math_backend(*modes):
            return to_numpy(self.subject.call(self.precise, tensors))

    def _can_stack_runs(self, inputs: Arrays) -> bool:
        """Return whether several runs may be stacked along the batch axis."""
        # Batch elements of attention are independent.
        return self.subject.traits.is_attention and any(map(self.has_batch, inputs))

    def has_batch(self, name: str) -> bool:
        """Return whether the first axis of an input is the batch axis."""
        return self.subject.axes[name].get(0) == self.subject.roles.axis(BATCH)


def _input_size(case: Case) -> int:
    return sum(array.size for array in case.inputs.values())


def _size_group(case: Case) -> tuple[int, ...]:
    """Return the powers of two next to the sizes of a case, but for the batch."""
    return tuple(
        round(math.log2(size)) if size else -1
        for axis, size in sorted(case.sizes.items())
        if axis != BATCH
    )
