"""Truth, eager and the error allowed, from the module itself.

*eager* is the user's module as it is. *truth* is a copy of it in float64 with PyTorch's math
backend: its CPU flash kernel turns a NaN row into 0 and an overflow into a number. The error that
is allowed is what rounding explains: see `docs/parity.md`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_export.attention import Attention
from attn_export.errors import ExportError, one_line
from attn_export.export.subject import Subject
from attn_export.export.trees import to_numpy, to_torch
from attn_export.parity.allowed import judged_by, run_count, short_rows, usable_golden
from attn_export.parity.draw import seed_of
from attn_export.parity.float64_mode import (
    ComputeInFloat64,
    widened_arrays,
    widened_copy,
    widening_of,
)
from attn_export.parity.measures import eps
from attn_export.parity.operations import Recording, Steps, recorded_steps
from attn_export.parity.rounding import RandomRounding
from attn_export.results import DECODE, Arrays, Case, Golden
from attn_export.spec.low_precision import FLOAT16
from attn_export.tensorfile import is_floating

if TYPE_CHECKING:
    from attn_export.diagnose.explanation import Step
    from attn_export.parity.activation_ties import ActivationTies, Ties
    from attn_export.parity.float16_ties import Float16Rows

WIDER, TIED_RUNS = 8.0, 4
"""The factor on rounding, and the number of runs, that show where whole numbers are in doubt."""

MOST_JOINED = 128
"""The largest number of rows of which several runs are rows of one batch: more fill the memory."""

ONE_THREAD_BELOW = 4_000_000
"""Modules with fewer parameters run on one thread: on matrices this small, handing work over
takes longer than doing it (measured at E 512: 0.39 s against 0.73 s for all cases)."""


class Oracle:
    """Source of the expected outputs of a subject.

    Args:
        subject: The subject; its module is copied to float64 once, but for its large weights.
        module: A module of the same signature in place of its own, for `truth`.
        least_eps: Of a graph that computes in fewer bits than the module, the eps of its type.

    Attributes:
        subject: See `subject`.
        precise: The float64 copy.
        widening: Makes the copy compute in float64 where the module or a large weight has less;
            None for a small layer of ours, which never uses a narrower type than its inputs.
    """

    def __init__(
        self, subject: Subject, least_eps: float = 0.0, module: nn.Module | None = None
    ) -> None:
        self.subject = subject
        self._least_eps = least_eps
        try:
            self.precise = widened_copy(module or subject.module)
        except Exception as error:
            raise ExportError(f"the module has no float64 copy: {one_line(error)}") from error
        size = sum(parameter.numel() for parameter in subject.module.parameters())
        self.widening = widening_of(self.precise) if subject.spec else ComputeInFloat64()
        self._activations = self._quantised_activations()
        self._ranks = False  # known once it was run
        self._threads = 1 if size < ONE_THREAD_BELOW else torch.get_num_threads()
        narrow = set(subject.narrow_dtypes().values())
        # Such a graph computes in float32, and rounds what comes out.
        self._computes_in_float32 = "bfloat16" in narrow
        self._mixed = bool(narrow) and not self._computes_in_float32

    @property
    def has_short_rows(self) -> bool:
        """Return whether an output has rows so short that all their elements may nearly vanish."""
        return short_rows(self.subject.output_shapes())

    def golden(self, case: Case) -> Golden:
        """Return the case with its truth, eager's outputs, and the error allowed for each."""
        with threads(self._threads):
            return self._golden(case)

    def usable(self, case: Case) -> Golden:
        """Return a case with its truth, its inputs changed as far as evidence requires.

        Loud inputs of one module overflow in another, or amplify rounding until nothing can fail:
        they are scaled down. Where a row of few elements happens to vanish, other signs help.
        """

        def settled(case: Case) -> Golden:
            return self.golden(self.settled(case) or case)

        return usable_golden(case, settled, short_rows=self.has_short_rows)

    def settled(self, case: Case) -> Case | None:
        """Return a case whose integers are certain; None if there is none near it."""
        spec = self.subject.spec
        with threads(self._threads):
            if self._activations:
                return self._activations.settled(case)
            if spec is None or spec.kv_dtype == "none":
                return case
            assert isinstance(self.precise, Attention)
            from attn_export.parity import float16_ties, near_ties

            if spec.kv_dtype == FLOAT16:
                return float16_ties.away_from_ties(case, self.precise)
            return near_ties.away_from_ties(case, self.precise)

    def _quantised_activations(self) -> ActivationTies | None:
        """Return what finds values near a tie, if the copy quantises the inputs of products."""
        module = self.precise
        if not isinstance(module, Attention) or module.spec.activations == "none":
            return None
        from attn_export.parity.activation_ties import ActivationTies

        single = eps(np.dtype(np.float32))

        def noisy(inputs: Arrays, number: int) -> Arrays:
            seed = seed_of("ties", number)
            mode = RandomRounding(single, single, seed, widening=self.widening)
            return self._noisy(widened_arrays(inputs), mode)

        return ActivationTies(module, self.truth, noisy)

    def _golden(self, case: Case) -> Golden:
        eager = self.eager(case.inputs)
        truth = self.truth(case.inputs)
        if self._activations:
            return self._with_integers(case, eager, truth, self._activations.of(case.inputs))
        if self.subject.spec is not None and self.subject.spec.kv_dtype == FLOAT16:
            return self._with_float16_cache(case, eager, truth)
        rounded = self._rounded(case, eager)
        golden = judged_by(
            case, eager, truth, rounded,
            in_float32=self._computes_in_float32 and case.kind != DECODE,
        )  # fmt: skip
        return golden if self.subject.spec else self._with_ties(golden, truth)

    def _with_integers(self, case: Case, eager: Arrays, truth: Arrays, ties: Ties) -> Golden:
        """Return a case of quantised activations: all runs round them to the same integers."""
        from attn_export.parity.activation_ties import rounding_to, widened

        modules = [m for m in (self.precise, self.subject.module) if isinstance(m, Attention)]
        with rounding_to(ties.integers, *modules):
            rounded, own = self._rounded(case, eager), self.eager(case.inputs)
        golden = judged_by(case, own, truth, rounded, in_float32=False)
        golden = dataclasses.replace(golden, eager=eager)
        return widened(golden, ties) if ties.near.any() else golden

    def _with_float16_cache(self, case: Case, eager: Arrays, truth: Arrays) -> Golden:
        """Return a case whose runs keep either float16 number where both are right."""
        from attn_export.parity.float16_ties import float16_rows, rounding_to

        assert isinstance(self.precise, Attention)
        assert isinstance(self.subject.module, Attention)
        rows = float16_rows(self.precise, case)
        with rounding_to(rows.nearest, self.subject.module):
            own = self.eager(case.inputs)
        golden = judged_by(
            case, own, truth, self._rounded(case, eager, rows=rows), in_float32=False,
            exactly=("present_key", "present_value"),
        )  # fmt: skip
        unusable = dict(golden.unusable)
        if rows.overflow:
            unusable["output"] = "no evidence: new keys or values are too large for float16"
        return dataclasses.replace(
            golden, eager=eager, unusable=unusable, rows_near_ties=rows.uncertain_tokens
        )

    def _with_ties(self, golden: Golden, truth: Arrays) -> Golden:
        """Return a case with the elements that ties decide."""
        from attn_export.parity.ties import ORDERS, TieOrder, whole_numbers, with_ties

        inputs, rounded = golden.case.inputs, []
        orders = [self._truth(inputs, TieOrder(order)) for order in ORDERS if self._ranks]
        if whole_numbers(truth):
            rounded = self._rounded(golden.case, golden.eager, WIDER, TIED_RUNS)
        return with_ties(golden, truth, orders, rounded)

    def eager(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs of the module as it is.

        On one thread: the sums of float32 products depend on their number.
        """
        with torch.inference_mode(), threads(1):
            return to_numpy(self.subject.call(self.subject.module, to_torch(inputs)))

    def truth(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs of the float64 copy."""
        return self._truth(inputs, contextlib.nullcontext())

    def _truth(self, inputs: Arrays, within: AbstractContextManager[Any]) -> dict[str, np.ndarray]:
        # Inference mode would show products with weights to `widening` before they are taken apart.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            tensors = to_torch(widened_arrays(inputs))
            try:
                with self.widening or contextlib.nullcontext(), within:
                    return to_numpy(self.subject.call(self.precise, tensors))
            except ExportError as error:
                raise ExportError(
                    f"in its float64 copy, {error}; constants have to be buffers, or of x.dtype"
                ) from error

    def steps(self, inputs: Arrays) -> list[Step]:
        """Return every operation of the float64 run, after the inputs and weights."""
        tensors = to_torch(widened_arrays(inputs))
        held = {**dict(self.precise.named_parameters()), **dict(self.precise.named_buffers())}
        recording = Recording({**tensors, **held})
        widening = self.widening or contextlib.nullcontext()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), widening, recording:
            self.subject.call(self.precise, tensors)
        return recording.steps

    def _rounded(
        self, case: Case, eager: Arrays, wider: float = 1.0, least: int = 1,
        rows: Float16Rows | None = None,
    ) -> list[Arrays]:  # fmt: skip
        """Return the outputs of float64 runs that round at random, as the graph may round.

        Args:
            case: The case.
            eager: The module's own outputs.
            wider: Factor on the size of each rounding.
            least: The least number of runs.
            rows: The new keys and values of a cache in float16.
        """
        single = eps(np.dtype(np.float32))
        types = [eps(a.dtype) for a in eager.values() if is_floating(a.dtype)]
        in_float32 = self._computes_in_float32 or rows is not None
        step = single if in_float32 else max(types, default=single)
        step = wider * max(step, self._least_eps)
        steps = self._steps(case) if self._mixed and wider == 1 else ()
        inputs = widened_arrays(case.inputs)
        fewest, count = run_count(eager)
        count = max(count, least)

        def run(number: int, given: Arrays, copies: int = 1) -> Arrays:
            seed = seed_of(case.name, number)
            mode = RandomRounding(
                step, wider * single, seed, copies=copies, steps=steps, widening=self.widening
            )
            with self._keeping(rows, range(number, number + copies)):
                found = self._noisy(given, mode)
            self._ranks |= mode.ranks
            return found

        if fewest > MOST_JOINED or not self._runs_fit_into_one_batch(inputs):
            return [run(number, inputs) for number in range(count)]
        joined = {
            name: np.concatenate([a] * count) if self.has_batch(name) else a
            for name, a in inputs.items()
        }
        parts = {n: np.split(a, count) for n, a in run(0, joined, count).items()}
        return [{name: split[number] for name, split in parts.items()} for number in range(count)]

    def _keeping(self, rows: Float16Rows | None, numbers: range) -> AbstractContextManager[None]:
        """Let runs of these numbers, which are rows of one batch, keep their float16 numbers."""
        if rows is None:
            return contextlib.nullcontext()
        from attn_export.parity.float16_ties import rounding_to

        assert isinstance(self.precise, Attention)
        drawn = [rows.drawn(number) for number in numbers]
        keys, values = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        return rounding_to((keys, values), self.precise)

    def _noisy(self, inputs: Arrays, mode: RandomRounding) -> Arrays:
        found = self._activations
        apart = found.subtracting() if found else contextlib.nullcontext()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), apart, mode:
            return to_numpy(self.subject.call(self.precise, to_torch(inputs)))

    def _steps(self, case: Case) -> Steps:
        """Return the operations of the module in its own types."""
        tensors = to_torch(case.inputs)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            return recorded_steps(lambda: self.subject.call(self.subject.module, tensors))

    def _runs_fit_into_one_batch(self, inputs: Arrays) -> bool:
        """Return whether several runs are rows of one batch: attention treats rows alike.

        A scale of all rows does not.
        """
        if self._activations:
            return False
        apart = [name for name in inputs if not self.has_batch(name)]
        return self.subject.spec is not None and len(apart) < len(inputs)

    def has_batch(self, name: str) -> bool:
        """Return whether the rows of an input are those of the batch."""
        return self.subject.axes[name].get(0) == "batch"


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let PyTorch use so many threads inside this block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
