"""Tests of quantised weights: exact in float32, and rounded to nearest."""

from __future__ import annotations

import numpy as np
import pytest

from attn_export.quantiser import DIGITS, RANGES, quantise

FORMS = [(dtype, block) for dtype in ("int8", "int4") for block in (0, 16)]


def weights() -> np.ndarray:
    """Return `[64, 8]` of very different sizes: a column of zeros, positive, tiny and huge ones."""
    w = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    return w * np.float32([0, 1, 1e-30, 1e30, 3, 1e-38, 7, 1]) + np.float32([0] * 6 + [30, 0])


@pytest.mark.parametrize(("dtype", "block"), FORMS)
def test_products_with_scales_are_exact_in_float32(dtype: str, block: int):
    found = quantise(weights(), dtype, block)
    exact = found.integers.astype(float) * found.scales.astype(float).repeat(found.block, 0)
    assert (found.dequantised().astype(float) == exact).all()
    fraction, _ = np.frexp(found.scales)
    assert (fraction * 2**DIGITS % 1 == 0).all()


@pytest.mark.parametrize(("dtype", "block"), FORMS)
def test_every_weight_is_within_half_a_step(dtype: str, block: int):
    w = weights()
    found = quantise(w, dtype, block)
    low, high = RANGES[found.dtype]
    assert low <= found.integers.min() <= found.integers.max() <= high
    assert found.scales.shape == ((64 // block) if block else 1, 8)
    steps = found.scales.repeat(found.block, 0) * 0.501
    assert (np.abs(found.dequantised() - w) <= np.maximum(steps, 1e-29)).all()
    assert (found.dequantised()[:, 0] == 0).all()
    assert (found.scales > 0).all()
