"""Softcap: scores go through tanh before the mask (Gemma 2)."""

from __future__ import annotations

import math

import pytest
import torch
from features import KV_HEADS, exact_module, feature_spec
from slow import draw_inputs, outputs_of

from attn_export.attention import scaled_dot_product_attention

SCALE = 0.3


def draw(length: int, heads: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, length, 8, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
@pytest.mark.parametrize("softcap", [0.1, 1, 30.0, 1e6])
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
def test_core_is_the_formula(kv_heads: int, softcap: float, mask: str) -> None:
    L, S = 3, 5
    q, k, v = draw(L, 4, 0), draw(S, kv_heads, 1), draw(S, kv_heads, 2)
    allowed = torch.rand(2, 4, L, S, generator=torch.Generator().manual_seed(3)) > 0.3
    allowed[..., 0] = True
    added = {
        "none": torch.zeros(L, S, dtype=torch.float64),
        "bool": torch.zeros(2, 4, L, S, dtype=torch.float64).masked_fill(~allowed, -torch.inf),
        "float": draw(L, 4, 4)[..., :S],
        "causal": torch.full((L, S), -torch.inf, dtype=torch.float64).triu(S - L + 1),
    }[mask]
    heads = [x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v)]
    scores = torch.einsum("bhid,bhjd->bhij", q, heads[0]) * SCALE
    wanted = (softcap * torch.tanh(scores / softcap) + added).softmax(-1)
    attended, weights = scaled_dot_product_attention(
        q, k, v, {"none": None, "bool": allowed, "float": added, "causal": None}[mask],
        causal=mask == "causal", scale=SCALE, softcap=softcap, need_weights=True,
    )  # fmt: skip
    torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(attended, wanted @ heads[1], rtol=1e-12, atol=1e-13)


def test_capped_scores_are_no_further_apart_than_twice_the_cap() -> None:
    q, k, v = 100 * draw(6, 4, 0), 100 * draw(6, 4, 1), draw(6, 4, 2)
    for softcap in (0.5, 2.0):
        _, weights = scaled_dot_product_attention(
            q, k, v, scale=1.0, softcap=softcap, need_weights=True
        )
        ratio = weights.amax(-1) / weights.amin(-1)
        assert ratio.max() <= math.exp(2 * softcap) * (1 + 1e-12)
        assert ratio.max() > 0.99 * math.exp(2 * softcap)


@pytest.mark.parametrize("mask", ["bool[B,H,L,S]", "float[B,H,L,S]"])
def test_cap_does_not_uncover_hidden_keys(mask: str) -> None:
    """Capped after the mask, -inf would become -softcap and a hidden key would count."""
    spec = feature_spec({"softcap": 0.5}, attn_mask=mask)
    inputs = draw_inputs(spec, 2, 4, 3)
    given = inputs["attn_mask"]
    hidden = ~given if given.dtype == torch.bool else given == -torch.inf
    hidden = hidden | torch.ones(4, 7, dtype=torch.bool).triu(4)
    weights = outputs_of(exact_module(spec), inputs)["attn_weights"]
    assert (weights[hidden] == 0).all()
    assert (weights[~hidden] > 0).all()


def test_high_cap_is_no_cap() -> None:
    plain, capped = (exact_module(feature_spec(f)) for f in ({}, {"softcap": 1e6}))
    inputs = draw_inputs(plain.spec, 2, 4, 3)
    for name, wanted in outputs_of(plain, inputs).items():
        torch.testing.assert_close(outputs_of(capped, inputs)[name], wanted, rtol=1e-9, atol=1e-9)


def test_float_mask_is_added_after_the_cap() -> None:
    """Check that a mask of -50 nearly hides a key even though the cap is 1."""
    q, k, v = draw(1, 1, 0), draw(2, 1, 1), draw(2, 1, 2)
    mask = torch.tensor([[0.0, -50.0]], dtype=torch.float64)
    _, weights = scaled_dot_product_attention(
        q, k, v, mask, scale=SCALE, softcap=1.0, need_weights=True
    )
    assert (weights[..., 1] < 1e-20).all()
