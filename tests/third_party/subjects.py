"""Subjects of modules that others wrote: the inputs that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attn_export import Axis, Subject

E, H, D = 32, 4, 8
BATCH: Mapping[int, Any] = {0: "batch"}
TOKENS: Mapping[int, Any] = {0: "batch", 1: "query_len"}
KEYS: Mapping[int, Any] = {0: "batch", 1: "key_len"}

Table = dict[str, Callable[[], Subject]]


class Taken(nn.Module):
    """A module of which only some of what it returns is wanted."""

    def __init__(
        self, inner: nn.Module, take: Callable[[Any], Any] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.inner, self.take, self.options = inner, take or first_of, options

    def forward(self, **inputs: Any) -> Any:
        return self.take(self.inner(**inputs, **self.options))


def first_of(returned: Any) -> Tensor:
    """Return the first tensor of what a module returned."""
    for name in ("last_hidden_state", "logits", "sample"):
        if getattr(returned, name, None) is not None:
            found: Tensor = getattr(returned, name)
            return found
    return returned if isinstance(returned, Tensor) else first_of(next(iter(returned)))


def tokens(module: nn.Module, *, name: str = "x", axis: Any = "query_len", length: int = 5):
    """Return a subject of a module that maps tokens `[B, L, E]`."""
    inputs = {name: torch.randn(2, length, E)}
    return Subject(module.eval(), inputs, {name: {0: "batch", 1: axis}}, ["output"])


def taken(
    module: nn.Module,
    inputs: Mapping[str, Any],
    axes: Mapping[str, Mapping[int, Any]],
    outputs: Sequence[str] = ("output",),
    take: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Subject:
    """Return a subject of a part of what a module returns."""
    return Subject(Taken(module, take, **options).eval(), inputs, axes, outputs)


def ids(count: int = 50, length: int = 5) -> Tensor:
    """Return token numbers `[2, L]`, int64."""
    found = torch.randint(3, count, (2, length))
    found[0, 0], found[1, 0] = 3, count - 1
    return found


def padding(length: int = 5) -> Tensor:
    """Return a mask of ones, int64, whose second row ends early."""
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length - 2 :] = 0
    return mask


def two(module: nn.Module, first: str, second: str, **options: Any) -> Subject:
    """Return a subject of a module that maps tokens beside other tokens."""
    inputs = {first: torch.randn(2, 5, E), second: torch.randn(2, 6, E)}
    return taken(module, inputs, {first: TOKENS, second: KEYS}, **options)


def image(module: nn.Module, size: int = 16, channels: int = 3, name: str = "x", **options: Any):
    """Return a subject of a module that takes images of one size."""
    return taken(module, {name: torch.randn(2, channels, size, size)}, {name: BATCH}, **options)


def bounded(low: int = 1, high: int | None = None) -> Axis:
    """Return the axis of queries with bounds."""
    return Axis("query_len", min=low, max=high)
