"""Keys that a query may not attend to, rows of nothing else, and very negative masks."""

from __future__ import annotations

import pytest
import torch
from conftest import small_spec
from layers import Inputs, cast, draw_inputs, make_module, outputs_of, reference
from torch import Tensor

from attn_export.attention import Attention
from attn_export.spec import AttentionSpec

LOWEST = torch.finfo(torch.float32).min
PADDING = {"bool": "bool[B,1,1,S]", "float": "float[B,1,1,S]"}

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
both_kinds = pytest.mark.parametrize("kind", PADDING)
both_paths = pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
both_pasts = pytest.mark.parametrize("P", [0, 3], ids=["no past", "past"])


def as_mask(allowed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return allowed keys as a bool mask or as 0 and -inf."""
    if kind == "bool":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf)


def left_padded(spec: AttentionSpec, kind: str, dtype: torch.dtype, P: int) -> Inputs:
    """Return two sequences of P + 4 keys: the first with P + 2 of padding on the left."""
    inputs = cast(draw_inputs(spec, 2, 4, P), dtype)
    allowed = torch.ones(2, 1, 1, P + 4, dtype=torch.bool)
    allowed[0, ..., : P + 2] = False
    return inputs | {"attn_mask": as_mask(allowed, kind, dtype)}


@both_pasts
@both_paths
@both_kinds
@both_dtypes
def test_row_of_forbidden_keys_gives_the_bias_and_no_weights(
    dtype: torch.dtype, kind: str, attn_weights: bool, P: int
) -> None:
    spec = small_spec(attn_mask=PADDING[kind], attn_weights=attn_weights)
    module = make_module(spec, dtype)
    inputs = left_padded(spec, kind, dtype, P)
    outputs = outputs_of(module, inputs)
    # Causal: queries 0 and 1 of the first sequence see nothing but padding.
    assert torch.equal(outputs["output"][0, :2], module.out_proj.bias.expand(2, -1))
    assert not torch.equal(outputs["output"][0, 2], module.out_proj.bias)
    assert torch.isfinite(outputs["output"]).all()
    if attn_weights:
        assert (outputs["attn_weights"][0, :, :2] == 0).all()
        weights = outputs["attn_weights"].sum(-1)
        torch.testing.assert_close(weights[1], torch.ones_like(weights[1]))


@both_paths
@both_kinds
@pytest.mark.parametrize(
    "feature", [{}, {"cross": True}, {"sinks": True}, {"softcap": 0.5}], ids=str
)
def test_sequence_of_forbidden_keys_gives_0_without_a_bias(
    feature: dict, kind: str, attn_weights: bool
) -> None:
    spec = small_spec(
        attn_mask=PADDING[kind], attn_weights=attn_weights,
        causal=False, cache="none", bias=False, **feature,
    )  # fmt: skip
    inputs = draw_inputs(spec, 2, 4)
    allowed = torch.ones(inputs["attn_mask"].shape, dtype=torch.bool)
    allowed[1] = False
    inputs["attn_mask"] = as_mask(allowed, kind, torch.float64)
    outputs = outputs_of(make_module(spec), inputs)
    assert (outputs["output"][1] == 0).all()
    assert (outputs["output"][0] != 0).all()
    if attn_weights:
        assert (outputs["attn_weights"][1] == 0).all()


@both_paths
@both_kinds
@both_dtypes
def test_forbidden_keys_do_not_reach_the_output(
    dtype: torch.dtype, kind: str, attn_weights: bool
) -> None:
    spec = small_spec(attn_mask=PADDING[kind], attn_weights=attn_weights)
    module = make_module(spec, dtype)
    inputs = left_padded(spec, kind, dtype, P=3)
    changed = inputs | {name: inputs[name].clone() for name in ("past_key", "past_value")}
    changed["past_key"][0] += 100
    changed["past_value"][0] -= 1e6
    before, after = outputs_of(module, inputs), outputs_of(module, changed)
    assert torch.equal(before["output"], after["output"])
    changed["past_value"][1] += 1
    assert not torch.equal(before["output"], outputs_of(module, changed)["output"])


# -- very negative values: not -inf, so not forbidden ----------------------------------------


def with_mask(module: Attention, rows: list[list[float]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the outputs for L = 2 and a float mask [L, S] given row by row."""
    inputs = cast(draw_inputs(module.spec, 2, 2, 1), dtype)
    return outputs_of(module, inputs | {"attn_mask": torch.tensor(rows, dtype=dtype)})


def bottomless(attn_weights: bool, dtype: torch.dtype) -> Attention:
    spec = small_spec(attn_mask="float[L,S]", causal=False, attn_weights=attn_weights)
    return make_module(spec, dtype)


@both_paths
@both_dtypes
@pytest.mark.parametrize("value", [-1e30, -2e30, -1e38, LOWEST])
def test_values_below_the_floor_all_mean_the_floor(
    value: float, attn_weights: bool, dtype: torch.dtype
) -> None:
    module = bottomless(attn_weights, dtype)
    inf = torch.inf
    floor = with_mask(module, [[-1e30, -1e30, -1e30], [-1e30, -inf, -1e30]], dtype)
    below = with_mask(module, [[value, value, value], [-1e30, -inf, value]], dtype)
    for name, wanted in floor.items():
        assert torch.equal(below[name], wanted), name


def test_values_below_float32_mean_the_floor_in_float64() -> None:
    module = bottomless(True, torch.float64)
    floor, below = (
        with_mask(module, [[value] * 3] * 2, torch.float64) for value in (-1e30, -1e300)
    )
    assert torch.equal(below["attn_weights"], floor["attn_weights"])


@both_dtypes
def test_row_of_the_lowest_values_is_the_mean_of_the_keys_that_are_not_forbidden(
    dtype: torch.dtype,
) -> None:
    module = bottomless(True, dtype)
    rows = [[LOWEST, LOWEST, LOWEST], [LOWEST, -torch.inf, LOWEST]]
    outputs = with_mask(module, rows, dtype)
    wanted = torch.tensor([[1 / 3] * 3, [0.5, 0.0, 0.5]], dtype=dtype).expand(2, 4, 2, 3)
    torch.testing.assert_close(outputs["attn_weights"], wanted)
    inputs = cast(draw_inputs(module.spec, 2, 2, 1), dtype)
    wanted = reference(module, inputs | {"attn_mask": torch.tensor(rows, dtype=dtype)})["output"]
    torch.testing.assert_close(outputs["output"].double(), wanted, rtol=1e-5, atol=1e-6)


@both_paths
@both_dtypes
def test_lowest_value_beside_an_allowed_key_has_no_influence(
    attn_weights: bool, dtype: torch.dtype
) -> None:
    module = bottomless(attn_weights, dtype)
    lowest = with_mask(module, [[0.0, LOWEST, 1.0]] * 2, dtype)
    forbidden = with_mask(module, [[0.0, -torch.inf, 1.0]] * 2, dtype)
    for name, wanted in forbidden.items():
        assert torch.equal(lowest[name], wanted), name


@both_paths
def test_values_above_the_floor_are_added_as_they_are(attn_weights: bool) -> None:
    module = bottomless(attn_weights, torch.float64)
    shifted, plain = (
        with_mask(module, [[shift + 0.5, shift - 2.0, shift]] * 2, torch.float64)
        for shift in (-1e3, 0.0)
    )
    for name, wanted in plain.items():
        torch.testing.assert_close(shifted[name], wanted, rtol=1e-10, atol=1e-12)


@both_dtypes
def test_values_just_above_the_floor_are_not_clamped(dtype: torch.dtype) -> None:
    weights = with_mask(bottomless(True, dtype), [[-1e30, -9e29, -2e30]] * 2, dtype)["attn_weights"]
    assert torch.equal(weights, torch.tensor([0.0, 1.0, 0.0], dtype=dtype).expand(2, 4, 2, 3))
