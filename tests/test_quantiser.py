"""Tests of quantised weights: exact in float32, and rounded to nearest."""

from __future__ import annotations

import numpy as np
import pytest

from attn_export.quantiser import DIGITS, NEAREST, RANGES, SEARCH, quantise

FORMS = [(dtype, block) for dtype in ("int8", "int4") for block in (0, 16)]


def weights() -> np.ndarray:
    """Return `[64, 8]` of very different sizes: a column of zeros, positive, tiny and huge ones."""
    w = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    return w * np.float32([0, 1, 1e-30, 1e30, 3, 1e-38, 7, 1]) + np.float32([0] * 6 + [30, 0])


@pytest.mark.parametrize("rounding", [NEAREST, SEARCH])
@pytest.mark.parametrize(("dtype", "block"), FORMS)
def test_products_with_scales_are_exact_in_float32(dtype: str, block: int, rounding: str):
    found = quantise(weights(), dtype, block, rounding)
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


def test_scales_that_are_searched_lose_less_in_every_block():
    w = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    w[:32, 0] = 0
    nearest, searched = (quantise(w, "int4", 32, how) for how in (NEAREST, SEARCH))
    lost, less = (
        np.square(w - found.dequantised()).reshape(8, 32, 64).sum(axis=1)
        for found in (nearest, searched)
    )
    assert (less <= lost).all()
    assert 10 * np.log10(lost.sum() / less.sum()) > 1.4
    assert (searched.integers.min(), searched.integers.max()) == (-8, 7)
    assert searched.stored_bytes == nearest.stored_bytes == 256 * 64 // 2 + 8 * 64 * 4
    assert quantise(w, "int4", 0, SEARCH).integers.min() == -7  # one scale for all inputs


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_large_weight_has_in_each_output_what_the_output_has_alone(dtype: str):
    w = np.random.default_rng(0).standard_normal((4096, 300)).astype(np.float32)  # two pieces
    found = quantise(w, dtype, 32).by_output()
    for output in (0, 255, 256, 299):
        alone = quantise(w[:, [output]], dtype, 32).by_output()
        assert np.array_equal(found[[output]], alone)
