"""Every feature gives what the slow reference gives, alone, together, and fed in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from features import FEATURES, GROWING, KV_HEADS, SEEING_AHEAD, exact_module, feature_spec
from pieces import piece_of, whole_sequence
from slow import cast, draw_inputs, make_module, outputs_of, slow_attention

MASKS = ("none", "bool[B,1,1,S]", "float[B,H,L,S]")
SIZES = ((2, 4, 0), (1, 1, 3), (2, 3, 8))  # B, L, P

all_heads = pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
all_masks = pytest.mark.parametrize("mask", MASKS)
both_paths = pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
all_features = pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
IN_ANY_PLACE = FEATURES | SEEING_AHEAD
EVERYWHERE = IN_ANY_PLACE | GROWING


@both_paths
@all_masks
@all_heads
@pytest.mark.parametrize("feature", EVERYWHERE.values(), ids=EVERYWHERE)
@pytest.mark.every(4)
def test_feature_equals_the_slow_reference(
    feature: dict, kv_heads: int, mask: str, attn_weights: bool
) -> None:
    spec = feature_spec(feature, num_kv_heads=kv_heads, attn_mask=mask, attn_weights=attn_weights)
    module = exact_module(spec)
    for B, L, P in SIZES:
        inputs = draw_inputs(spec, B, L, P, seed=L)
        wanted = slow_attention(module, inputs)
        for name, actual in outputs_of(module, inputs).items():
            torch.testing.assert_close(
                actual, torch.from_numpy(wanted[name]), rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("feature", EVERYWHERE.values(), ids=EVERYWHERE)
def test_feature_equals_the_slow_reference_in_float32(feature: dict) -> None:
    module = make_module(feature_spec(feature), torch.float32)
    inputs = cast(draw_inputs(module.spec, 2, 3, 8), torch.float32)
    wanted = slow_attention(module, inputs)
    for name, actual in outputs_of(module, inputs).items():
        assert actual.dtype == torch.float32
        expected = torch.from_numpy(wanted[name])
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feature", EVERYWHERE.values(), ids=EVERYWHERE)
def test_feature_without_a_cache_equals_the_slow_reference(feature: dict) -> None:
    module = exact_module(feature_spec(feature, cache="none"))
    inputs = draw_inputs(module.spec, 2, 7)
    wanted = slow_attention(module, inputs)
    for name, actual in outputs_of(module, inputs).items():
        torch.testing.assert_close(actual, torch.from_numpy(wanted[name]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "feature",
    [{"qk_norm": "rms"}, {"qk_norm": "layer"}, {"softcap": 0.8}, {"sinks": True}, {"bias": "k"}],
    ids=str,
)
def test_cross_attention_equals_the_slow_reference(feature: dict) -> None:
    cross = {"cross": True, "causal": False, "cache": "none", "kdim": 12, "vdim": 20}
    module = exact_module(feature_spec(feature, **cross))
    inputs = draw_inputs(module.spec, 2, 3)
    wanted = slow_attention(module, inputs)
    for name, actual in outputs_of(module, inputs).items():
        torch.testing.assert_close(actual, torch.from_numpy(wanted[name]), rtol=1e-12, atol=1e-12)


@all_masks
@all_heads
@all_features
def test_pieces_equal_the_whole_at_every_step(feature: dict, kv_heads: int, mask: str) -> None:
    spec = feature_spec(feature, num_kv_heads=kv_heads, attn_mask=mask, v_head_dim=3)
    module = exact_module(spec)
    whole = whole_sequence(module)
    wanted = outputs_of(module, whole)
    past = {"past_key": whole["past_key"], "past_value": whole["past_value"]}
    for start, stop in pairwise((0, 4, 5, 6, 9)):  # prefill, tokens, several
        actual = outputs_of(module, piece_of(whole, past, start, stop))
        past = {"past_key": actual["present_key"], "past_value": actual["present_value"]}
        expected = {
            "output": wanted["output"][:, start:stop],
            "present_key": wanted["present_key"][:, :, :stop],
            "present_value": wanted["present_value"][:, :, :stop],
            "attn_weights": torch.cat(
                [
                    wanted["attn_weights"][:, :, start:stop, i]
                    for i in (slice(stop), slice(9, None))
                ],
                dim=-1,
            ),
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


CHANGING = {name: EVERYWHERE[name] for name in EVERYWHERE if not name.startswith("packed")}


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
