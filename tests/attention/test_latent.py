"""Multi-head latent attention is attention with keys and values that are made from a latent."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from layers import TOTAL, make_module, outputs_of, piece_of, whole_sequence

from attn_export import AttentionSpec
from attn_export.attention.functional import scaled_dot_product_attention
from attn_export.errors import SpecError

MLA = {
    "embed_dim": 24, "num_heads": 3, "head_dim": 10, "v_head_dim": 5, "kv_latent_dim": 7,
    "rotary": "interleaved", "rotary_dim": 4, "bias": "none", "causal": True,
    "attn_mask": "bool[B,1,1,S]", "cache": "append",
}  # fmt: skip
MORE = {
    "": {},
    "latent of queries, biases": {"q_latent_dim": 9, "bias": "all"},
    "halves, weights": {"rotary": "half", "attn_weights": True},
    "sinks": {"sinks": True, "softcap": 0.9},
    "window": {"window_left": 2},
    "not causal": {"causal": False, "attn_mask": "none"},
}


def spec_of(**changes: object) -> AttentionSpec:
    return AttentionSpec.from_dict({**MLA, **changes})


def expanded(module, x: torch.Tensor) -> torch.Tensor:
    """Compute it as the paper defines it: keys and values of every head, from the latent."""
    spec, latent = module.spec, module.latent
    H, R, C = spec.num_heads, spec.rotary_dim, spec.kv_latent_dim
    hidden = latent.q_norm(latent.q_down(x)) if spec.q_latent_dim else x
    q = latent.q_up(hidden).unflatten(-1, (H, -1)).transpose(1, 2)
    down = latent.kv_down(x)
    c, k_rotated = latent.kv_norm(down[..., :C]), down[..., None, C:].transpose(1, 2)
    k = torch.einsum("hnc,blc->bhln", latent.key_up, c)
    v = torch.einsum("hvc,blc->bhlv", latent.value_up, c)
    turns = module.rotary.turns(torch.arange(x.shape[1]))
    N = spec.head_dim - R
    q = torch.cat([q[..., :N], module.rotary(q[..., N:], turns)], -1)
    k = torch.cat([k, module.rotary(k_rotated, turns).expand(-1, H, -1, -1)], -1)
    attended, _ = scaled_dot_product_attention(
        q, k, v, causal=spec.causal, scale=spec.softmax_scale
    )
    return module.out_proj(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("changes", [MORE[""], MORE["latent of queries, biases"]])
def test_it_is_attention_over_the_keys_and_values_of_every_head(changes: dict) -> None:
    module = make_module(spec_of(cache="none", attn_mask="none", **changes))
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    torch.testing.assert_close(module(x), expanded(module, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", MORE.values(), ids=MORE)
@pytest.mark.parametrize("stops", [(0, 4, 5, 9), (0, TOTAL)])
def test_pieces_equal_the_whole(changes: dict, stops: tuple[int, ...]) -> None:
    if not changes.get("causal", True):
        stops = (0, TOTAL)  # a query would see keys of later pieces
    module = make_module(spec_of(**changes))
    whole = whole_sequence(module)
    wanted = outputs_of(module, whole)
    past = {"past_key": whole["past_key"], "past_value": whole["past_value"]}
    for start, stop in pairwise(stops):
        actual = outputs_of(module, piece_of(whole, past, start, stop))
        past = {"past_key": actual["present_key"], "past_value": actual["present_value"]}
        torch.testing.assert_close(
            actual["output"], wanted["output"][:, start:stop], rtol=1e-12, atol=1e-12
        )
    assert actual["present_key"].shape[1:] == (1, TOTAL, 4)
    assert actual["present_value"].shape[1:] == (1, TOTAL, 7)


def test_a_cache_in_place_gives_what_an_appending_one_gives() -> None:
    appending = make_module(spec_of(attn_mask="none"))
    in_place = make_module(spec_of(attn_mask="none", cache="in-place"))
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    past = [torch.randn(1, 1, 3, width, dtype=torch.float64) for width in (4, 7)]
    padded = [torch.cat([p, torch.zeros(1, 1, 6, p.shape[-1], dtype=p.dtype)], 2) for p in past]
    wanted = appending(x, None, None, None, *past)
    found = in_place(x, None, None, None, *padded, torch.tensor([3]))
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(ours[:, :, :8], theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_latent_dim": 0, "q_latent_dim": 4}, "q_latent_dim = 4 with kv_latent_dim = 0"),
        ({"num_kv_heads": 3}, "num_kv_heads 3 with kv_latent_dim = 7: all heads share"),
        ({"rotary": "none"}, "rotary = 'none' and rotary_dim 4 with kv_latent_dim = 7"),
        ({"rotary_dim": 10}, "rotary_dim 10 with kv_latent_dim = 7"),
        ({"qk_norm": "rms"}, "qk_norm = 'rms' with kv_latent_dim = 7: .* excludes it"),
        ({"cross": True, "cache": "none", "causal": False}, "cross = true|cross = True"),
        ({"weights_dtype": "int8"}, "weights_dtype = 'int8' with kv_latent_dim"),
        ({"bias": "q,v"}, "bias = 'q,v' with kv_latent_dim = 7"),
        ({"bias": "all"}, "bias = 'all' with kv_latent_dim = 7"),
        ({"kv_latent_dim": -1}, "kv_latent_dim must be at least 0"),
    ],
)
def test_refuses_what_contradicts_the_latent(changes: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of(**changes)
