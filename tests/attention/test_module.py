"""`Attention` in eager mode is the attention of the slow reference, for every spec."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from conftest import small_spec
from slow import cast, draw_inputs, make_module, outputs_of, slow_attention

from attn_export.spec import AttentionSpec

KV_HEADS = {"mha": 4, "mqa": 1, "gqa": 2}
MASKS = (
    "none", "bool[B,1,1,S]", "bool[L,S]", "bool[B,1,L,S]", "bool[B,H,L,S]", "bool[H,L,S]",
    "float[B,1,1,S]", "float[B,H,L,S]", "float[1,S]",
)  # fmt: skip
SIZES = tuple(product((1, 3), (1, 4), (0, 3)))  # B, L, P
# The effect of rounding alone at these sizes; a wrong head, key or scale is 1e-2 off at least.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6}


def assert_is_slow_attention(spec: AttentionSpec, sizes: tuple[tuple[int, int, int], ...]) -> None:
    for dtype, tolerance in TOLERANCE.items():
        module = make_module(spec, dtype)
        for B, L, P in sizes:
            if P and not spec.has_cache:
                continue
            inputs = cast(draw_inputs(spec, B, L, P, seed=B + 10 * L + 100 * P), dtype)
            wanted = slow_attention(module, inputs)
            for name, actual in outputs_of(module, inputs).items():
                assert actual.dtype == dtype
                torch.testing.assert_close(
                    actual.double(),
                    torch.from_numpy(wanted[name]),
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda text, at=(name, dtype, B, L, P): f"{at}: {text}",
                )


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("cache", ["none", "append"], ids=["no cache", "cache"])
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
@pytest.mark.every(4)
def test_self_attention_equals_the_slow_reference(
    kv_heads: int, mask: str, causal: bool, cache: str, attn_weights: bool
) -> None:
    spec = small_spec(
        num_kv_heads=kv_heads, attn_mask=mask, causal=causal, cache=cache, attn_weights=attn_weights
    )
    assert_is_slow_attention(spec, SIZES)


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
def test_cross_attention_equals_the_slow_reference(
    kv_heads: int, mask: str, attn_weights: bool
) -> None:
    spec = small_spec(
        num_kv_heads=kv_heads, attn_mask=mask, attn_weights=attn_weights,
        cross=True, causal=False, cache="none", kdim=12, vdim=20,
    )  # fmt: skip
    assert_is_slow_attention(spec, ((1, 1, 0), (3, 4, 0), (2, 7, 0)))


DIMENSIONS = {
    "head_dim": {"head_dim": 6},
    "head_dim where E does not divide by H": {"embed_dim": 30, "head_dim": 6},
    "v_head_dim below head_dim": {"v_head_dim": 3},
    "v_head_dim above head_dim": {"v_head_dim": 11},
    "head_dim 1": {"head_dim": 1},
    "one head": {"num_heads": 1, "num_kv_heads": 1},
    "six heads share three": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4},
    "six heads share two": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4},
    "no bias": {"bias": False},
    "scale": {"scale": 0.7},
    "scale and v_head_dim": {"scale": 0.05, "v_head_dim": 3, "bias": False},
    "cross": {"cross": True},
    "cross, kdim": {"cross": True, "kdim": 12},
    "cross, vdim": {"cross": True, "vdim": 20},
    "cross, all": {"cross": True, "kdim": 12, "vdim": 20, "v_head_dim": 3, "scale": 0.7},
}


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("changes", DIMENSIONS.values(), ids=DIMENSIONS)
def test_any_dimensions_equal_the_slow_reference(changes: dict, attn_weights: bool) -> None:
    if "cross" in changes:
        changes = changes | {"causal": False, "cache": "none"}
    assert_is_slow_attention(small_spec(attn_weights=attn_weights, **changes), SIZES)


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("cache", ["none", "append"], ids=["no cache", "cache"])
def test_returns_what_the_spec_names_in_its_order_and_shapes(
    cache: str, attn_weights: bool
) -> None:
    spec = small_spec(cache=cache, attn_weights=attn_weights, v_head_dim=3)
    B, L, P = 3, 4, 3
    S = P + L if cache == "append" else L
    outputs = outputs_of(make_module(spec), draw_inputs(spec, B, L, P))
    shapes = {"output": (B, L, 32)}
    if cache == "append":
        shapes |= {"present_key": (B, 2, S, 8), "present_value": (B, 2, S, 3)}
    if attn_weights:
        shapes |= {"attn_weights": (B, 4, L, S)}
    assert {name: tuple(tensor.shape) for name, tensor in outputs.items()} == shapes


def test_output_alone_is_a_tensor_and_not_a_tuple() -> None:
    spec = small_spec(cache="none")
    assert isinstance(make_module(spec)(**draw_inputs(spec, 1, 2)), torch.Tensor)


@pytest.mark.parametrize("mask", ["none", "bool[B,1,1,S]", "float[B,H,L,S]"])
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_asking_for_the_weights_changes_nothing_else(mask: str, causal: bool) -> None:
    plain, seen = (
        small_spec(attn_mask=mask, causal=causal, attn_weights=weights) for weights in (False, True)
    )
    inputs = draw_inputs(plain, 3, 4, 3)
    without = outputs_of(make_module(plain), inputs)
    having = outputs_of(make_module(seen), inputs)
    for name, wanted in without.items():
        torch.testing.assert_close(having[name], wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_weights_of_a_row_sum_to_one_and_are_0_where_it_may_not_attend(causal: bool) -> None:
    spec = small_spec(attn_mask="bool[B,H,L,S]", causal=causal, attn_weights=True)
    inputs = draw_inputs(spec, 3, 4, 3)
    inputs["attn_mask"][..., 0] = True
    weights = outputs_of(make_module(spec), inputs)["attn_weights"]
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, 4, dtype=torch.float64))
    assert (weights[~inputs["attn_mask"]] == 0).all()
    ahead = torch.ones(4, 7, dtype=torch.bool).triu(3 + 1)
    assert (weights[..., ahead] == 0).all().item() is causal


def test_no_input_is_written_to() -> None:
    spec = small_spec(attn_mask="float[B,1,1,S]", attn_weights=True)
    inputs = draw_inputs(spec, 2, 4, 3)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    outputs_of(make_module(spec), inputs)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
