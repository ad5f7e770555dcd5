"""Tests of quantised weights: exact in float32, rounded to nearest, and invalid ones refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_export import AttentionSpec
from attn_export.attention import seeded_attention
from attn_export.attention.quantised import quantise_module, unquantise
from attn_export.errors import WeightsError
from attn_export.quantiser import DIGITS, RANGES, quantise

SCHEMES = [
    (dtype, block, symmetric)
    for dtype in ("int8", "int4")
    for block in (0, 16)
    for symmetric in (True, False)
]


def weights() -> np.ndarray:
    """Return `[64, 8]` of very different sizes: a column of zeros, positive, tiny and huge ones."""
    w = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    return w * np.float32([0, 1, 1e-30, 1e30, 3, 1e-38, 7, 1]) + np.float32([0] * 6 + [30, 0])


@pytest.mark.parametrize(("dtype", "block", "symmetric"), SCHEMES)
def test_products_with_scales_are_exact_in_float32(dtype: str, block: int, symmetric: bool):
    found = quantise(weights(), dtype, block, symmetric=symmetric)
    zeros = (
        0 if found.zero_points is None else found.zero_points.astype(float).repeat(found.block, 0)
    )
    exact = (found.integers.astype(float) - zeros) * found.scales.astype(float).repeat(
        found.block, 0
    )
    assert (found.dequantised().astype(float) == exact).all()
    fraction, _ = np.frexp(found.scales)
    assert (fraction * 2**DIGITS % 1 == 0).all()


@pytest.mark.parametrize(("dtype", "block", "symmetric"), SCHEMES)
def test_every_weight_is_within_half_a_step(dtype: str, block: int, symmetric: bool):
    w = weights()
    found = quantise(w, dtype, block, symmetric=symmetric)
    low, high = RANGES[found.dtype]
    assert low <= found.integers.min() <= found.integers.max() <= high
    assert found.scales.shape == ((64 // block) if block else 1, 8)
    assert (found.zero_points is None) == symmetric
    # a zero point is rounded too, so that the ends of a range may be half a step farther away
    steps = found.scales.repeat(found.block, 0) * (0.501 if symmetric else 1.001)
    assert (np.abs(found.dequantised() - w) <= np.maximum(steps, 1e-29)).all()
    assert (found.dequantised()[:, 0] == 0).all()
    assert (found.scales > 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad: float):
    module = seeded_attention(AttentionSpec(embed_dim=16, num_heads=2, weights_dtype="v=int8"))
    with torch.no_grad():
        module.v_proj.weight[3, 4] = bad
    with pytest.raises(WeightsError, match=r"v_proj\.weight cannot be quantised: .*NaN or inf"):
        quantise_module(module)


def test_only_the_named_projections_are_quantised():
    spec = AttentionSpec(embed_dim=32, num_heads=2, weights_dtype="q,v=int4 o=int8")
    module, before = seeded_attention(spec), seeded_attention(spec)
    quantise_module(module)
    found = module.integers
    assert {name: weight.dtype for name, weight in found.items()} == {
        "q_proj.weight": "int4", "v_proj.weight": "int4", "out_proj.weight": "int8",
    }  # fmt: skip
    for name, weight in module.named_parameters():
        changed = not torch.equal(weight, before.get_parameter(name))
        assert changed == (name in found), name
    for name, weight in unquantise(module).named_parameters():
        assert torch.equal(weight, before.get_parameter(name)), name
