"""Norms of queries and keys: of every head on its own, before it is rotated."""

from __future__ import annotations

import published
import pytest
import torch
import torch.nn.functional as F
from features import KV_HEADS, exact_module, feature_spec
from slow import draw_inputs, make_module, outputs_of
from torch import Tensor

from attn_export.attention import Attention


def normed(module: Attention, name: str, x: Tensor) -> Tensor:
    """Apply PyTorch's own norm to every head of [B, H, L, D]."""
    norm = getattr(module, f"{name}_norm")
    if module.spec.qk_norm == "rms":
        return F.rms_norm(x, (8,), norm.weight, module.spec.norm_eps)
    return F.layer_norm(x, (8,), norm.weight, norm.bias, module.spec.norm_eps)


def heads(projected: Tensor, count: int) -> Tensor:
    return projected.view(*projected.shape[:2], count, -1).transpose(1, 2)


@torch.no_grad()
@pytest.mark.parametrize("rotary", ["none", "half", "interleaved"])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_heads_are_normed_before_they_are_rotated(
    norm: str, kv_heads: int, eps: float, rotary: str
) -> None:
    P, L = 2, 4
    spec = feature_spec(
        {"qk_norm": norm, "norm_eps": eps, "rotary": rotary},
        num_kv_heads=kv_heads, attn_mask="none", causal=False,
    )  # fmt: skip
    module = exact_module(spec)
    inputs = draw_inputs(spec, 2, L, P)
    q = normed(module, "q", heads(module.q_proj(inputs["query"]), 4))
    k = normed(module, "k", heads(module.k_proj(inputs["query"]), kv_heads))
    v = heads(module.v_proj(inputs["query"]), kv_heads)
    if rotary != "none":
        q, k = (torch.from_numpy(published.rotated(x.numpy(), spec, P)) for x in (q, k))
    k = torch.cat([inputs["past_key"], k], dim=2)
    v = torch.cat([inputs["past_value"], v], dim=2)
    attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    outputs = outputs_of(module, inputs)
    wanted = module.out_proj(attended.transpose(1, 2).flatten(2))
    torch.testing.assert_close(outputs["output"], wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs["present_key"], k, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs["present_value"], v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_size_of_a_head_does_not_matter(norm: str) -> None:
    spec = feature_spec({"qk_norm": norm, "norm_eps": 1e-12}, bias="out", cache="none")
    module = exact_module(spec)
    inputs = draw_inputs(spec, 2, 4)
    before = outputs_of(module, inputs)["output"]
    with torch.no_grad():
        module.q_proj.weight[8:16] *= 100  # one query head
        module.k_proj.weight[:8] *= 0.1  # one key head
    after = outputs_of(module, inputs)["output"]
    torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-8)


STATE = {
    "none": set(),
    "rms": {"q_norm.weight", "k_norm.weight"},
    "layer": {"q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"},
}


@pytest.mark.parametrize("norm", STATE)
def test_queries_and_keys_have_weights_of_their_own(norm: str) -> None:
    module = make_module(feature_spec({"qk_norm": norm}))
    state = {name: x for name, x in module.state_dict().items() if "norm" in name}
    assert set(state) == STATE[norm]
    assert {tuple(x.shape) for x in state.values()} <= {(8,)}
    inputs = draw_inputs(module.spec, 2, 4, 3)
    before = outputs_of(module, inputs)["output"]
    for name in STATE[norm] - {"k_norm.bias"}:
        with torch.no_grad():
            module.get_parameter(name)[0] += 1
        after = outputs_of(module, inputs)["output"]
        assert (after - before).abs().max() > 1e-6, name
        before = after
