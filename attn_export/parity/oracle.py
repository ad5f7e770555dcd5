"""Truth, eager and the error allowed, from the module itself.

*eager* is the user's module as it is. *truth* is a copy of it in float64 with PyTorch's math
backend: its CPU flash kernel turns a NaN row into 0 and an overflow into a number. The error that
is allowed is what rounding explains: see `docs/parity.md`.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_export.cases.draw import generator, scaled_case, seed_of
from attn_export.errors import ExportError, one_line
from attn_export.nouns import DECODE, Allowed, Arrays, Case, Golden
from attn_export.parity.allowed import EAGER, allowed_error, narrowed
from attn_export.parity.limits import beyond_limit
from attn_export.parity.measures import eps, measure, zero_rows
from attn_export.parity.rounding import RandomRounding, Steps, recorded_steps
from attn_export.parity.widened import ComputeInFloat64
from attn_export.subject import Subject
from attn_export.subject.tensors import to_numpy, to_torch
from attn_export.tensorfile import is_floating

RUNS = ((16, 16), (128, 8), (math.inf, 4))
"""The number of random runs for outputs of at most so many rows: the worst of few rows is a small
sample, and the worst of many is not."""

RUNS_APART = 8
"""The largest number of runs of a module whose runs do not fit into one batch."""

QUIETER = 4
"""The number of times that inputs are divided by 4 to make a case usable as evidence."""

STEP = 2.0**-22
"""The size of the steps that show how precise the truth is: a few of those of float32."""

POOR = 1e-9
"""The precision from which on a truth is worth a note."""

FAR = 256
"""The distance of a module from its truth that is worth a note, in units of eps."""

PLACES = 3
"""The number of lines of the module that a note names."""

ONE_THREAD_BELOW = 4_000_000
"""Modules with fewer parameters run on one thread: on matrices this small, handing work over
takes longer than doing it (measured at E 512: 0.39 s against 0.73 s for all cases)."""


class Oracle:
    """Computes the expected outputs of a subject.

    Args:
        subject: The subject; its module is copied to float64 once.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        try:
            self._precise = copy.deepcopy(subject.module).double()
        except Exception as error:
            raise ExportError(f"the module has no float64 copy: {one_line(error)}") from error
        size = sum(parameter.numel() for parameter in subject.module.parameters())
        # Ours asks for nothing less than its inputs have.
        self._widening = None if subject.spec else ComputeInFloat64()
        self._threads = 1 if size < ONE_THREAD_BELOW else torch.get_num_threads()
        narrow = set(subject.narrow_dtypes().values())
        # Such a graph computes in float32, and rounds what comes out.
        self._computes_in_float32 = "bfloat16" in narrow
        self._mixed = bool(narrow) and not self._computes_in_float32

    def golden(self, case: Case) -> Golden:
        """Return the case with its truth, eager's outputs, and the error allowed for each."""
        with _threads(self._threads):
            return self._golden(case)

    def usable(self, case: Case) -> Golden:
        """Return a case with its truth, its inputs scaled down as far as evidence asks for.

        Loud inputs of one module overflow in another, or amplify rounding until nothing can fail.
        """
        golden = self.golden(case)
        for power in range(1, QUIETER + 1):
            if not golden.unusable:
                break
            golden = self.golden(scaled_case(case, 0.25**power))
        return golden

    def _golden(self, case: Case) -> Golden:
        eager = self.eager(case.inputs)
        truth = self.truth(case.inputs)
        rounded = self._rounded(case, eager)
        expected = {name: narrowed(t, eager[name].dtype) for name, t in truth.items()}
        allowed: dict[str, Allowed | None] = {}
        unusable: dict[str, str] = {}
        for name, t in truth.items():
            e = eager[name]
            if not is_floating(e.dtype):
                allowed[name] = None
                continue
            # What vanishes in the output's type has to be 0, and has no relative error.
            t = np.where(zero_rows(expected[name])[..., None], 0.0, t) if t.ndim else t
            in_float32 = self._computes_in_float32 and case.kind != DECODE
            runs = [run[name] for run in rounded]
            found = allowed_error(t, e, expected[name], runs, in_float32=in_float32)
            if bool((np.isfinite(t) & ~np.isfinite(e.astype(np.float64))).any()):
                reason = "eager is not finite where the float64 truth is: no evidence"
            else:
                reason = beyond_limit(found, e.dtype)
            allowed[name] = found
            if reason:
                unusable[name] = reason
        return Golden(case, expected, eager, allowed, unusable)

    def eager(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs of the module as it is."""
        with torch.inference_mode():
            return to_numpy(self._subject.call(self._subject.module, to_torch(inputs)))

    def truth(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs of the float64 copy."""
        with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
            tensors = to_torch(
                {n: a.astype(np.float64) if is_floating(a.dtype) else a for n, a in inputs.items()}
            )
            try:
                with self._widening or contextlib.nullcontext():
                    return to_numpy(self._subject.call(self._precise, tensors))
            except ExportError as error:
                raise ExportError(
                    f"in its float64 copy, {error}; constants have to be buffers, or of x.dtype"
                ) from error

    def notes(self, case: Case) -> tuple[str, ...]:
        """Return what a reader should know of the truth."""
        if self._widening is None:
            return ()
        return (*self._far_from_truth(case), *self._precision_notes(case))

    def _far_from_truth(self, case: Case) -> tuple[str, ...]:
        eager, truth = self.eager(case.inputs), self.truth(case.inputs)
        for name, e in eager.items():
            if is_floating(e.dtype):
                off = measure(e, truth[name]).whole
                if off > FAR * eps(e.dtype):
                    return (
                        f"{name} of the module itself is {off:.0e} from its float64 truth, more "
                        f"than its type explains; {EAGER:g} times that is allowed to runtimes",
                    )
        return ()

    def _precision_notes(self, case: Case) -> tuple[str, ...]:
        precision = self.precision(case)
        asked = self._widening.places if self._widening else {}
        places = [place for place in asked if place]
        found = f"{precision:.0e} in relative L2"
        if places:
            shown = ", ".join(places[:PLACES]) + (" …" if len(places) > PLACES else "")
            return (
                f"the module asks for float32 or less at {shown}; its truth computes there in "
                f"float64, with a precision of {found}",
            )
        if precision > POOR:
            return (f"the float64 truth is itself good to {found} only",)
        return ()

    def precision(self, case: Case) -> float:
        """Return how good the truth itself is, in relative L2.

        f(x + δ) + f(x − δ) − 2 f(x) with δ a random `STEP` of x is of the order of δ² for a smooth
        function in float64. Parts that compute in fewer bits leave their rounding there.
        """
        noise = {
            name: STEP * generator("precision", name).uniform(-1, 1, array.shape)
            for name, array in case.inputs.items()
            if is_floating(array.dtype)
        }

        def moved(sign: int) -> dict[str, np.ndarray]:
            x = case.inputs
            moved = {n: x[n].astype(np.float64) * (1 + sign * d) for n, d in noise.items()}
            return self.truth({**x, **moved})

        before, at, after = (moved(sign) for sign in (-1, 0, 1))
        found = [
            measure((before[name] + after[name]) / 2, t).whole
            for name, t in at.items()
            if is_floating(t.dtype)
        ]
        return max(found, default=0.0)

    def _rounded(self, case: Case, eager: Arrays) -> list[Arrays]:
        """Return the outputs of float64 runs that round at random, as the graph may round."""
        single = eps(np.dtype(np.float32))
        types = [eps(a.dtype) for a in eager.values() if is_floating(a.dtype)]
        step = single if self._computes_in_float32 else max(types, default=single)
        steps = self._steps(case) if self._mixed else ()
        inputs = {
            name: a.astype(np.float64) if is_floating(a.dtype) else a
            for name, a in case.inputs.items()
        }
        rows = min(math.prod(a.shape[:-1]) for a in eager.values())
        count = next(runs for most, runs in RUNS if rows <= most)

        def run(seed: int, given: Arrays, copies: int = 1) -> Arrays:
            seed = seed_of(case.name, seed)
            return self._noisy(
                given, RandomRounding(step, single, seed, copies=copies, steps=steps)
            )

        if not self._runs_fit_into_one_batch(inputs):
            return [run(number, inputs) for number in range(min(count, RUNS_APART))]
        joined = {
            name: np.concatenate([a] * count) if self._has_batch(name) else a
            for name, a in inputs.items()
        }
        parts = {n: np.split(a, count) for n, a in run(0, joined, count).items()}
        return [{name: split[number] for name, split in parts.items()} for number in range(count)]

    def _noisy(self, inputs: Arrays, mode: RandomRounding) -> Arrays:
        tensors = {name: mode.rounded(x) for name, x in to_torch(inputs).items()}
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), self._widening or _nothing(), mode:
            return to_numpy(self._subject.call(self._precise, tensors))

    def _steps(self, case: Case) -> Steps:
        """Return the operations of the module in its own types."""
        tensors = to_torch(case.inputs)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            return recorded_steps(lambda: self._subject.call(self._subject.module, tensors))

    def _runs_fit_into_one_batch(self, inputs: Arrays) -> bool:
        """Return whether several runs are rows of one batch: attention treats rows alike."""
        apart = [name for name in inputs if not self._has_batch(name)]
        return self._subject.spec is not None and len(apart) < len(inputs)

    def _has_batch(self, name: str) -> bool:
        return self._subject.axes[name].get(0) == "batch"


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
