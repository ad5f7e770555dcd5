"""Inputs of projections rounded to 8 bits, with scales computed in each run (`activations`)."""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn

from attn_export.attention import onnx_attention
from attn_export.attention.quantised_cache import Quotients
from attn_export.quantiser import BLOCK_LARGEST, LEAST_BLOCK_SCALE
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import PER_BLOCK

_LARGEST_UINT8 = 255
"""The number of steps between the least and the largest integer, as `DynamicQuantizeLinear` has."""


class QuantisedActivations(nn.Module, abc.ABC):
    """Base class of roundings of a tensor to integers times scales, in floating point."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` rounded to multiples of its scales.

        It is the input of a projection, `[B, L, N]`. While exporting it is returned as it is: the
        graph gets its rounding afterwards (`graph/quantised_weights.py`).
        """
        return x if onnx_attention.emitting() else self.integers(x) * self.scales(x)

    @abc.abstractmethod
    def scales(self, x: Tensor) -> Tensor:
        """Return the scale of each element, of the shape of `x`, or one scale for all, `[]`."""

    @abc.abstractmethod
    def integers(self, x: Tensor) -> Tensor:
        """Return the integers minus their zero point, of the shape and type of `x`.

        Quotients are rounded half to even.
        """

    def quotients(self, x: Tensor) -> list[Quotients]:
        """Return the numbers that are rounded, of the shape of `x`."""
        scales = self.scales(x)
        return [Quotients(x / scales, scales)]


class DynamicInt8(QuantisedActivations):
    """Rounding as by ONNX's `DynamicQuantizeLinear`, with one scale for the whole tensor.

    Definition: https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html.
    """

    def scales(self, x: Tensor) -> Tensor:
        """Return the scale, `[]`: the range of the elements and of 0, divided by 255.

        The scale is 1 if all elements are 0.
        """
        step = (_largest(x) - _least(x)) / _LARGEST_UINT8
        return torch.where(step > 0, step, 1.0)

    def integers(self, x: Tensor) -> Tensor:
        """Return the integers minus the zero point, clipped to 256 values, of the shape of `x`."""
        scale = self.scales(x)
        zero = (-_least(x) / scale).round()
        return (x / scale).round().clamp(-zero, _LARGEST_UINT8 - zero)


class DynamicInt8PerBlock(QuantisedActivations):
    """Rounding of the input as in ONNX Runtime's MatMulNBits with `accuracy_level` 4.

    The scale of each block of consecutive elements of a token is its largest magnitude divided by
    127; there are no zero points. ONNX does not define this. It was measured on ONNX Runtime 1.31.1
    for the CPU.
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def scales(self, x: Tensor) -> Tensor:
        """Return for each element the scale of its block, of the shape of `x`."""
        blocks = x.unflatten(-1, (-1, self.block))
        largest = blocks.abs().amax(-1, keepdim=True)
        scales: Tensor = (largest / BLOCK_LARGEST).clamp(min=LEAST_BLOCK_SCALE)
        return scales.expand_as(blocks).flatten(-2)

    def integers(self, x: Tensor) -> Tensor:
        """Return whole numbers from -127 to 127, of the shape and type of `x`."""
        return (x / self.scales(x)).round()


def _least(x: Tensor) -> Tensor:
    return x.amin().clamp(max=0.0)


def _largest(x: Tensor) -> Tensor:
    return x.amax().clamp(min=0.0)


def make_activation_rounding(spec: AttentionSpec) -> QuantisedActivations:
    """Return the module that rounds the inputs of projections as a spec requires."""
    return DynamicInt8PerBlock(spec.block_size) if spec.activations == PER_BLOCK else DynamicInt8()


def activation_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """Return notes for the report on the scales of activations, if they are quantised."""
    if spec.activations == "none":
        return ()
    if spec.activations == PER_BLOCK:
        return (
            "activations have a scale for each block of a token; in the dialect ort MatMulNBits "
            "computes it: it ignores NaN, and on ARM it needs the session option "
            "mlas.disable_kleidiai = 1",
        )
    return (
        "activations have one scale for all tokens of a run: one token with NaN or infinity "
        "makes all others wrong, and decoding in steps gives other numbers than one run; no case "
        "has either",
    )
