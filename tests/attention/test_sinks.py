"""Sinks: a learned score for each head takes part in the softmax and stands for no key."""

from __future__ import annotations

import pytest
import torch
from features import KV_HEADS, exact_module, feature_spec
from slow import draw_inputs, make_module, outputs_of

from attn_export.attention import scaled_dot_product_attention

SCALE = 0.3
SINKS = torch.tensor([-2.0, 0.0, 0.7, 30.0], dtype=torch.float64)


def draw(length: int, heads: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, length, 8, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
def test_core_is_a_softmax_with_one_more_column(
    kv_heads: int, mask: str, softcap: float | None
) -> None:
    L, S = 3, 5
    q, k, v = draw(L, 4, 0), draw(S, kv_heads, 1), draw(S, kv_heads, 2)
    allowed = torch.rand(2, 4, L, S, generator=torch.Generator().manual_seed(3)) > 0.3
    added = {
        "none": torch.zeros(L, S, dtype=torch.float64),
        "bool": torch.zeros(2, 4, L, S, dtype=torch.float64).masked_fill(~allowed, -torch.inf),
        "float": draw(L, 4, 4)[..., :S],
        "causal": torch.full((L, S), -torch.inf, dtype=torch.float64).triu(S - L + 1),
    }[mask]
    keys, values = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
    scores = q @ keys.transpose(-1, -2) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    exponents = (scores + added).exp()
    wanted = exponents / (exponents.sum(-1, keepdim=True) + SINKS.exp().view(1, 4, 1, 1))
    for need_weights in (True, False):
        attended, weights = scaled_dot_product_attention(
            q, k, v, {"none": None, "bool": allowed, "float": added, "causal": None}[mask],
            causal=mask == "causal", scale=SCALE, softcap=softcap, sinks=SINKS,
            need_weights=need_weights,
        )  # fmt: skip
        torch.testing.assert_close(attended, wanted @ values, rtol=1e-12, atol=1e-14)
        assert (weights is None) is not need_weights
        if weights is not None:
            torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=1e-14)


def test_weights_sum_to_less_than_one_by_what_the_sink_takes() -> None:
    q = torch.zeros(1, 4, 1, 8, dtype=torch.float64)
    k, v = draw(5, 4, 1)[:1], draw(5, 4, 2)[:1]
    _, weights = scaled_dot_product_attention(q, k, v, scale=1.0, sinks=SINKS, need_weights=True)
    torch.testing.assert_close(weights.sum(-1).flatten(), 5 / (5 + SINKS.exp()))


def test_sink_is_not_capped() -> None:
    q = torch.zeros(1, 4, 1, 8, dtype=torch.float64)
    k, v = draw(5, 4, 1)[:1], draw(5, 4, 2)[:1]
    _, weights = scaled_dot_product_attention(
        q, k, v, scale=1.0, softcap=0.5, sinks=SINKS, need_weights=True
    )
    torch.testing.assert_close(weights.sum(-1).flatten(), 5 / (5 + SINKS.exp()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", ["bool[B,1,1,S]", "float[B,1,1,S]"])
@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
def test_row_of_hidden_keys_gives_0(attn_weights: bool, mask: str, dtype: torch.dtype) -> None:
    spec = feature_spec({"sinks": True}, attn_mask=mask, attn_weights=attn_weights, bias="none")
    inputs = draw_inputs(spec, 2, 3, 2)
    allowed = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    allowed[0] = False
    as_float = torch.zeros(2, 1, 1, 5, dtype=dtype).masked_fill(~allowed, -torch.inf)
    inputs = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    inputs["attn_mask"] = allowed if mask.startswith("bool") else as_float
    outputs = outputs_of(make_module(spec, dtype), inputs)
    assert (outputs["output"][0] == 0).all()
    assert (outputs["output"][1] != 0).all()
    if attn_weights:
        assert (outputs["attn_weights"][0] == 0).all()


def test_sink_far_below_the_scores_is_no_sink() -> None:
    spec = feature_spec({"sinks": True})
    module, plain = exact_module(spec), exact_module(feature_spec({}))
    plain.load_state_dict({k: v for k, v in module.state_dict().items() if k != "sinks"})
    torch.nn.init.constant_(module.sinks, -1e9)
    inputs = draw_inputs(spec, 2, 4, 3)
    inputs["attn_mask"][..., 0] = True
    for name, wanted in outputs_of(plain, inputs).items():
        torch.testing.assert_close(outputs_of(module, inputs)[name], wanted, rtol=1e-12, atol=1e-12)


def test_every_head_has_one_by_the_name_that_checkpoints_use() -> None:
    module = make_module(feature_spec({"sinks": True}), torch.float32)
    assert module.state_dict()["sinks"].shape == (4,)
    assert module.sinks.unique().numel() == 4
    assert "sinks" not in make_module(feature_spec({})).state_dict()
