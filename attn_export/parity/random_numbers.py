"""Random numbers for runs that round at random."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class RandomNumbers:
    """Random numbers out of one table: drawing them anew would take as long as the products."""

    SIZE = 1 << 20

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return numbers between -1 and 1."""
        return self._of(_table(self.SIZE)[0], shape)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return numbers of a normal distribution."""
        return self._of(_table(self.SIZE)[1], shape)

    def _of(self, table: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a view of the table: in one piece, or for large shapes rows that overlap."""
        count, half = math.prod(shape), self.SIZE // 2
        start = int(torch.randint(half, (1,), generator=self._generator))
        if count <= half:
            return table[start : start + count].view(tuple(shape))
        width = shape[-1]
        rows = count // width
        step = (half - width) // rows
        if step < 1:
            return table.repeat(-(-count // self.SIZE))[:count].view(tuple(shape))
        strides = [step * math.prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 1)]
        return table.as_strided(tuple(shape), (*strides, 1), start)


@functools.cache
def _table(size: int) -> tuple[Tensor, Tensor]:
    """Return uniform and normal random numbers, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return torch.rand(size, **options).mul_(2).sub_(1), torch.randn(size, **options)
