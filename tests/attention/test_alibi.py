"""ALiBi: one slope for each head, times the distance."""

from __future__ import annotations

import published
import pytest
import torch
from features import exact_module, feature_spec
from slow import draw_inputs, make_module, outputs_of

from attn_export.attention.positions import ScoreBias, alibi_slopes


@pytest.mark.parametrize("heads", [*range(1, 13), 16, 20, 32, 40, 64, 71, 112])
def test_slopes_are_those_of_the_papers_code(heads: int) -> None:
    assert len(alibi_slopes(heads)) == heads
    assert alibi_slopes(heads) == pytest.approx(published.alibi_slopes(heads), rel=1e-13)


def test_slopes_by_hand() -> None:
    assert alibi_slopes(1) == [2**-8]
    assert alibi_slopes(2) == [2**-4, 2**-8]
    assert alibi_slopes(8) == [2**-n for n in range(1, 9)]
    assert alibi_slopes(3) == [2**-4, 2**-8, 2**-2]
    assert alibi_slopes(12)[8:] == [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]


def bias(L: int, S: int, heads: int = 4) -> torch.Tensor:
    module = ScoreBias(feature_spec({"alibi": True}, num_heads=heads))
    added = module(None, torch.arange(S - L, S), S, torch.zeros(1))
    assert added is not None
    return added


@pytest.mark.parametrize(("L", "S"), [(1, 1), (5, 5), (1, 6), (3, 8)])
def test_bias_is_slope_times_distance(L: int, S: int) -> None:
    actual = bias(L, S)
    assert actual.shape == (1, 4, L, S)
    for h, slope in enumerate(published.alibi_slopes(4)):
        for i in range(L):
            for j in range(S):
                assert actual[0, h, i, j] == -slope * abs(j - (S - L + i))


def test_bias_is_symmetric_and_0_at_the_query() -> None:
    square = bias(6, 6)
    assert torch.equal(square, square.transpose(-1, -2))
    assert (square.diagonal(dim1=-2, dim2=-1) == 0).all()


def test_each_head_has_a_slope_of_its_own() -> None:
    """Compare weights for queries of 0, which are those of the bias alone."""
    spec = feature_spec({"alibi": True}, attn_mask="none")
    module = exact_module(spec)
    torch.nn.init.zeros_(module.q_proj.weight)
    torch.nn.init.zeros_(module.q_proj.bias)
    weights = outputs_of(module, draw_inputs(spec, 1, 1, 5))["attn_weights"][0, :, 0]
    ratios = weights[:, 1:] / weights[:, :-1]
    slopes = torch.tensor(published.alibi_slopes(4), dtype=torch.float64)
    torch.testing.assert_close(ratios, slopes.exp()[:, None].expand(4, 5))


def test_slopes_are_no_part_of_a_checkpoint() -> None:
    module = make_module(feature_spec({"alibi": True}), torch.float32)
    assert not [name for name in module.state_dict() if "score_bias" in name]
