"""Boxes of the drawing: none overlaps another, each column has no gap, what is shared is one."""

from __future__ import annotations

import itertools

import pytest

from attn_export.graph.neighbourhood import REST, DrawnStep, Lane, Neighbourhood
from attn_export.report.pictures import Box, Drawing, draw_attention

QUERY = DrawnStep("input", "query", shape="[B, L, 16]")
QKV = DrawnStep("nodes", "qkv", ("MatMul", "Add"), nodes=("qkv/MatMul",))


def lane(role: str, *steps: DrawnStep) -> Lane:
    return Lane(role, (QUERY, *steps))


def step(name: str, *operators: str, **more: tuple[str, ...]) -> DrawnStep:
    return DrawnStep("nodes", name, operators, "[B, 2, L, 8]", **more)


OURS = Neighbourhood(
    "Attention", 1, ("causal",), {"B": "batch"},
    (
        lane("query", step("q_proj", "MatMul"), step("Reshape, Transpose")),
        lane("key", step("k_proj", "MatMul"), step("Reshape, Transpose", beside=("past_key",))),
        lane("value", step("v_proj", "MatMul")),
        Lane("attn_mask", (DrawnStep("input", "attn_mask"), step("score_bias", *"abcdefgh" * 9))),
        Lane("past_key", (DrawnStep("input", "past_key"),)),
        Lane("past_value", (DrawnStep("input", "past_value"),)),
    ),
    (
        Lane("output", (step("out_proj", "MatMul"), DrawnStep("output", "output"))),
        Lane("present_key", (DrawnStep("output", "present_key"),)),
        Lane("present_value", (DrawnStep("output", "present_value"),)),
        Lane("attn_weights", (DrawnStep("output", "weights"),)),
    ),
)  # fmt: skip
SHARED = Neighbourhood(
    "0/Attention", 3, (), {},
    tuple(lane(role, QKV, step(f"a.very.long.path.{role}" * 3)) for role in ("q", "k", "v")),
    (Lane("output", (step("out_proj_with_a_word_that_is_longer_than_any_box"), REST)),),
)  # fmt: skip
FEW = Neighbourhood("A", 1, (), {}, (lane("query"),), (Lane("present_value", (REST,)),))
ALL = pytest.mark.parametrize("found", [OURS, SHARED, FEW], ids=["ours", "shared", "few"])


def areas(drawing: Drawing) -> list[tuple[int, int]]:
    """Return row and column of every field that a box, a line or the node covers."""
    node = [(drawing.row, column) for column in range(1, drawing.columns + 1)]
    return node + [
        (box.row + down, box.column + right)
        for box in drawing.boxes
        for down, right in itertools.product(range(box.rows), range(box.columns))
    ]


def named(drawing: Drawing) -> dict[str, Box]:
    return {box.step.name: box for box in drawing.boxes if box.step is not None}


@ALL
def test_nothing_overlaps_or_leaves_the_drawing(found: Neighbourhood):
    drawing = draw_attention(found)
    covered = areas(drawing)
    assert len(covered) == len(set(covered))
    assert min(covered) >= (1, 1)
    assert {column for _, column in covered} == set(range(1, drawing.columns + 1))


@ALL
def test_every_column_leads_to_the_node_and_from_it_without_a_gap(found: Neighbourhood):
    drawing = draw_attention(found)
    covered = set(areas(drawing))
    for column in drawing.inputs:
        assert all((row, column) in covered for row in range(1, drawing.row))
    for lane, column in zip(found.after, drawing.outputs, strict=True):
        end = drawing.row + len(lane.steps)
        assert all((row, column) in covered for row in range(drawing.row, end + 1))
        assert (end + 1, column) not in covered


def test_a_step_that_columns_share_is_one_wide_box():
    drawing = draw_attention(SHARED)
    assert named(drawing)["query"].columns == named(drawing)["qkv"].columns == 3
    assert drawing.inputs == (1, 2, 3)


def test_steps_of_one_name_in_two_columns_stay_two_boxes():
    names = [box.step.name for box in draw_attention(OURS).boxes if box.step is not None]
    assert names.count("query") == 1
    assert names.count("Reshape, Transpose") == 2


def test_a_cache_goes_in_and_comes_out_in_one_column():
    boxes = named(draw_attention(OURS))
    assert boxes["past_key"].column == boxes["present_key"].column
    assert boxes["past_value"].column == boxes["present_value"].column
    assert draw_attention(FEW).columns == 1
