"""Every value of a module in its float64 run, with the line of user code behind it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_export.explain.eager_values import Step
from attn_export.parity.operations import name_of
from attn_export.source_location import is_theirs, show

MOST_STEPS = 5000
"""The most operations that are recorded: a loop over tokens has many."""


class Recording(TorchDispatchMode):
    """Recorder of the results of operations.

    Args:
        given: Inputs and weights, by name; they are the first steps.

    Attributes:
        steps: In the order of the run.
    """

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no two have one id
        for name, tensor in given.items():
            self._add(name, "", tensor, ())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation."""
        out = func(*args, **(kwargs or {}))
        if len(self.steps) < MOST_STEPS:
            parts = [part for a in args for part in (a if isinstance(a, (list, tuple)) else (a,))]
            reads = tuple(self._numbers[id(p)] for p in parts if id(p) in self._numbers)
            line = _user_line()
            if name_of(func) == "addmm":  # in graphs a product and a sum
                self._add("mm", line, args[1] @ args[2], reads)
                reads = (*reads, len(self.steps) - 1)
            for result in out if isinstance(out, (list, tuple)) else (out,):
                if isinstance(result, Tensor):
                    self._add(name_of(func), line, result, reads)
        return out

    def _add(self, operation: str, line: str, tensor: Tensor, reads: tuple[int, ...]) -> None:
        self._numbers[id(tensor)] = len(self.steps)
        self._alive.append(tensor)
        value = tensor.detach().cpu()
        array = value.double().numpy() if value.is_floating_point() else value.numpy()
        self.steps.append(Step(operation, line, np.array(array), reads))


def _user_line() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_theirs(frame.f_code.co_filename):
            return show((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return ""
