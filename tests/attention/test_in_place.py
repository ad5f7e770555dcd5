"""A cache that is written in place gives what an appending one gives, each row at its length."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from features import FEATURES, GROWING, KV_HEADS, SEEING_AHEAD
from layers import (
    TOTAL,
    Inputs,
    draw_inputs,
    exact_module,
    feature_spec,
    outputs_of,
    piece_of,
    whole_sequence,
)
from torch import Tensor

from attn_export.attention import Attention

EVERYWHERE = FEATURES | SEEING_AHEAD | GROWING
CAPACITY = 12

all_heads = pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)


def in_place(feature: dict, **changes: object) -> Attention:
    return exact_module(feature_spec(feature, cache="in-place", **changes))


def appending(module: Attention) -> Attention:
    """Return the same layer with an appending cache."""
    other = exact_module(dataclasses.replace(module.spec, cache="append"))
    other.load_state_dict(module.state_dict())
    return other


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@all_heads
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_a_sequence_in_pieces_is_that_of_an_appending_cache_at_every_step(
    feature: dict, kv_heads: int
) -> None:
    module = in_place(feature, num_kv_heads=kv_heads, v_head_dim=3)
    other = appending(module)
    whole = whole_sequence(other)
    wanted = outputs_of(other, whole)
    past = rubbish(module, 3)
    for start, stop in pairwise((0, 4, 5, 6, 9)):  # prefill, tokens, several
        piece = piece_of(whole, past, start, stop)
        mask = torch.rand(3, 1, 1, CAPACITY) > 0.5  # the rest does not count
        mask[..., :stop] = piece["attn_mask"]
        piece |= {"attn_mask": mask, "past_length": torch.full((3,), start)}
        got = outputs_of(module, piece)
        close(got["output"], wanted["output"][:, start:stop])
        for name in ("key", "value"):
            present = got[f"present_{name}"]
            close(present[:, :, :stop], wanted[f"present_{name}"][:, :, :stop])
            assert torch.equal(present[:, :, stop:], past[f"past_{name}"][:, :, stop:])
            past[f"past_{name}"] = present
        weights, added = got["attn_weights"], module.spec.added_keys
        rows = wanted["attn_weights"][:, :, start:stop]
        close(weights[..., :stop], rows[..., :stop])
        assert (weights[..., stop:CAPACITY] == 0).all()
        close(weights[..., CAPACITY:], rows[..., TOTAL : TOTAL + added])


@pytest.mark.parametrize("feature", (FEATURES | SEEING_AHEAD).values(), ids=FEATURES | SEEING_AHEAD)
def test_each_row_is_alone_what_an_appending_cache_gives(feature: dict) -> None:
    module = in_place(feature)
    other = appending(module)
    inputs = draw_inputs(module.spec, 4, 3, CAPACITY - 3)
    inputs["past_length"] = torch.tensor([0, 9, 4, 1])  # empty, full, and between
    got = outputs_of(module, inputs)
    for row, held in enumerate(inputs["past_length"].tolist()):
        wanted = outputs_of(other, row_of(inputs, row, held))
        close(got["output"][row : row + 1], wanted["output"])
        for name in ("present_key", "present_value"):
            close(got[name][row : row + 1, :, : held + 3], wanted[name])


def row_of(inputs: Inputs, row: int, held: int) -> Inputs:
    """Return one row of a batch, with its cache cut to the keys it holds."""
    one = {name: x[row : row + 1] for name, x in inputs.items() if name != "past_length"}
    one |= {name: one[name][:, :, :held] for name in ("past_key", "past_value")}
    return one | {"attn_mask": one["attn_mask"][..., : held + 3]}


def rubbish(module: Attention, B: int) -> dict[str, Tensor]:
    """Return buffers with large values everywhere."""
    shapes = module.spec.input_shapes()
    return {
        name: 1e4 * torch.randn(B, shapes[name][1], CAPACITY, shapes[name][3], dtype=torch.float64)
        for name in ("past_key", "past_value")
    }


@pytest.mark.parametrize("feature", EVERYWHERE.values(), ids=EVERYWHERE)
def test_elements_beyond_a_row_change_nothing_and_stay(feature: dict) -> None:
    module = in_place(feature)
    inputs = draw_inputs(module.spec, 3, 2, 6)
    inputs["past_length"] = torch.tensor([0, 5, 3])
    before = outputs_of(module, inputs)
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    loud = dict(inputs)
    for name in ("past_key", "past_value"):
        rest = torch.arange(8)[None, :] >= inputs["past_length"][:, None]
        loud[name] = inputs[name].masked_fill(rest[:, None, :, None], 1e4)
    after = outputs_of(module, loud)
    close(after["output"], before["output"])
    close(after["attn_weights"], before["attn_weights"])
    for row, held in enumerate(inputs["past_length"].tolist()):
        for name in ("key", "value"):
            present, past = after[f"present_{name}"][row], inputs[f"past_{name}"][row]
            assert torch.equal(present[:, :held], past[:, :held])
            assert (present[:, held : held + 2] != 1e4).all()
            assert (present[:, held + 2 :] == 1e4).all()
    assert all(torch.equal(given[name], tensor) for name, tensor in inputs.items())


def test_a_row_without_a_key_to_see_gives_0() -> None:
    module = in_place({}, attn_mask="bool[B,1,1,S]")
    inputs = draw_inputs(module.spec, 2, 2, 4)
    inputs["past_length"] = torch.tensor([1, 3])
    inputs["attn_mask"][0] = False
    inputs["attn_mask"][0, ..., 3:] = True  # beyond what row 0 holds
    weights = outputs_of(module, inputs)["attn_weights"]
    assert (weights[0] == 0).all()
    assert (weights[1].sum(-1) > 0).any()


@pytest.mark.parametrize("held", [5, -1])
def test_a_full_row_is_an_error(held: int) -> None:
    module = in_place({})
    inputs = draw_inputs(module.spec, 2, 2, 4)
    inputs["past_length"][1] = held
    with pytest.raises(RuntimeError, match="out of bounds"):
        module(**inputs)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (None, "past_length is missing"),
        (
            torch.zeros(2, 1, dtype=torch.int64),
            r"past_length is \[2, 1\], the spec has \['batch'\]",
        ),
        (torch.zeros(2), "past_length is torch.float32, the spec has torch.int64"),
        (torch.zeros(2, dtype=torch.int32), "past_length is torch.int32, the spec has torch.int64"),
    ],
    ids=["missing", "rank", "float", "int32"],
)
def test_another_past_length_is_refused(length: Tensor | None, message: str) -> None:
    module = in_place({})
    inputs = draw_inputs(module.spec, 2, 2, 4)
    with pytest.raises(ValueError, match=message):
        module(**inputs | {"past_length": length})


def test_gradients_reach_the_past_that_a_row_holds_and_no_more() -> None:
    module = in_place({}, attn_mask="none")
    inputs = draw_inputs(module.spec, 2, 2, 4)
    inputs["past_length"] = torch.tensor([1, 4])
    past = inputs["past_value"].requires_grad_()
    module(**inputs)[0].sum().backward()
    held = torch.arange(6)[None, :] < inputs["past_length"][:, None]
    assert past.grad is not None
    assert ((past.grad.abs().sum((1, 3)) > 0) == held).all()
