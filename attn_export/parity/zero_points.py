"""Rounding errors of kernels that subtract the zero points of weights after the product."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised_activations import DynamicInt8PerBlock
from attn_export.attention.quantised_cache import MIDDLE
from attn_export.spec import AttentionSpec

LARGEST = 7
"""The largest 4-bit weight; as an unsigned integer it is larger by `MIDDLE`, the zero point."""


@contextlib.contextmanager
def subtracting_zero_points(module: nn.Module) -> Iterator[None]:
    """Let products with 4-bit weights round as in kernels that subtract zero points afterwards.

    Such a kernel multiplies by unsigned integers, and subtracts the sum of each block of inputs
    times the block's zero point, both in float32. If the result is much smaller than these two
    numbers, their rounding errors are most of its error. Inside this block the second number is
    added to each product and subtracted again, so that both steps round at random.

    Args:
        module: A float64 copy of a module. Nothing changes unless its inputs are rounded by block:
            no other kernels work so.
    """
    hooks = []
    if isinstance(module, Attention) and isinstance(module.activations, DynamicInt8PerBlock):
        hooks = [
            layer.register_forward_hook(_offset_hook(layer, module.spec))
            for layer in module.modules()
            if isinstance(layer, nn.Linear)
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _offset_hook(layer: nn.Linear, spec: AttentionSpec) -> Callable[..., Tensor]:
    """Return a hook of a linear layer that adds and subtracts the product with zero points.

    Zero points times scales are derived from the weights. In symmetric blocks the largest weight
    is 7 scales and the zero point is 8. In others the zero point times the scale is the distance
    from the least weight to 0.
    """
    blocks = layer.weight.detach().unflatten(-1, (-1, spec.block_size))  # [N, blocks, block]
    if spec.scheme == "symmetric":
        zeros = blocks.abs().amax(-1) * (MIDDLE / LARGEST)
    else:
        zeros = -blocks.amin(-1).clamp(max=0)
    offset = zeros.double().T

    def hook(_: nn.Module, inputs: tuple[Tensor], out: Tensor) -> Tensor:
        sums = inputs[0].unflatten(-1, (-1, spec.block_size)).sum(-1)  # [B, L, blocks]
        rounded: Tensor = out + sums @ offset - sums @ offset
        return rounded

    return hook
