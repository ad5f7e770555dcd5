"""`Attention` with the weights of `torch.nn.MultiheadAttention` is that module.

`nn.MultiheadAttention` reads a bool mask the other way round: True there is "may not attend".
"""

from __future__ import annotations

import pytest
import torch
from conftest import small_spec
from layers import make_module
from torch import Tensor, nn

from attn_export.attention import Attention

E, H = 32, 4
WIDTHS = {
    "same widths": {},
    "kdim": {"kdim": 12},
    "vdim": {"vdim": 20},
    "kdim and vdim": {"kdim": 12, "vdim": 20},
}


def torch_module(**options: object) -> nn.MultiheadAttention:
    torch.manual_seed(3)
    module = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **options).eval()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):  # PyTorch starts them at 0, where they could hide a mistake
            nn.init.normal_(parameter)
    return module


def with_weights_of(theirs: nn.MultiheadAttention, **changes: object) -> Attention:
    values = {"num_kv_heads": H, "cache": "none", "attn_weights": True, "causal": False} | changes
    ours = make_module(small_spec(embed_dim=E, num_heads=H, **values))
    if theirs.in_proj_weight is not None:
        weights = theirs.in_proj_weight.chunk(3)
    else:
        weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
    state = dict(zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), weights, strict=True))
    state["out_proj.weight"] = theirs.out_proj.weight
    if theirs.in_proj_bias is not None:
        biases = theirs.in_proj_bias.chunk(3)
        state |= dict(zip(("q_proj.bias", "k_proj.bias", "v_proj.bias"), biases, strict=True))
        state["out_proj.bias"] = theirs.out_proj.bias
    ours.load_state_dict(state)
    return ours


def draw(B: int, length: int, width: int) -> Tensor:
    return torch.randn(B, length, width, dtype=torch.float64)


def padding(B: int, S: int) -> Tensor:
    """Return a key padding mask as PyTorch has it, True = padding: 0, 1, 2 ... keys at the end."""
    return torch.arange(S) >= S - torch.arange(B).unsqueeze(1)


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_self_attention_equals_torch(causal: bool, bias: bool) -> None:
    B, L = 3, 5
    theirs = torch_module(bias=bias)
    ours = with_weights_of(theirs, causal=causal, bias=bias)
    x, ignored = draw(B, L, E), padding(B, L)
    future = torch.ones(L, L, dtype=torch.bool).triu(1) if causal else None
    expected = theirs(
        x, x, x, key_padding_mask=ignored, attn_mask=future, average_attn_weights=False
    )
    assert_same(ours(x, attn_mask=~ignored[:, None, None, :]), expected)


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_cross_attention_equals_torch(widths: dict) -> None:
    B, L, S = 3, 4, 6
    # vdim alone: PyTorch takes kdim = E then, as the spec does.
    theirs = torch_module(**{"kdim": E} | widths)
    ours = with_weights_of(theirs, cross=True, kdim=theirs.kdim, vdim=theirs.vdim)
    query, key, value = draw(B, L, E), draw(B, S, theirs.kdim), draw(B, S, theirs.vdim)
    ignored = padding(B, S)
    expected = theirs(query, key, value, key_padding_mask=ignored, average_attn_weights=False)
    assert_same(ours(query, key, value, ~ignored[:, None, None, :]), expected)


def test_float_mask_is_added_as_in_torch() -> None:
    B, L = 2, 5
    theirs = torch_module()
    ours = with_weights_of(theirs, attn_mask="float[B,H,L,S]")
    x = draw(B, L, E)
    added = torch.randn(B, H, L, L, dtype=torch.float64).masked_fill(torch.eye(L) == 1, -torch.inf)
    expected = theirs(x, x, x, attn_mask=added.flatten(0, 1), average_attn_weights=False)
    assert_same(ours(x, attn_mask=added), expected)


def test_mask_that_is_not_inverted_is_another_attention() -> None:
    B, L = 3, 5
    theirs = torch_module()
    x = draw(B, L, E)
    ignored = padding(B, L)
    ignored[:, 0] = True
    expected = theirs(x, x, x, key_padding_mask=ignored, average_attn_weights=False)[1]
    actual = with_weights_of(theirs)(x, attn_mask=ignored[:, None, None, :])[1]
    assert (actual - expected).abs().max() > 0.1
