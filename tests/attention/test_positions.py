"""Positions: rotation and its wavelengths, ALiBi's slopes, T5's buckets, windows."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import numpy_positions
import pytest
import torch
from layers import draw_inputs, exact_module, feature_spec, make_module, outputs_of
from transformers.models.t5.modeling_t5 import T5Attention

from attn_export.attention.positions import (
    Rotary,
    alibi_slopes,
    inverse_frequencies,
    relative_buckets,
)
from attn_export.spec import AttentionSpec


def rotary_spec(**changes: object) -> AttentionSpec:
    return feature_spec({"rotary": "half"} | changes)


@pytest.mark.parametrize("heads", [*range(1, 13), 16, 20, 32, 40, 64, 71, 112])
def test_slopes_of_alibi_are_those_of_the_reference(heads: int) -> None:
    wanted = numpy_positions.slopes(heads).ravel().tolist()
    assert alibi_slopes(heads) == pytest.approx(wanted, rel=1e-13)


def test_slopes_of_alibi_by_hand() -> None:
    assert alibi_slopes(1) == [2**-8]
    assert alibi_slopes(8) == [2**-n for n in range(1, 9)]
    assert alibi_slopes(3) == [2**-4, 2**-8, 2**-2]
    assert alibi_slopes(12)[8:] == [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]


@pytest.mark.parametrize("both_sides", [False, True], ids=["one side", "both sides"])
@pytest.mark.parametrize(
    ("buckets", "max_distance"),
    [(4, 5), (4, 128), (5, 9), (6, 100), (8, 9), (8, 20), (16, 64), (32, 128), (32, 200),
     (32, 33), (33, 127), (64, 150), (128, 1000), (320, 800)],
)  # fmt: skip
def test_buckets_are_those_of_t5(buckets: int, max_distance: int, both_sides: bool) -> None:
    table = relative_buckets(buckets, max_distance, both_sides=both_sides)
    assert table.dtype == torch.int64
    offsets = torch.arange(-max_distance, max_distance + 1)
    wanted = T5Attention._relative_position_bucket(offsets, both_sides, buckets, max_distance)
    assert torch.equal(table, wanted)


def test_rotation_of_one_pair_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0, 2.0]], dtype=torch.float64).view(1, 1, 1, 4)
    cos, sin = math.cos(3), math.sin(3)
    slow_cos, slow_sin = math.cos(0.03), math.sin(0.03)
    by_hand = {
        # (x0, x2) and (x1, x3); (x0, x1) and (x2, x3)
        "half": [cos, -2 * slow_sin, sin, 2 * slow_cos],
        "interleaved": [cos, sin, -2 * slow_sin, 2 * slow_cos],
    }
    for layout, wanted in by_hand.items():
        spec = rotary_spec(rotary=layout, head_dim=4)
        rotary = Rotary(spec).double()
        rotary.inv_freq = inverse_frequencies(spec)
        actual = rotary(x, rotary.turns(torch.tensor([3]))).flatten()
        torch.testing.assert_close(actual, torch.tensor(wanted, dtype=torch.float64))


_YARN = {"rotary_scaling": "yarn"}
_LLAMA3 = {"rotary_scaling": "llama3"}
MODELS = {
    "Llama 2": {"rotary_dim": 128},
    "Llama 3": {"rotary_dim": 128, "rotary_theta": 5e5},
    "Gemma 3, linear": {
        "rotary_dim": 256, "rotary_theta": 1e6, "rotary_scaling": "linear", "rotary_factor": 8.0,
    },
    "Llama 3.1": {
        "rotary_dim": 128, "rotary_theta": 5e5, **_LLAMA3, "rotary_factor": 8.0,
        "rotary_original_len": 8192,
    },
    "Llama 3.2": {
        "rotary_dim": 64, "rotary_theta": 5e5, **_LLAMA3, "rotary_factor": 32.0,
        "rotary_original_len": 8192,
    },
    "Qwen 2.5, yarn": {
        "rotary_dim": 128, "rotary_theta": 1e6, **_YARN, "rotary_factor": 4.0,
        "rotary_original_len": 32768,
    },
    "Llama 2, yarn": {
        "rotary_dim": 128, **_YARN, "rotary_factor": 16.0, "rotary_original_len": 4096,
    },
    "gpt-oss, yarn": {
        "rotary_dim": 64, "rotary_theta": 150000.0, **_YARN, "rotary_factor": 32.0,
        "rotary_original_len": 4096, "rotary_truncate": False,
    },
    "small, yarn": {
        "rotary_dim": 8, **_YARN, "rotary_factor": 2.0, "rotary_original_len": 256,
    },
    "longer than every wavelength, yarn": {
        "rotary_dim": 64, **_YARN, "rotary_factor": 2.0, "rotary_original_len": 131072,
    },
    "factor 1, yarn": {
        "rotary_dim": 64, **_YARN, "rotary_factor": 1.0, "rotary_original_len": 4096,
    },
    "factor 1, llama3": {"rotary_dim": 64, **_LLAMA3},
}  # fmt: skip


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_frequencies_of_models_are_those_of_the_reference(changes: dict) -> None:
    spec = rotary_spec(head_dim=256, **changes)
    actual = inverse_frequencies(spec)
    assert actual.dtype == torch.float64
    np.testing.assert_allclose(actual.numpy(), numpy_positions.frequencies(spec, 1), rtol=1e-13)
    assert spec.turn_magnitude == pytest.approx(numpy_positions.magnitude(spec), rel=1e-15)
    assert (actual.diff() < 0).all()


@pytest.mark.parametrize("length", [1, 6, 7, 40])
def test_longrope_divides_by_the_factors_of_the_length_at_hand(length: int) -> None:
    spec = rotary_spec(
        rotary_scaling="longrope", rotary_factor=32.0, rotary_original_len=6,
        rotary_short_factors=[1.0, 1.25, 1.5, 2.0], rotary_long_factors=[1, 3, 9, 27],
    )  # fmt: skip
    x = torch.randn(2, 3, length, 8, dtype=torch.float64)
    rotary = Rotary(spec).double()
    rotary.long_inv_freq = inverse_frequencies(spec, long=True)
    rotary.inv_freq = inverse_frequencies(spec)
    actual = rotary(x, rotary.turns(torch.arange(length))).numpy()
    frequencies = numpy_positions.frequencies(spec, length)
    magnitude = numpy_positions.magnitude(spec)
    places = np.arange(length)
    wanted = numpy_positions.rotated(x.numpy(), frequencies, places, "half", magnitude)
    np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_frequencies_stay_precise_in_a_module_of_few_bits(dtype: torch.dtype) -> None:
    spec = rotary_spec(rotary_scaling="llama3", rotary_factor=8.0)
    module = make_module(spec, dtype)
    assert module.q_proj.weight.dtype == dtype
    assert torch.equal(module.rotary.inv_freq, inverse_frequencies(spec).float())


SIDES = (None, 0, 1, 2, 50)


@pytest.mark.parametrize("mask", ["none", "bool[B,1,1,S]", "float[1,S]", "float[B,H,L,S]"])
@pytest.mark.parametrize(("left", "right"), list(product(SIDES, SIDES)))
def test_keys_outside_a_window_have_no_weight_and_all_others_have_one(
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
        offset = j - (P + i)
        shown = (left is None or -offset <= left) and (right is None or offset <= right)
        assert torch.equal(weights[:, :, i, j] > 0, allowed[:, :, i, j] & shown), (i, j)
    # A row of hidden keys is all 0 and no NaN.
    sums = weights.sum(-1)
    assert ((sums == 0) | ((sums - 1).abs() < 1e-12)).all()
