"""A sequence fed in pieces through the cache gives what the whole sequence gives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from conftest import small_spec
from pieces import TOTAL, piece_of, whole_sequence
from slow import draw_inputs, make_module, outputs_of

KV_HEADS = {"mha": 4, "mqa": 1, "gqa": 2}
PIECES = {
    "prefill, tokens, piece": (0, 4, 5, 6, 9),
    "token by token": tuple(range(TOTAL + 1)),
    "pieces": (0, 1, 4, 9),
    "all at once": (0, TOTAL),
}


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("stops", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("mask", ["none", "bool[B,1,1,S]", "float[B,H,L,S]"])
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
def test_pieces_equal_the_whole_at_every_step(
    kv_heads: int, mask: str, stops: tuple[int, ...], attn_weights: bool
) -> None:
    spec = small_spec(
        num_kv_heads=kv_heads, attn_mask=mask, attn_weights=attn_weights, v_head_dim=3
    )
    module = make_module(spec)
    whole = whole_sequence(module)
    wanted = outputs_of(module, whole)
    past = {"past_key": whole["past_key"], "past_value": whole["past_value"]}
    for start, stop in pairwise(stops):
        actual = outputs_of(module, piece_of(whole, past, start, stop))
        past = {"past_key": actual["present_key"], "past_value": actual["present_value"]}
        expected = {
            "output": wanted["output"][:, start:stop],
            "present_key": wanted["present_key"][:, :, :stop],
            "present_value": wanted["present_value"][:, :, :stop],
        }
        if attn_weights:
            expected["attn_weights"] = wanted["attn_weights"][:, :, start:stop, :stop]
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-12)


def test_cache_holds_the_past_to_the_bit() -> None:
    spec = small_spec()
    inputs = draw_inputs(spec, 3, 4, 3)
    outputs = outputs_of(make_module(spec), inputs)
    for name in ("key", "value"):
        assert torch.equal(outputs[f"present_{name}"][:, :, :3], inputs[f"past_{name}"])


def test_every_token_of_the_past_reaches_the_output() -> None:
    spec = small_spec(attn_mask="none")
    module = make_module(spec)
    inputs = draw_inputs(spec, 1, 2, 3)
    before = outputs_of(module, inputs)["output"]
    for name in ("past_key", "past_value"):
        for position in range(3):
            changed = inputs[name].clone()
            changed[:, :, position] += 1
            after = outputs_of(module, inputs | {name: changed})["output"]
            assert ((after - before).abs().amax(-1) > 1e-6).all(), (name, position)
