"""Buffers that stay precise when a module is cast to a type of few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

NARROW = (torch.float16, torch.bfloat16)
"""Types of few bits, in which rounding hides mistakes."""


class WideBuffers(nn.Module):
    """A module whose constants are float32 at least: ``.half()`` leaves them alone.

    Frequencies and slopes of 8 or 11 bits would be those of another model.
    """

    def __init__(self) -> None:
        super().__init__()
        self._exact: dict[str, Tensor] = {}

    def add_wide(self, name: str, exact: Tensor) -> None:
        """Register a float64 tensor as a buffer of the default dtype, or float32.

        Args:
            name: The name of the buffer.
            exact: The values, float64.
        """
        self._exact[name] = exact
        self.register_buffer(name, exact.to(torch.get_default_dtype()), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, exact in self._exact.items():
            buffer = self.get_buffer(name)
            if buffer.dtype in NARROW:
                setattr(self, name, exact.to(device=buffer.device, dtype=torch.float32))
        return self
