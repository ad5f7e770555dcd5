"""Inputs of projections as 8 bits, by one scale that each run finds anew (`activations`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_export.attention import onnx_attention
from attn_export.spec import AttentionSpec

STEPS = 255
"""The number of steps between the least and the largest integer, as `DynamicQuantizeLinear` has."""


class DynamicInt8(nn.Module):
    """The values that `DynamicQuantizeLinear` of ONNX keeps of a tensor, in floating point.

    The definition: https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` rounded to a multiple of its scale.

        While exporting `x` is returned as it is: the graph gets its integers afterwards
        (`graph/quantised_weights.py`).

        Args:
            x: The input of a projection, `[B, L, N]`.
        """
        return x if onnx_attention.emitting() else self.integers(x) * self.scale(x)

    @staticmethod
    def scale(x: Tensor) -> Tensor:
        """Return the scale of all elements, of which 255 reach from the least to the largest.

        0 lies between the two in any case. Of zeros alone the scale is 1.
        """
        step = (_largest(x) - _least(x)) / STEPS
        return torch.where(step > 0, step, 1.0)

    @classmethod
    def integers(cls, x: Tensor) -> Tensor:
        """Return the integers less their zero point: whole numbers, in the type of `x`.

        Quotients are rounded half to even, and clipped to the 256 integers.
        """
        scale = cls.scale(x)
        zero = (-_least(x) / scale).round()
        return (x / scale).round().clamp(-zero, STEPS - zero)


def _least(x: Tensor) -> Tensor:
    return x.amin().clamp(max=0.0)


def _largest(x: Tensor) -> Tensor:
    return x.amax().clamp(min=0.0)


def rounding_of(spec: AttentionSpec) -> nn.Module:
    """Return what happens to the inputs of projections: nothing, or `DynamicInt8`."""
    return nn.Identity() if spec.activations == "none" else DynamicInt8()


def activation_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """Return a note for the reader on the scale of activations, if they are quantised."""
    if spec.activations == "none":
        return ()
    return (
        "activations have one scale for all tokens of a run: a token that is not finite spoils all "
        "others, and a decode in steps gives other numbers than one run: no case is either",
    )
