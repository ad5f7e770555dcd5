"""Roles of the axes of a subject, by runs of its module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_export.cases.draw import Sizes, draw_inputs
from attn_export.cases.roles import Trial, find_roles
from attn_export.errors import AttnExportError
from attn_export.export.trees import to_numpy, to_torch
from attn_export.spec.inputs import Roles
from attn_export.tensorfile import ArrayDict


def find_subject_roles(subject: Any) -> Roles:
    """Return the roles of the axes of a subject with a user's module."""
    inputs = subject.input_descriptions()

    def draw(changed: Sizes, seed: str) -> ArrayDict:
        return draw_inputs(inputs, subject.sizes_with(changed), seed_words=(seed,))

    def run(arrays: Mapping[str, np.ndarray]) -> Trial:
        recorder = _ConcatenationRecorder()
        with torch.no_grad(), recorder:
            outputs = subject.call(subject.module, to_torch(arrays))
        joined = {str(index): tensor for index, tensor in enumerate(recorder.results)}
        return Trial(to_numpy(outputs), tuple(to_numpy(joined).values()))

    try:
        outputs = subject.output_shapes()
    except AttnExportError:
        return Roles()  # the capture says at which sizes the module raises
    shapes = {name: input_.shape for name, input_ in inputs.items()}
    roles = find_roles(shapes, outputs, subject.sums, draw, run)
    least = {axis: low for axis, low in roles.least.items() if axis not in subject.with_least}
    return dataclasses.replace(roles, least=least)


class _ConcatenationRecorder(TorchDispatchMode):
    """Mode that records the results of concatenations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation."""
        out = func(*args, **dict(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.results.append(out)
        return out
