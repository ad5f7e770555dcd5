"""Windows: how many keys before and after its own a query sees."""

from __future__ import annotations

from itertools import product

import published
import pytest
import torch
from conftest import small_spec
from features import exact_module, feature_spec
from slow import draw_inputs, outputs_of

from attn_export.attention.positions import key_offsets, window_mask

SIDES = (None, 0, 1, 2, 50)
sides = pytest.mark.parametrize(("left", "right"), list(product(SIDES, SIDES)))


@pytest.mark.parametrize(("L", "S"), [(1, 1), (4, 4), (1, 7), (3, 7), (7, 7)])
def test_offsets_count_from_the_query_at_the_end(L: int, S: int) -> None:
    wanted = [[j - (S - L + i) for j in range(S)] for i in range(L)]
    assert key_offsets(torch.arange(S - L, S), S).tolist() == wanted


@pytest.mark.parametrize(("L", "S"), [(1, 1), (4, 4), (1, 7), (3, 7)])
@sides
def test_window_shows_what_a_loop_shows(left: int | None, right: int | None, L: int, S: int):
    shown = window_mask(key_offsets(torch.arange(S - L, S), S), left, right)
    if left is None and right is None:
        assert shown is None
        return
    wanted = [
        [published.window_shows(j - (S - L + i), left, right) for j in range(S)] for i in range(L)
    ]
    assert shown.tolist() == wanted


@pytest.mark.parametrize("mask", ["none", "bool[B,1,1,S]", "float[1,S]", "float[B,H,L,S]"])
@sides
def test_keys_outside_the_window_have_no_weight(
    left: int | None, right: int | None, mask: str
) -> None:
    spec = feature_spec({"window_left": left, "window_right": right}, causal=False, attn_mask=mask)
    L, P = 4, 3
    inputs = draw_inputs(spec, 2, L, P)
    given = inputs.get("attn_mask")
    if given is None:
        allowed = torch.ones(2, 4, L, P + L, dtype=torch.bool)
    else:
        allowed = (given if given.dtype == torch.bool else given != -torch.inf).expand(2, 4, L, -1)
    weights = outputs_of(exact_module(spec), inputs)["attn_weights"]
    for i, j in product(range(L), range(P + L)):
        shown = published.window_shows(j - (P + i), left, right)
        assert torch.equal(weights[:, :, i, j] > 0, allowed[:, :, i, j] & shown), (i, j)
    # A row of hidden keys is all 0 and no NaN.
    sums = weights.sum(-1)
    assert ((sums == 0) | ((sums - 1).abs() < 1e-12)).all()


def test_window_of_mistral_is_one_less_than_sliding_window() -> None:
    """Compare with Mistral's code, which hides key j from query i where i - j >= sliding_window."""
    sliding_window = 3
    weights = outputs_of(
        exact_module(small_spec(window_left=2, attn_weights=True, attn_mask="none")),
        draw_inputs(small_spec(attn_mask="none"), 1, 6),
    )["attn_weights"]
    for i, j in product(range(6), range(6)):
        assert (weights[:, :, i, j] > 0).all() == (0 <= i - j < sliding_window)


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_wide_window_changes_nothing(causal: bool, attn_weights: bool) -> None:
    plain = small_spec(causal=causal, attn_weights=attn_weights)
    wide = small_spec(causal=causal, attn_weights=attn_weights, window_left=100)
    inputs = draw_inputs(plain, 2, 4, 3)
    for name, wanted in outputs_of(exact_module(plain), inputs).items():
        actual = outputs_of(exact_module(wide), inputs)[name]
        torch.testing.assert_close(actual, wanted, rtol=1e-13, atol=1e-13)


def test_window_ending_at_the_query_is_causal_attention() -> None:
    causal = small_spec(attn_weights=True)
    window_spec = small_spec(attn_weights=True, causal=False, window_right=0)
    inputs = draw_inputs(causal, 2, 4, 3)
    wanted = outputs_of(exact_module(causal), inputs)
    for name, actual in outputs_of(exact_module(window_spec), inputs).items():
        assert torch.equal(actual, wanted[name])
