"""Rounding of products whose kernels subtract the zero points of weights afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised_activations import DynamicInt8PerBlock
from attn_export.spec import AttentionSpec

MIDDLE, LARGEST = 8, 7
"""The zero point of symmetric weights of 4 bits as unsigned integers, and the largest of them."""


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
            part.register_forward_hook(_offset_of(part, module.spec))
            for part in module.modules()
            if isinstance(part, nn.Linear)
        ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _offset_of(layer: nn.Linear, spec: AttentionSpec) -> Callable[..., Tensor]:
    """Return a hook of a linear layer, which adds and subtracts the product with zero points.

    They are taken from the weights, since a graph read back has no other integers: the largest of a
    block is 7 scales large, and a zero point lies as far from 0 as the least weight from the zero.
    """
    blocks = layer.weight.detach().unflatten(-1, (-1, spec.block_size))  # [N, blocks, block]
    if spec.scheme == "symmetric":
        zeros = blocks.abs().amax(-1) * (MIDDLE / LARGEST)
    else:
        zeros = -blocks.amin(-1).clamp(max=0)
    offset = zeros.double().T

    def hook(_: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
        sums = given[0].unflatten(-1, (-1, spec.block_size)).sum(-1)  # [B, L, blocks]
        found: Tensor = out + sums @ offset - sums @ offset
        return found

    return hook
