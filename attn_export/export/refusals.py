"""Errors for axes that a module does not leave free."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn_export.cases.sizes import Sizes
from attn_export.errors import ExportError
from attn_export.source_location import branching_line
from attn_export.subject import Subject


def fixed_axis(subject: Subject, name: str, axis: int, size: str) -> ExportError:
    """Return the error for an axis that the module restricts to one size.

    Args:
        subject: The subject.
        name: The input.
        axis: The index of the axis.
        size: The only size that the module allows.
    """
    label = subject.axes[name].get(axis)
    at = branch_at(subject, {label: int(size) + 1}) if label and size.isdigit() else ""
    return ExportError(
        f"axis {label!r} ({name}.shape[{axis}]) was fixed at {size} by the module{at}; write it so "
        "that it works for every size, or do not name the axis"
    )


def branch_at(subject: Subject, changed: Sizes) -> str:
    """Return `` (file.py:12)``: the line of the module at which these sizes branch off.

    Args:
        subject: Whose module is run: at the example's sizes, and at others.
        changed: The sizes that differ from the example's.
    """

    def run(sizes: Sizes) -> Callable[[], object]:
        inputs = subject.draw(sizes, "branch")
        return lambda: subject.call(subject.module, inputs)

    with torch.inference_mode():
        line = branching_line(run(subject.example_sizes), run(subject.sizes_with(changed)))
    return f" ({line})" if line else ""
