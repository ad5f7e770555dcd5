"""Ranges of an input's values, taken from its example."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_export.spec import Input
from attn_export.subject.checks import dtype_of


def input_like(example: Tensor, axes: Mapping[int, str]) -> Input:
    """Return the description of an input that has `example` as an instance.

    Args:
        example: Its dtype, its fixed sizes, the range of its integers, what its rows start with
            and whether it holds -inf are taken over.
        axes: The names of its dynamic axes.
    """
    shape = tuple(axes.get(axis, size) for axis, size in enumerate(example.shape))
    whole = not (example.is_floating_point() or example.dtype == torch.bool)
    span = (int(example.min()), int(example.max())) if whole and example.numel() else (0, 0)
    return Input(shape, dtype_of(example), *span, _first(example), _hides(example))


def _first(example: Tensor) -> bool | None:
    """Return the common first value of all rows of a bool tensor, or None."""
    if example.dtype != torch.bool or not example.dim() or not example.numel():
        return None
    starts = set(example[..., 0].flatten().tolist())
    return bool(starts.pop()) if len(starts) == 1 else None


def _hides(example: Tensor) -> bool:
    return example.is_floating_point() and bool((example == -torch.inf).any())
