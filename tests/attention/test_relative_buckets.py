"""T5's relative bias: which bucket an offset is in, and which weight a bucket has."""

from __future__ import annotations

from itertools import product

import published
import pytest
import torch
from features import exact_module, feature_spec
from slow import draw_inputs, outputs_of

from attn_export.attention.positions import ScoreBias, relative_buckets

SIZES = ((4, 5), (4, 128), (5, 9), (6, 100), (8, 9), (8, 20), (16, 64), (32, 128), (32, 200),
         (32, 33), (33, 127), (64, 150), (128, 1000), (320, 800))  # fmt: skip
both_sides = pytest.mark.parametrize("both_sides", [False, True], ids=["one side", "both sides"])
sizes = pytest.mark.parametrize(("buckets", "max_distance"), SIZES)


@both_sides
@sizes
def test_buckets_are_those_of_t5(buckets: int, max_distance: int, both_sides: bool) -> None:
    table = relative_buckets(buckets, max_distance, both_sides=both_sides)
    assert table.shape == (2 * max_distance + 1,)
    assert table.dtype == torch.int64
    for offset in range(-200, 201):
        inside = min(max(offset, -max_distance), max_distance)
        wanted = published.t5_bucket(offset, buckets, max_distance, both_sides=both_sides)
        assert table[inside + max_distance] == wanted, offset


@both_sides
@sizes
def test_every_bucket_is_in_range_and_distances_keep_their_order(
    buckets: int, max_distance: int, both_sides: bool
) -> None:
    table = relative_buckets(buckets, max_distance, both_sides=both_sides)
    before, after = table[: max_distance + 1].flip(0), table[max_distance + 1 :]
    assert (before.diff() >= 0).all()
    assert (after.diff() >= 0).all()
    assert table.min() == 0
    assert table.max() <= buckets - 1
    one_side = buckets // 2 if both_sides else buckets
    assert before[-1] == one_side - 1
    assert torch.equal(after, before[1:] + one_side if both_sides else torch.zeros_like(after))


def test_buckets_by_hand() -> None:
    # One side of 8: 0 to 3 alone, then 4-5, 6-7, 8-11 and the rest, as 4 * 4^(n/4) grows.
    before = relative_buckets(8, 16, both_sides=False)[:17].flip(0)
    assert before.tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7]
    assert relative_buckets(8, 16, both_sides=True)[16:20].tolist() == [0, 5, 6, 6]


@pytest.mark.parametrize(("L", "S"), [(1, 3), (3, 3), (1, 30), (3, 30)])
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_bias_is_the_weight_of_the_bucket(causal: bool, L: int, S: int) -> None:
    feature = {"relative_buckets": 8, "relative_max_distance": 20}
    bias = ScoreBias(feature_spec(feature, causal=causal))
    weight = bias.relative_attention_bias.weight.detach()
    assert weight.shape == (8, 4)
    added = bias(None, torch.arange(S - L, S), S, torch.zeros(1))
    assert added.shape == (1, 4, L, S)
    for i, j in product(range(L), range(S)):
        bucket = published.t5_bucket(j - (S - L + i), 8, 20, both_sides=not causal)
        assert torch.equal(added[0, :, i, j], weight[bucket])


def test_bias_of_far_keys_is_that_of_the_last_bucket() -> None:
    feature = {"relative_buckets": 4, "relative_max_distance": 5}
    bias = ScoreBias(feature_spec(feature, causal=True))
    added = bias(None, torch.tensor([299]), 300, torch.zeros(1))[0, :, 0]
    wanted = bias.relative_attention_bias.weight[3].detach()[:, None].expand(4, 295)
    assert torch.equal(added[:, :295], wanted)


def test_bias_is_a_parameter_by_t5s_name_and_its_table_is_none() -> None:
    spec = feature_spec({"relative_buckets": 8, "relative_max_distance": 20})
    module = exact_module(spec)
    names = [name for name in module.state_dict() if name.startswith("score_bias")]
    assert names == ["score_bias.relative_attention_bias.weight"]
    inputs = draw_inputs(spec, 1, 2, 4)
    before = outputs_of(module, inputs)["output"]
    torch.nn.init.zeros_(module.score_bias.relative_attention_bias.weight)
    assert (outputs_of(module, inputs)["output"] - before).abs().max() > 1e-3
