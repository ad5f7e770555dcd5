"""Refusals of inputs, as a user or a function of the user gives them, that are like no array."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attn_export.errors import UsageError, printable


@contextlib.contextmanager
def checked_inputs(inputs: Mapping[Any, Any]) -> Iterator[None]:
    """Refuse names that are no strings, and values that hold themselves, inside this block."""
    for name in inputs:
        if not isinstance(name, str):
            raise UsageError(f"inputs are named by strings; got {printable(repr(name), 60)}")
    try:
        yield
    except RecursionError as error:
        raise UsageError(f"inputs {', '.join(inputs)} are nested without end") from error


def dense(place: str, tensor: Tensor) -> Tensor:
    """Return a tensor; raise an error if it is not like an array in memory."""
    if tensor.is_nested:
        raise UsageError(f"{place} is a nested tensor; pass a padded one, and a mask")
    if tensor.is_meta or hasattr(tensor, "fake_mode"):
        raise UsageError(f"{place} is a tensor without values; pass one with values")
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UsageError(f"{place} is a {kind} tensor; pass a dense one")
    return tensor
