"""Descriptions of the rows of outputs in which alone a fault is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx

from attn_export.explain.comparison import Evidence, Rows
from attn_export.explain.input_roles import axes_of, input_roles
from attn_export.explain.pattern import separating_conditions
from attn_export.float64.evaluate import Evaluation
from attn_export.tensorfile import Array

HIDDEN = -1e29
"""The number up to which an element of a float mask hides a key."""


def where_made(evaluation: Evaluation, cases: Sequence[Evidence], rows: Sequence[Rows]) -> str:
    """Describe the rows in which a fault is made.

    Returns:
        The end of a sentence; "" if they have nothing in common that is known, or if too few cases
        tell.
    """
    made, left = (
        [any(part[which].any() for part in case.values()) for case in rows] for which in (0, 1)
    )
    if sum(made) < 2:
        return ""
    units = {output.name: _units(output) for output in evaluation.proto.graph.output}
    found: list[list[str]] = []
    for case, parts in zip(cases, rows, strict=True):
        for name, (made_rows, right_rows) in parts.items():
            if made_rows.any() or right_rows.any():
                described = _conditions(evaluation, case, made_rows.shape, units[name])
                found.append(
                    [
                        text
                        for text, holds in described
                        if not (made_rows & ~holds).any() and not (right_rows & holds).any()
                    ]
                )
    texts = [text for text in found[0] if all(text in others for others in found)]
    if not any(m and r for m, r in zip(made, left, strict=True)):
        made_sizes, left_sizes = (
            [case.sizes for case, flag in zip(cases, flags, strict=True) if flag]
            for flags in (made, left)
        )
        # A range between sizes that pass says little: few cases have sizes of it.
        conditions = separating_conditions(made_sizes, left_sizes)
        texts += [text for text in conditions if not text.startswith("with ")]
    return min(texts, key=lambda text: text.startswith("in the "), default="")


def _units(output: onnx.ValueInfoProto) -> list[str]:
    """Return what the rows of an output are, by its axes but the last."""
    axes = axes_of(output)
    words = {"query_len": "query", "total_len": "key", "capacity": "key", "": "head"}
    other = "query" if len(axes) == 3 else "position"
    return ["batch element", *(words.get(axis, other) for axis in axes[1:-1])][: len(axes) - 1]


def _conditions(
    evaluation: Evaluation, case: Evidence, shape: tuple[int, ...], units: Sequence[str]
) -> Iterator[tuple[str, Array]]:
    """Yield descriptions of rows, and the rows that each describes, `shape`."""
    for text, hides in _hidden_keys(evaluation, case):
        # `[B, L]`; of keys, only what holds for all queries of a batch element is known.
        by_row = hides if units[-1] == "query" else np.asarray(hides.all(axis=1, keepdims=True))
        if by_row.shape[1] in (1, shape[-1]):
            middle = (1,) * (len(shape) - 2)
            yield text, np.broadcast_to(by_row.reshape(len(by_row), *middle, -1), shape)
    for axis, unit in enumerate(units[: len(shape)]):
        size = shape[axis]
        index = np.arange(size).reshape(-1, *(1,) * (len(shape) - axis - 1))
        for text, holds in (
            (f"in the first {unit}", index == 0),
            (f"in every {unit} but the first", index > 0),
            (f"in the last {unit}", index == size - 1),
            (f"in every {unit} but the last", index < size - 1),
            *((f"in {unit} {number}", index == number) for number in range(1, 8)),
        ):
            yield text, np.broadcast_to(holds, shape)


def _hidden_keys(evaluation: Evaluation, case: Evidence) -> Iterator[tuple[str, Array]]:
    """Yield descriptions of the rows whose mask hides certain keys, `[B, L]` or `[B, 1]`."""
    batch = len(next(iter(case.right.values())))
    for name, array, role in input_roles(evaluation, case.values):
        if role == "mask" and array.size and (array.ndim == 4 or array.shape[:-1] == (batch,)):
            shown = array if array.dtype == np.bool_ else array > HIDDEN
            shown = shown.reshape(len(shown), *(1,) * (4 - shown.ndim), *shown.shape[1:])
            hidden = np.asarray(~shown.any(axis=1))  # [B, L, S]
            yield f"in rows whose {name} hides key 0 (left padding)", hidden[..., 0]
            yield f"in rows whose {name} hides the last key", hidden[..., -1]
            yield f"in rows whose {name} hides no key", np.asarray(~hidden.any(axis=-1))
            yield f"in rows whose {name} hides a key", np.asarray(hidden.any(axis=-1))
            return
