"""Rotary positions: pairs, wavelengths and their scaling, and what they leave alone."""

from __future__ import annotations

import math

import numpy as np
import published
import pytest
import torch
from features import exact_module, feature_spec
from slow import draw_inputs, make_module, outputs_of

from attn_export.attention.positions import Rotary, inverse_frequencies
from attn_export.spec import AttentionSpec

PAIRINGS = ("half", "interleaved")
both_pairings = pytest.mark.parametrize("rotary", PAIRINGS)


def rotary_spec(**changes: object) -> AttentionSpec:
    return feature_spec({"rotary": "half"} | changes)


def turn(x: torch.Tensor, spec: AttentionSpec, start: int) -> torch.Tensor:
    rotary = Rotary(spec).double()
    rotary.inv_freq = inverse_frequencies(spec)
    return rotary(x, rotary.turns(torch.arange(start, start + x.shape[2])))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("start", [0, 1, 1000])
@pytest.mark.parametrize("width", [2, 4, 6, 8])
@both_pairings
def test_rotation_is_a_complex_multiplication(
    rotary: str, width: int, start: int, scaling: str
) -> None:
    spec = rotary_spec(
        rotary=rotary, rotary_dim=width, rotary_scaling=scaling, rotary_factor=4.0,
        rotary_original_len=128,
    )  # fmt: skip
    x = draw(2, 3, 5, 8)
    actual = turn(x, spec, start)
    wanted = torch.from_numpy(published.rotated(x.numpy(), spec, start))
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(actual[..., width:], x[..., width:])


def test_rotation_of_one_pair_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0, 2.0]], dtype=torch.float64).view(1, 1, 1, 4)
    cos, sin = math.cos(3), math.sin(3)
    slow_cos, slow_sin = math.cos(0.03), math.sin(0.03)
    by_hand = {
        # (x0, x2) and (x1, x3); (x0, x1) and (x2, x3)
        "half": [cos, -2 * slow_sin, sin, 2 * slow_cos],
        "interleaved": [cos, sin, -2 * slow_sin, 2 * slow_cos],
    }
    for rotary, wanted in by_hand.items():
        actual = turn(x, rotary_spec(rotary=rotary, head_dim=4), 3).flatten()
        torch.testing.assert_close(actual, torch.tensor(wanted, dtype=torch.float64))


@both_pairings
def test_position_0_is_left_alone_and_lengths_are_kept(rotary: str) -> None:
    x, spec = draw(2, 3, 5, 8), rotary_spec(rotary=rotary)
    assert torch.equal(turn(x, spec, 0)[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(turn(x, spec, 7).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3", "yarn"])
@both_pairings
def test_scores_depend_on_differences_of_positions_alone(rotary: str, scaling: str) -> None:
    spec = rotary_spec(rotary=rotary, rotary_dim=6, rotary_scaling=scaling, rotary_factor=4.0)
    q, k = draw(2, 3, 5, 8), draw(2, 3, 5, 8).flip(2)

    def scores(shift: int) -> torch.Tensor:
        return turn(q, spec, shift) @ turn(k, spec, shift).transpose(-1, -2)

    for shift in (1, 17, 4096):
        torch.testing.assert_close(scores(shift), scores(0), rtol=1e-10, atol=1e-10)
    apart = turn(q, spec, 1) @ turn(k, spec, 0).transpose(-1, -2)
    assert (apart - scores(0)).abs().max() > 1e-2


# -- wavelengths -----------------------------------------------------------------------------

MODELS = {
    "Llama 2": {"rotary_dim": 128},
    "Llama 3": {"rotary_dim": 128, "rotary_theta": 5e5},
    "Gemma 3, linear": {
        "rotary_dim": 256, "rotary_theta": 1e6, "rotary_scaling": "linear", "rotary_factor": 8.0,
    },
    "Llama 3.1": {
        "rotary_dim": 128, "rotary_theta": 5e5, "rotary_scaling": "llama3", "rotary_factor": 8.0,
        "rotary_original_len": 8192,
    },
    "Llama 3.2": {
        "rotary_dim": 64, "rotary_theta": 5e5, "rotary_scaling": "llama3", "rotary_factor": 32.0,
        "rotary_original_len": 8192,
    },
    "Qwen 2.5, yarn": {
        "rotary_dim": 128, "rotary_theta": 1e6, "rotary_scaling": "yarn", "rotary_factor": 4.0,
        "rotary_original_len": 32768,
    },
    "Llama 2, yarn": {
        "rotary_dim": 128, "rotary_scaling": "yarn", "rotary_factor": 16.0,
        "rotary_original_len": 4096,
    },
    "gpt-oss, yarn": {
        "rotary_dim": 64, "rotary_theta": 150000.0, "rotary_scaling": "yarn",
        "rotary_factor": 32.0, "rotary_original_len": 4096, "rotary_truncate": False,
    },
    "small, yarn": {
        "rotary_dim": 8, "rotary_scaling": "yarn", "rotary_factor": 2.0,
        "rotary_original_len": 256,
    },
    "longer than every wavelength, yarn": {
        "rotary_dim": 64, "rotary_scaling": "yarn", "rotary_factor": 2.0,
        "rotary_original_len": 131072,
    },
    "factor 1, yarn": {
        "rotary_dim": 64, "rotary_scaling": "yarn", "rotary_factor": 1.0,
        "rotary_original_len": 4096,
    },
    "factor 1, llama3": {"rotary_dim": 64, "rotary_scaling": "llama3"},
}  # fmt: skip


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_frequencies_are_those_of_the_published_code(changes: dict) -> None:
    spec = rotary_spec(head_dim=256, **changes)
    actual = inverse_frequencies(spec)
    assert actual.dtype == torch.float64
    np.testing.assert_allclose(actual.numpy(), published.frequencies(spec), rtol=1e-13)
    assert spec.turn_magnitude == published.magnitude(spec)
    assert (actual.diff() < 0).all()


LONGROPE = {
    "rotary_scaling": "longrope", "rotary_factor": 32.0, "rotary_original_len": 6,
    "rotary_short_factors": [1.0, 1.25, 1.5, 2.0], "rotary_long_factors": [1, 3, 9, 27],
}  # fmt: skip


@pytest.mark.parametrize("length", [1, 6, 7, 40])
def test_longrope_divides_by_the_factors_of_the_length_at_hand(length: int) -> None:
    spec = rotary_spec(**LONGROPE)
    x = draw(2, 3, length, 8)
    rotary = Rotary(spec).double()
    rotary.long_inv_freq = inverse_frequencies(spec, long=True)
    rotary.inv_freq = inverse_frequencies(spec)
    actual = rotary(x, rotary.turns(torch.arange(length)))
    wanted = torch.from_numpy(published.rotated(x.numpy(), spec, 0))
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    assert spec.turn_magnitude == pytest.approx(math.sqrt(1 + math.log(32) / math.log(6)))


@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_scaling_keeps_the_short_wavelengths_and_stretches_the_long_ones(scaling: str) -> None:
    options = {"head_dim": 128, "rotary_theta": 5e5}
    plain = inverse_frequencies(rotary_spec(**options))
    scaled = inverse_frequencies(rotary_spec(**options, rotary_scaling=scaling, rotary_factor=8.0))
    ratio = plain / scaled
    assert ratio[0] == 1
    torch.testing.assert_close(ratio[-1], torch.tensor(8.0, dtype=torch.float64))
    assert ((ratio > 1.001) & (ratio < 7.999)).any()
    assert (ratio.diff() > -1e-9).all()


def test_factor_of_yarn_multiplies_what_is_rotated_alone() -> None:
    spec = rotary_spec(rotary_dim=4, rotary_scaling="yarn", rotary_factor=32.0)
    x = draw(1, 2, 3, 8)
    turned = turn(x, spec, 5)
    factor = 0.1 * math.log(32) + 1
    wanted = x[..., :4].norm(dim=-1) * factor
    torch.testing.assert_close(turned[..., :4].norm(dim=-1), wanted)
    assert torch.equal(turned[..., 4:], x[..., 4:])


# -- in the module ---------------------------------------------------------------------------


@both_pairings
def test_positions_go_on_from_the_past(rotary: str) -> None:
    spec = rotary_spec(rotary=rotary, rotary_dim=6, bias=False)
    module = exact_module(spec)
    for P in (0, 1, 6):
        inputs = draw_inputs(spec, 2, 3, P)
        key = outputs_of(module, inputs)["present_key"]
        assert torch.equal(key[:, :, :P], inputs["past_key"])
        projected = module.k_proj(inputs["query"]).detach().unflatten(-1, (2, 8)).transpose(1, 2)
        wanted = torch.from_numpy(published.rotated(projected.numpy(), spec, P))
        torch.testing.assert_close(key[:, :, P:], wanted, rtol=1e-12, atol=1e-12)


def test_values_are_not_rotated() -> None:
    spec = rotary_spec()
    module = exact_module(spec)
    inputs = draw_inputs(spec, 2, 3, 4)
    wanted = module.v_proj(inputs["query"]).detach().unflatten(-1, (2, 8)).transpose(1, 2)
    assert torch.equal(outputs_of(module, inputs)["present_value"][:, :, 4:], wanted)


def test_frequencies_are_no_part_of_a_checkpoint() -> None:
    spec = rotary_spec(rotary_scaling="llama3", rotary_factor=8.0)
    module = make_module(spec, torch.float32)
    assert not [name for name in module.state_dict() if "freq" in name]
    assert torch.equal(module.rotary.inv_freq, inverse_frequencies(spec).float())
    assert make_module(feature_spec({})).rotary is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frequencies_stay_precise_in_a_module_of_few_bits(dtype: torch.dtype) -> None:
    spec = rotary_spec(rotary_scaling="llama3", rotary_factor=8.0)
    module = make_module(spec, dtype)
    assert module.q_proj.weight.dtype == dtype
    assert torch.equal(module.rotary.inv_freq, inverse_frequencies(spec).float())
