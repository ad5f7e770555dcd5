"""Rounding of products whose kernels subtract the zero points of weights afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised_activations import DynamicInt8PerBlock
from attn_export.quantiser import QuantisedWeight


@contextlib.contextmanager
def subtracting_zero_points(module: nn.Module) -> Iterator[None]:
    """Let products with weights of 4 bits round as kernels do that subtract zero points afterwards.

    Such a kernel multiplies unsigned integers, and subtracts for each block the sum of its inputs
    times the zero point, both in float32. Where the result is much smaller than these two, their
    rounding is most of its error. Here the second product is added and subtracted again.

    Args:
        module: A float64 copy, changed for the time of the block. Where inputs are not rounded by
            block, no such kernel multiplies, and nothing changes.
    """
    hooks = []
    if isinstance(module, Attention) and isinstance(module.activations, DynamicInt8PerBlock):
        hooks = [
            module.get_submodule(name.rpartition(".")[0]).register_forward_hook(_offset_by(weight))
            for name, weight in module.integers.items()
        ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _offset_by(weight: QuantisedWeight) -> Callable[..., Tensor]:
    """Return a hook of a linear layer, which adds and subtracts the product with zero points."""
    offset = torch.from_numpy(weight.unsigned_zero_points() * weight.scales.astype(np.float64))

    def hook(_: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
        sums = given[0].unflatten(-1, (-1, weight.block)).sum(-1)  # [B, L, blocks]
        found: Tensor = out + sums @ offset - sums @ offset
        return found

    return hook
