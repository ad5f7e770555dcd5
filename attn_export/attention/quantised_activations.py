"""Inputs of projections as 8 bits, by scales that each run finds anew (`activations`)."""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn

from attn_export.attention import onnx_attention
from attn_export.quantiser import BLOCK_LARGEST, LEAST_BLOCK_SCALE
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import PER_BLOCK

STEPS = 255
"""The number of steps between the least and the largest integer, as `DynamicQuantizeLinear` has."""


class QuantisedActivations(nn.Module, abc.ABC):
    """The values that integers keep of a tensor, in floating point."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` rounded to multiples of its scales.

        While exporting `x` is returned as it is: the graph gets its rounding afterwards
        (`graph/quantised_weights.py`).

        Args:
            x: The input of a projection, `[B, L, N]`.
        """
        return x if onnx_attention.emitting() else self.integers(x) * self.scales(x)

    @abc.abstractmethod
    def scales(self, x: Tensor) -> Tensor:
        """Return the scale of each element: of the shape of `x`, or a scalar for all."""

    @abc.abstractmethod
    def integers(self, x: Tensor) -> Tensor:
        """Return the integers less their zero point: whole numbers, in the type of `x`.

        Quotients are rounded half to even.
        """


class DynamicInt8(QuantisedActivations):
    """The values that `DynamicQuantizeLinear` of ONNX keeps of a tensor: one scale for all.

    The definition: https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html.
    """

    def scales(self, x: Tensor) -> Tensor:
        """Return the scale of all elements, of which 255 reach from the least to the largest.

        0 lies between the two in any case. Of zeros alone the scale is 1.
        """
        step = (_largest(x) - _least(x)) / STEPS
        return torch.where(step > 0, step, 1.0)

    def integers(self, x: Tensor) -> Tensor:
        """Return the integers less their zero point, clipped to the 256 that there are."""
        scale = self.scales(x)
        zero = (-_least(x) / scale).round()
        return (x / scale).round().clamp(-zero, STEPS - zero)


class DynamicInt8PerBlock(QuantisedActivations):
    """The values that MatMulNBits of ONNX Runtime keeps of its input at `accuracy_level` 4.

    Each block of consecutive inputs of a token has a scale, its largest magnitude over 127, and no
    zero point. ONNX does not define it: it was measured on ONNX Runtime 1.31.1 for the CPU.

    Args:
        block: The number of inputs in a block, which divides the last axis of each `x`.
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def scales(self, x: Tensor) -> Tensor:
        """Return the scale of the block of each element, of the shape of `x`."""
        blocks = x.unflatten(-1, (-1, self.block))
        largest = blocks.abs().amax(-1, keepdim=True)
        scales: Tensor = (largest / BLOCK_LARGEST).clamp(min=LEAST_BLOCK_SCALE)
        return scales.expand_as(blocks).flatten(-2)

    def integers(self, x: Tensor) -> Tensor:
        """Return whole numbers from -127 to 127."""
        return (x / self.scales(x)).round()


def _least(x: Tensor) -> Tensor:
    return x.amin().clamp(max=0.0)


def _largest(x: Tensor) -> Tensor:
    return x.amax().clamp(min=0.0)


def rounding_of(spec: AttentionSpec) -> QuantisedActivations:
    """Return the module that rounds the inputs of projections, which a spec asks for."""
    return DynamicInt8PerBlock(spec.block_size) if spec.activations == PER_BLOCK else DynamicInt8()


def activation_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """Return notes for the reader on the scales of activations, if they are quantised."""
    if spec.activations == "none":
        return ()
    if spec.activations == PER_BLOCK:
        return (
            "activations have a scale for each block of a token; in the dialect ort MatMulNBits "
            "finds it: it leaves out an element that is NaN, and on ARM needs the session "
            "configuration mlas.disable_kleidiai = 1",
        )
    return (
        "activations have one scale for all tokens of a run: a token that is not finite spoils all "
        "others, and a decode in steps gives other numbers than one run: no case is either",
    )
