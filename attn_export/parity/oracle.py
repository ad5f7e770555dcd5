"""Truth, eager and the error allowed, from the module itself.

*eager* is the user's module as it is. *truth* is a copy of it in float64 with PyTorch's math
backend: its CPU flash kernel turns a NaN row into 0 and an overflow into a number.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_export.cases.draw import generator
from attn_export.errors import ExportError, one_line
from attn_export.nouns import Allowed, Arrays, Case, Golden
from attn_export.parity.measures import Measures, eps, measure
from attn_export.parity.widened import ComputeInFloat64
from attn_export.subject import Subject
from attn_export.subject.tensors import to_numpy, to_torch
from attn_export.tensorfile import is_floating

SAFETY = 8
"""How many times eager's own error, or the case's own amplification, is allowed."""

FLOOR = 4
"""What is allowed in any case, in units of eps."""

CONDITION_RUNS = 4
"""How many perturbed runs measure the amplification."""

MEANINGLESS = 1.0
"""An output of zeros has this relative error: where it is allowed, nothing can fail."""

STEP = 2.0**-22
"""Of the steps that show how precise the truth is: a few of those of float32."""

POOR = 1e-9
"""A truth that is worse is worth a note."""

FAR = 256
"""How many eps from its truth a module is worth a note."""

PLACES = 3
"""How many lines of the module a note names."""

ONE_THREAD_BELOW = 4_000_000
"""Modules with fewer parameters run on one thread: on matrices this small, handing work over
takes longer than doing it (measured at E 512: 0.39 s against 0.73 s for all cases)."""


class Oracle:
    """Answers what a subject's outputs should be.

    Args:
        subject: Whose module is asked; it is copied to float64 once.
        settled: Whether what it means was settled in float32: a case that rounding to few bits
            drowns is then no evidence, but nothing is wrong either.

    Attributes:
        silent: The outputs of such cases, as ``case output``.
    """

    def __init__(self, subject: Subject, *, settled: bool = False) -> None:
        self._subject, self._settled = subject, settled
        self.silent: list[str] = []
        try:
            self._precise = copy.deepcopy(subject.module).double()
        except Exception as error:
            raise ExportError(f"the module has no float64 copy: {one_line(error)}") from error
        size = sum(parameter.numel() for parameter in subject.module.parameters())
        # Ours asks for nothing less than its inputs have.
        self._widening = None if subject.spec else ComputeInFloat64()
        self._threads = 1 if size < ONE_THREAD_BELOW else torch.get_num_threads()

    def golden(self, case: Case) -> Golden:
        """The case with its truth, eager's outputs, and the error allowed for each output."""
        with _threads(self._threads):
            return self._golden(case)

    def _golden(self, case: Case) -> Golden:
        eager = self.eager(case.inputs)
        step = max((eps(a.dtype) for a in eager.values() if is_floating(a.dtype)), default=0.0)
        noisy = [_perturbed(case, run, step) for run in range(CONDITION_RUNS)]
        truth, *perturbed = self._truths([case.inputs, *noisy])
        allowed: dict[str, Allowed | None] = {}
        unusable: dict[str, str] = {}
        for name, t in truth.items():
            e = eager[name]
            if not is_floating(e.dtype):
                allowed[name] = None
            elif bool((np.isfinite(t) & ~np.isfinite(e.astype(np.float64))).any()):
                allowed[name] = None
                unusable[name] = "eager is not finite where the float64 truth is: no evidence"
            else:
                conditions = [measure(run[name], t) for run in perturbed]
                allowed[name] = found = _allowed(measure(e, t), conditions, eps(e.dtype))
                if found.whole >= MEANINGLESS and self._settled:
                    allowed[name] = None
                    self.silent.append(f"{case.name} {name}")
                elif found.whole >= MEANINGLESS:
                    unusable[name] = "rounding alone changes all of the output: no evidence"
        with np.errstate(over="ignore"):  # beyond the range of the dtype is infinite in it
            expected = {name: t.astype(eager[name].dtype) for name, t in truth.items()}
        return Golden(case, expected, eager, allowed, unusable)

    def eager(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """What the module gives, as it is."""
        with torch.inference_mode():
            return to_numpy(self._subject.call(self._subject.module, to_torch(inputs)))

    def truth(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """What the float64 copy gives."""
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
        """What a reader should know of the truth."""
        if self.silent:
            drowned = (
                f"{len(self.silent)} outputs say nothing in so few bits, since rounding alone "
                f"changes all of them ({self.silent[0]} …); they were settled in float32"
            )
            return (drowned, *self._notes(case))
        return self._notes(case)

    def _notes(self, case: Case) -> tuple[str, ...]:
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
                        f"than its type explains; {SAFETY} times that is allowed to runtimes",
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
        """How good the truth itself is, in relative L2.

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

    def _truths(self, runs: list[Arrays]) -> list[dict[str, np.ndarray]]:
        """The truth for each of several inputs of the same shapes.

        Attention treats the rows of a batch alike, so ours takes all runs as one batch where
        every input that differs has one: a fifth of the calls, and of the weights read.
        """
        apart = [name for name in runs[0] if self._subject.axes[name].get(0) != "batch"]
        floats_apart = any(is_floating(runs[0][name].dtype) for name in apart)
        if self._subject.spec is None or floats_apart:
            return [self.truth(run) for run in runs]
        joined = {
            name: array if name in apart else np.concatenate([run[name] for run in runs])
            for name, array in runs[0].items()
        }
        split = {n: np.split(a, len(runs)) for n, a in self.truth(joined).items()}
        return [{name: parts[run] for name, parts in split.items()} for run in range(len(runs))]


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _allowed(eager: Measures, conditions: list[Measures], step: float) -> Allowed:
    return Allowed(
        whole=max(SAFETY * max(eager.whole, *(c.whole for c in conditions)), FLOOR * step),
        row=max(SAFETY * max(eager.row, *(c.row for c in conditions)), FLOOR * step),
    )


def _perturbed(case: Case, run: int, step: float) -> dict[str, np.ndarray]:
    """Every floating input times 1 + ε·U(−1, 1), in float64."""
    inputs = {}
    for name, array in case.inputs.items():
        if is_floating(array.dtype):
            noise = generator("condition", case.name, name, run).uniform(-1, 1, array.shape)
            inputs[name] = array.astype(np.float64) * (1 + step * noise)
        else:
            inputs[name] = array
    return inputs
