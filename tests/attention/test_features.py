"""Every feature gives what the reference gives, alone, together, and fed in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from conftest import small_spec
from features import CACHES, EVERY, FEATURES, IN_ANY_PLACE, KV_HEADS, PARAMETERS
from layers import (
    assert_is_the_reference,
    cast,
    draw_inputs,
    exact_module,
    feature_spec,
    make_module,
    outputs_of,
    piece_of,
    whole_sequence,
)

from attn_export.attention import Attention

MASKS = ("none", "bool[B,1,1,S]", "float[B,H,L,S]")
SIZES = ((2, 4, 0), (1, 1, 3), (2, 3, 8))  # B, L, P

all_heads = pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
all_masks = pytest.mark.parametrize("mask", MASKS)
both_paths = pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
CROSS = {"cross": True, "causal": False, "cache": "none", "kdim": 12, "vdim": 20}


@both_paths
@all_masks
@all_heads
@pytest.mark.parametrize("feature", EVERY.values(), ids=EVERY)
@pytest.mark.every(4)
def test_feature_equals_the_reference(
    feature: dict, kv_heads: int, mask: str, attn_weights: bool
) -> None:
    spec = feature_spec(feature, num_kv_heads=kv_heads, attn_mask=mask, attn_weights=attn_weights)
    module = exact_module(spec)
    for B, L, P in SIZES:
        assert_is_the_reference(module, draw_inputs(spec, B, L, P, seed=L))


@pytest.mark.parametrize("cache", CACHES.values())
@pytest.mark.parametrize("feature", EVERY.values(), ids=EVERY)
def test_feature_equals_the_reference_in_float32_and_with_any_cache(
    feature: dict, cache: str
) -> None:
    module = make_module(feature_spec(feature, cache=cache), torch.float32)
    assert_is_the_reference(module, cast(draw_inputs(module.spec, 2, 3, 8), torch.float32))
    module = exact_module(module.spec)
    assert_is_the_reference(module, draw_inputs(module.spec, 3, 4, 5))


MORE_MASKS = (
    "bool[L,S]", "bool[B,1,L,S]", "bool[B,H,L,S]", "bool[H,L,S]", "float[B,1,1,S]", "float[1,S]",
)  # fmt: skip


@pytest.mark.parametrize("cache", CACHES.values())
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("mask", MORE_MASKS)
def test_mask_of_any_shape_equals_the_reference(mask: str, causal: bool, cache: str) -> None:
    for kv_heads, weights in ((4, False), (2, True)):
        spec = small_spec(
            num_kv_heads=kv_heads, attn_mask=mask, causal=causal, cache=cache, attn_weights=weights
        )
        module = make_module(spec)
        for B, L, P in ((1, 1, 3), (3, 4, 0), (3, 4, 3)):
            assert_is_the_reference(module, draw_inputs(spec, B, L, P, seed=B + 10 * L + 100 * P))


@both_paths
@pytest.mark.parametrize("mask", MASKS + MORE_MASKS)
@all_heads
def test_cross_attention_equals_the_reference(kv_heads: int, mask: str, attn_weights: bool) -> None:
    spec = small_spec(num_kv_heads=kv_heads, attn_mask=mask, attn_weights=attn_weights, **CROSS)
    for B, L in ((1, 1), (3, 4), (2, 7)):
        assert_is_the_reference(make_module(spec), draw_inputs(spec, B, L))


@pytest.mark.parametrize(
    "feature",
    [{"qk_norm": "rms"}, {"qk_norm": "layer"}, {"softcap": 0.8}, {"sinks": True}, {"bias": "k"}],
    ids=str,
)
def test_cross_attention_with_a_feature_equals_the_reference(feature: dict) -> None:
    module = exact_module(feature_spec(feature, **CROSS))
    assert_is_the_reference(module, draw_inputs(module.spec, 2, 3))


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


@both_paths
@pytest.mark.parametrize("changes", DIMENSIONS.values(), ids=DIMENSIONS)
def test_any_dimensions_equal_the_reference(changes: dict, attn_weights: bool) -> None:
    if "cross" in changes:
        changes = changes | {"causal": False, "cache": "none"}
    spec = small_spec(attn_weights=attn_weights, **changes)
    for L, P in ((1, 0), (4, 0)) if "cross" in changes else ((1, 3), (4, 0), (4, 3)):
        assert_is_the_reference(make_module(spec), draw_inputs(spec, 3, L, P))


@all_masks
@all_heads
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
@pytest.mark.every(3)
def test_pieces_equal_the_whole_at_every_step(feature: dict, kv_heads: int, mask: str) -> None:
    spec = feature_spec(feature, num_kv_heads=kv_heads, attn_mask=mask, v_head_dim=3)
    module = exact_module(spec)
    whole = whole_sequence(module)
    wanted = outputs_of(module, whole)
    past = {"past_key": whole["past_key"], "past_value": whole["past_value"]}
    for start, stop in pairwise((0, 4, 5, 6, 9)):  # prefill, tokens, several
        actual = outputs_of(module, piece_of(whole, past, start, stop))
        past = {"past_key": actual["present_key"], "past_value": actual["present_value"]}
        rows = wanted["attn_weights"][:, :, start:stop]
        expected = {
            "output": wanted["output"][:, start:stop],
            "present_key": wanted["present_key"][:, :, :stop],
            "present_value": wanted["present_value"][:, :, :stop],
            "attn_weights": torch.cat([rows[..., :stop], rows[..., 9:]], dim=-1),
        }
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("feature", IN_ANY_PLACE.values(), ids=IN_ANY_PLACE)
def test_hidden_past_moves_all_positions_and_changes_nothing(feature: dict) -> None:
    module = exact_module(feature_spec(feature))
    inputs = draw_inputs(module.spec, 2, 5)
    same = {name: inputs[name] for name in ("query", "position_ids") if name in inputs}
    moved = draw_inputs(module.spec, 2, 5, P=11) | same
    hidden = torch.zeros(2, 1, 1, 11, dtype=torch.bool)
    moved["attn_mask"] = torch.cat([hidden, inputs["attn_mask"]], dim=-1)
    before, after = outputs_of(module, inputs), outputs_of(module, moved)
    torch.testing.assert_close(after["output"], before["output"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        after["attn_weights"][..., 11:], before["attn_weights"], rtol=1e-12, atol=1e-12
    )
    assert (after["attn_weights"][..., :11] == 0).all()


CHANGING = {name: EVERY[name] for name in EVERY if not name.startswith(("packed", "plain"))}


@pytest.mark.parametrize("feature", CHANGING.values(), ids=CHANGING)
def test_feature_changes_the_output(feature: dict) -> None:
    """Show that the tests above would fail if the feature did nothing."""
    kept = {key: value for key, value in feature.items() if key == "causal"}
    with_it, without = exact_module(feature_spec(feature)), exact_module(feature_spec(kept))
    missing = with_it.load_state_dict(without.state_dict(), strict=False).missing_keys
    inputs = draw_inputs(with_it.spec, 2, 5, 3)
    inputs["attn_mask"][:] = True
    outputs = [
        outputs_of(module, {n: x for n, x in inputs.items() if n in module.spec.input_shapes()})
        for module in (with_it, without)
    ]
    outputs = [found["output"] for found in outputs]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3, missing


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_feature_by_the_names_that_checkpoints_use(name: str) -> None:
    """Tables of rotary frequencies, slopes and buckets are none."""
    state = Attention(feature_spec(EVERY[name])).state_dict()
    assert {n: tuple(x.shape) for n, x in state.items() if "_proj." not in n} == PARAMETERS[name]


def test_projections_named_in_the_spec_have_a_bias_and_no_others() -> None:
    projections = ("q", "k", "v", "out")
    for some in ("", "q", "k", "v", "out", "q,v", "q,k,v", "q,k,v,out"):
        state = Attention(small_spec(bias=[*filter(None, some.split(","))])).state_dict()
        assert {name for name in projections if f"{name}_proj.bias" in state} == {
            *filter(None, some.split(","))
        }
        assert {name for name in state if "weight" in name} == {
            f"{name}_proj.weight" for name in projections
        }
