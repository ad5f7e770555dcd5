"""Properties that a subject takes from its example: sizes, types, ranges, masks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from attn_export import Subject
from attn_export.export.subject_checks import input_like
from attn_export.interface import Input

MASK = torch.tensor([[True, False], [True, True]])


@pytest.mark.parametrize(
    ("example", "wanted"),
    [
        (torch.zeros(2, 3), Input(("batch", 3), "float32", first=None)),
        (torch.tensor([[4, 9]]), Input(("batch", 2), "int64", 4, 9, first=None)),
        (torch.ones(2, 3, dtype=torch.int64), Input(("batch", 3), "int64", 0, 1, first=True)),
        (torch.zeros(2, 0, dtype=torch.int32), Input(("batch", 0), "int32", first=None)),
        (MASK, Input(("batch", 2), "bool", first=True)),
        (~MASK, Input(("batch", 2), "bool", first=False)),
        (MASK.T, Input(("batch", 2), "bool", first=None)),
        (torch.zeros(2, 0, dtype=torch.bool), Input(("batch", 0), "bool", first=None)),
        (torch.tensor([[0, -torch.inf]]), Input(("batch", 2), first=None, hides=True)),
    ],
    ids=[
        "floats", "integers", "a mask of ones", "no integers", "True first", "False first",
        "either first", "no bools", "-inf",
    ],
)  # fmt: skip
def test_an_input_is_like_its_example(example: Tensor, wanted: Input):
    assert input_like(example, {0: "batch"}) == wanted


def test_a_mask_of_ones_is_drawn_with_zeros_after_the_first():
    module, ones = nn.Identity().eval(), torch.ones(4, 8, dtype=torch.int64)
    subject = Subject(module, {"input": ones}, {"input": {0: "batch", 1: "key_len"}}, ["y"])
    drawn = subject.draw({"batch": 4, "key_len": 8}, "a")["input"]
    assert set(drawn.flatten().tolist()) == {0, 1}
    assert drawn[:, 0].tolist() == [1] * 4


class Joins(nn.Module):
    def forward(self, past, x):
        return torch.cat([past, x], 1)


@pytest.fixture
def joins() -> Subject:
    return Subject(
        Joins().eval(),
        {"past": torch.zeros(2, 4, 8), "x": torch.zeros(2, 3, 8)},
        {"past": {0: "batch", 1: "past_len"}, "x": {0: "batch", 1: "query_len"}},
        ["y"],
        relations={"total_len": "past_len + query_len"},
    )


def test_sums_follow_the_sizes_of_the_example(joins: Subject):
    assert joins.example_sizes == {"batch": 2, "past_len": 4, "query_len": 3, "total_len": 7}
    changed = joins.sizes_with({"query_len": 10})
    assert changed == {"batch": 2, "past_len": 4, "query_len": 10, "total_len": 14}
    assert joins.sizes_with({"total_len": 99}) == joins.example_sizes


def test_inputs_are_drawn_at_any_sizes_and_the_same_from_the_same_words(joins: Subject):
    sizes = joins.sizes_with({"batch": 1, "past_len": 0})
    drawn, again, other = (joins.draw(sizes, "words", seed) for seed in (1, 1, 2))
    assert {name: tuple(x.shape) for name, x in drawn.items()} == {
        "past": (1, 0, 8),
        "x": (1, 3, 8),
    }
    assert torch.equal(drawn["x"], again["x"])
    assert not torch.equal(drawn["x"], other["x"])


def test_a_subject_does_not_change_and_one_that_differs_is_a_copy(joins: Subject):
    with pytest.raises(dataclasses.FrozenInstanceError):
        joins.notes = ("mine",)  # type: ignore[misc]
    before = joins.notes
    assert joins.having(notes=("mine",)).notes == ("mine",)
    assert joins.notes == before
