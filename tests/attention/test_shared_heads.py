"""MQA and GQA are, to the bit, an MHA whose key/value heads are repeated in blocks.

A GEMM may round differently for a matrix of another width or layout: that of `k_proj` and
`v_proj`, and those of the core when it returns the weights. There, random values are equal
only to rounding; whole numbers, small enough that no order of summation rounds, to the bit.
The core without weights is equal to the bit for any values.
"""

from __future__ import annotations

import pytest
import torch
from conftest import small_spec
from slow import Inputs, cast, draw_inputs, make_module, outputs_of
from torch import Tensor

from attn_export.attention import Attention, scaled_dot_product_attention

DTYPES = (torch.float32, torch.float64)
SHARED = {"mqa": 1, "gqa": 2, "mha": 4}
E, H = 64, 4
D = 16  # so that each head starts on 64 bytes: a GEMM may round by where its rows start


def repeated(x: Tensor, heads: int = H, dim: int = 1) -> Tensor:
    """Repeat key/value heads in blocks, a a b b: one for each query head."""
    return x.repeat_interleave(heads // x.shape[dim], dim)


def repeated_module(module: Attention) -> Attention:
    """Return the MHA with the weights of a module with shared heads."""
    spec = module.spec
    mha = make_module(
        small_spec(**spec.to_dict() | {"num_kv_heads": spec.num_heads}), module.q_proj.weight.dtype
    )
    state = module.state_dict()
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        heads = state[name].unflatten(0, (spec.num_kv_heads, -1))
        state[name] = repeated(heads, dim=0).flatten(0, 1)
    mha.load_state_dict(state)
    return mha


def compare(module: Attention, inputs: Inputs) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each output of the module, and of the MHA with repeated heads."""
    shared = outputs_of(module, inputs)
    past = {name: repeated(value) for name, value in inputs.items() if name.startswith("past_")}
    wanted = outputs_of(repeated_module(module), inputs | past)
    return {
        name: (repeated(value) if name.startswith("present_") else value, wanted[name])
        for name, value in shared.items()
    }


def whole_numbers(module: Attention, inputs: Inputs) -> Inputs:
    """Set small whole numbers in the module's weights, and return such inputs."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=random))
    return {
        name: value if name == "attn_mask" else (2 * value).round()
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("kv_heads", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_core_with_shared_heads_equals_repeated_heads_to_the_bit(
    dtype: torch.dtype, kv_heads: int, mask: str, causal: bool, weights: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    for B, L, S in ((1, 1, 1), (1, 4, 4), (3, 4, 7), (3, 1, 33), (2, 33, 33)):
        q, k, v = (
            torch.randn(B, heads, length, D, generator=random).to(dtype)
            for heads, length in ((H, L), (kv_heads, S), (kv_heads, S))
        )
        allowed = torch.rand(B, 1, L, S, generator=random) > 0.3
        added = torch.randn(B, H, L, S, generator=random).to(dtype)
        attn_mask = {"none": None, "bool": allowed, "float": added}[mask]
        shared, wanted = (
            scaled_dot_product_attention(
                q, keys, values, attn_mask, causal=causal, scale=0.25, need_weights=weights
            )
            for keys, values in ((k, v), (repeated(k), repeated(v)))
        )
        assert torch.equal(shared[0], wanted[0]), (B, L, S)
        assert not weights or torch.equal(shared[1], wanted[1]), (B, L, S)


@pytest.mark.parametrize("mask", ["none", "bool[B,1,1,S]", "float[B,H,L,S]"])
@pytest.mark.parametrize("kv_heads", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_module_with_shared_heads_equals_repeated_heads_to_the_bit(
    dtype: torch.dtype, kv_heads: int, mask: str
) -> None:
    spec = small_spec(embed_dim=E, num_kv_heads=kv_heads, attn_mask=mask)
    module = make_module(spec, dtype)
    for B, L, P in ((1, 1, 0), (3, 4, 0), (3, 4, 3), (2, 1, 17)):
        inputs = whole_numbers(module, cast(draw_inputs(spec, B, L, P), dtype))
        for name, (actual, wanted) in compare(module, inputs).items():
            assert torch.equal(actual, wanted), (name, B, L, P)


@pytest.mark.parametrize("kv_heads", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_module_with_weights_and_shared_heads_equals_repeated_heads_to_the_bit(
    dtype: torch.dtype, kv_heads: int
) -> None:
    # Scores are whole numbers a thousand apart, so that every weight is 0 or 1: no step rounds.
    spec = small_spec(embed_dim=E, num_kv_heads=kv_heads, attn_weights=True, scale=1000.0)
    module = make_module(spec, dtype)
    for B, L, P in ((1, 1, 0), (3, 4, 0), (3, 4, 3), (2, 1, 17)):
        inputs = whole_numbers(module, cast(draw_inputs(spec, B, L, P), dtype))
        pairs = compare(module, inputs)
        assert set(pairs["attn_weights"][0].unique().tolist()) <= {0.0, 1.0}
        for name, (actual, wanted) in pairs.items():
            assert torch.equal(actual, wanted), (name, B, L, P)


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("kv_heads", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-14)])
def test_random_module_with_shared_heads_equals_repeated_heads_to_rounding(
    dtype: torch.dtype, tolerance: float, kv_heads: int, attn_weights: bool
) -> None:
    spec = small_spec(embed_dim=E, num_kv_heads=kv_heads, attn_weights=attn_weights)
    inputs = cast(draw_inputs(spec, 3, 4, 3), dtype)
    for actual, wanted in compare(make_module(spec, dtype), inputs).values():
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


def test_heads_in_another_order_are_another_attention() -> None:
    """Show that the tests above can fail: a b a b instead of a a b b gives other outputs."""
    spec = small_spec()
    module = make_module(spec)
    inputs = draw_inputs(spec, 2, 4, 3)
    tiled = repeated_module(module)
    with torch.no_grad():
        for projection in (tiled.k_proj, tiled.v_proj):
            for parameter in projection.parameters():
                heads = parameter.unflatten(0, (4, -1))
                parameter.copy_(heads[[0, 2, 1, 3]].flatten(0, 1))
    past = {name: inputs[name].repeat(1, 2, 1, 1) for name in ("past_key", "past_value")}
    right, wrong = outputs_of(module, inputs), outputs_of(tiled, inputs | past)
    assert (right["output"] - wrong["output"]).abs().max() > 1e-2
