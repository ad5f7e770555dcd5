"""Runs of a module at other sizes, with other names, relations and bounds of its axes."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from attn_export.cases.draw import MAX_SIZE, Sizes, add_sums, clamp_sizes, may_try
from attn_export.errors import ExportError, UsageError
from attn_export.export.trees import Axis, allowed_by, spares_of, with_spares

if TYPE_CHECKING:
    from attn_export.export.subject import Subject

SIZES = ((3, 7, 12, 19, 29, 41, 57), (11, 5, 8, 23, 4, 31, 14))
"""Sizes of the axes in two runs: that of one axis, or of a sum of two, is that of no other."""

_ALONE, _LARGE = (11, 37), 17
"""Sizes of an axis in runs in which it alone has another size than in the example, and that of all
others in runs in which it is 2: a size of 1 may be broadcast."""

_MOST_RUNS, _MOST_SECONDS = 2000, 10.0


@dataclasses.dataclass(frozen=True)
class Statement:
    """What a user may state of the axes of a subject, beyond what the subject has.

    Attributes:
        axes: The names of axes of inputs, those of the subject included.
        relations: New relations, as `Subject` takes them.
        bounds: New bounds of axes.
    """

    axes: Mapping[str, Mapping[int, str]]
    relations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bounds: Mapping[str, Axis] = dataclasses.field(default_factory=dict)

    def of(self, subject: Subject) -> Subject:
        """Return a copy of a subject that has these names, relations and bounds."""
        sizes = dict(subject.example_sizes)
        for name, axes in self.axes.items():
            sizes |= {label: subject.inputs[name].shape[axis] for axis, label in axes.items()}
        sums = {**subject.sums, **with_spares(self.relations)}
        spares = spares_of(sums, sizes)
        bounds = {name: allowed_by(axis) for name, axis in self.bounds.items()}
        bounds |= {name: range(MAX_SIZE + 1) for name in spares}
        return subject.having(
            axes={name: dict(axes) for name, axes in self.axes.items()}, relations=sums, sums=sums,
            bounds={**subject.bounds, **bounds}, example_sizes=add_sums({**sizes, **spares}, sums),
        )  # fmt: skip


class TooManyRunsError(Exception):
    """The runs of a module took more than they may."""


class Trials:
    """Runs of one module at other shapes of its inputs, up to a limit."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._until = time.process_time() + _MOST_SECONDS
        self._known: dict[object, tuple[bool, int]] = {}

    def failures_of(self, stated: Statement, most: float = float("inf")) -> float:
        """Return in how many of several runs a module raises, less the part of each that it did.

        No more runs follow when there are as many failures as `most`.
        """
        subject = stated.of(self.subject)
        whole = self._run(subject, subject.example_sizes)[1]
        failures, seen = 0.0, set()
        for changed in _tried(subject):
            sizes = subject.sizes_with(clamp_sizes(changed, subject.bounds))
            if (key := tuple(sizes.values())) in seen:
                continue
            seen.add(key)
            raised, count = self._run(subject, sizes)
            failures += 1 - count / (count + whole + 1) if raised else 0
            if failures >= most:
                break
        return failures

    def runs_at(self, subject: Subject, sizes: Sizes) -> bool:
        """Return whether a module runs at these sizes of all axes."""
        return not self._run(subject, sizes)[0]

    def _run(self, subject: Subject, sizes: Sizes) -> tuple[bool, int]:
        """Return whether a module raises at some sizes, and after how many operations."""
        if min(sizes.values(), default=0) < 0:
            return True, 0
        if not may_try(0, sizes, subject.sums):
            return False, 0
        shapes = tuple(
            sizes.get(subject.axes[name].get(axis, ""), size)
            for name, tensor in subject.inputs.items()
            for axis, size in enumerate(tensor.shape)
        )
        if shapes not in self._known:
            if len(self._known) >= _MOST_RUNS or time.process_time() > self._until:
                raise TooManyRunsError
            self._known[shapes] = _run_once(subject, sizes)
        return self._known[shapes]


def joint_sizes(subject: Subject, numbers: tuple[int, ...]) -> dict[str, int]:
    """Return sizes of all axes that are no sums, all of them other than in the example."""
    free = [name for name in subject.example_sizes if name not in subject.sums]
    sizes = dict(zip(free, itertools.cycle(numbers), strict=False))
    return clamp_sizes(sizes, subject.bounds)


def _tried(subject: Subject) -> Iterator[Mapping[str, int]]:
    free = [name for name in subject.example_sizes if name not in subject.sums]
    yield from (joint_sizes(subject, numbers) for numbers in SIZES)
    yield from ({name: size} for name in free for size in _ALONE)
    for one, others in ((2, _LARGE), (_LARGE, 2)):
        yield from ({**dict.fromkeys(free, others), name: one} for name in free)


class _OperationCounter(TorchDispatchMode):
    """Mode that counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        out = func(*args, **dict(kwargs or {}))
        self.count += 1
        return out


@torch.inference_mode()
def _run_once(subject: Subject, sizes: Sizes) -> tuple[bool, int]:
    counter = _OperationCounter()
    try:
        inputs = subject.draw(sizes, "names")
        # The quick kernels read beyond the ends of values that are shorter than keys.
        with sdpa_kernel(SDPBackend.MATH), counter:
            subject.call(subject.module, inputs)
    except (ExportError, KeyError):  # KeyError: a sum of a sum
        return True, counter.count
    except UsageError:
        pass  # it ran; what it returns is refused by the export
    return False, counter.count
