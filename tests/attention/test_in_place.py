"""A cache that is written in place: rows without keys, full rows, lengths, and gradients."""

from __future__ import annotations

import pytest
import torch
from layers import draw_inputs, exact_module, feature_spec, outputs_of
from torch import Tensor

from attn_export.attention import Attention


def in_place(feature: dict, **changes: object) -> Attention:
    return exact_module(feature_spec(feature, cache="in-place", **changes))


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
