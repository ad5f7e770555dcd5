"""Boxes and arrows: nothing overlaps, nothing leaves the drawing, what is shared is one box."""

from __future__ import annotations

import itertools

import pytest

from attn_export.graph.drawing_steps import REST, Step
from attn_export.graph.neighbourhood import Lane, Neighbourhood
from attn_export.report.attention_drawing import Box, Drawing, drawn

QUERY = Step("input", "query", shape="[B, L, 16]")
QKV = Step("nodes", "qkv", ("MatMul", "Add"), nodes=("qkv/MatMul",))


def lane(role: str, *steps: Step) -> Lane:
    return Lane(role, (QUERY, *steps))


def step(name: str, *operators: str, **more: tuple[str, ...]) -> Step:
    return Step("nodes", name, operators, "[B, 2, L, 8]", **more)


OURS = Neighbourhood(
    "Attention", 1, ("causal",), {"B": "batch"},
    (
        lane("query", step("q_proj", "MatMul"), step("Reshape, Transpose")),
        lane("key", step("k_proj", "MatMul"), step("Reshape, Transpose", beside=("past_key",))),
        lane("value", step("v_proj", "MatMul")),
        Lane("attn_mask", (Step("input", "attn_mask"), step("score_bias", *"abcdefgh" * 9))),
        Lane("past_key", (Step("input", "past_key"),)),
        Lane("past_value", (Step("input", "past_value"),)),
    ),
    (
        Lane("output", (step("out_proj", "MatMul"), Step("output", "output"))),
        Lane("present_key", (Step("output", "present_key"),)),
        Lane("present_value", (Step("output", "present_value"),)),
        Lane("attn_weights", (Step("output", "weights"),)),
    ),
)  # fmt: skip
SHARED = Neighbourhood(
    "0/Attention", 3, (), {},
    tuple(lane(role, QKV, step(f"a.very.long.path.{role}" * 3)) for role in ("q", "k", "v")),
    (Lane("output", (step("out_proj_with_a_word_that_is_longer_than_any_box"), REST)),),
)  # fmt: skip
FEW = Neighbourhood("A", 1, (), {}, (lane("query"),), (Lane("present_value", (REST,)),))
ALL = pytest.mark.parametrize("found", [OURS, SHARED, FEW], ids=["ours", "shared", "few"])


def overlap(one: Box, other: Box) -> bool:
    return (
        one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    )


@ALL
def test_nothing_overlaps_or_leaves_the_drawing(found: Neighbourhood):
    drawing = drawn(found)
    for one, other in itertools.combinations(drawing.boxes, 2):
        assert not overlap(one, other), (one, other)
    for box in drawing.boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + box.width <= drawing.width
        assert box.y + box.height <= drawing.height
        for text in box.texts:
            assert box.y < text.y < box.y + box.height
            assert box.x < text.x < box.x + box.width


@ALL
def test_every_arrow_goes_down_from_a_box_to_a_box(found: Neighbourhood):
    drawing = drawn(found)
    for arrow in drawing.arrows:
        assert arrow.bottom - arrow.top >= 20
        assert any(b.y + b.height == arrow.top and _covers(b, arrow.x) for b in drawing.boxes)
        assert any(b.y == arrow.bottom and _covers(b, arrow.x) for b in drawing.boxes)


def test_what_columns_have_in_common_is_one_wide_box():
    drawing = drawn(SHARED)
    named = {box.texts[0].text: box for box in drawing.boxes}
    node = next(box for box in drawing.boxes if box.kind == "attention")
    assert named["query"].width == named["qkv"].width == node.width
    assert _arrows_to(drawing, named["qkv"]) == 1
    assert _arrows_to(drawing, node) == 3
    assert any(text.text == "Attention (the first of 3)" for text in node.texts)


def test_steps_of_one_name_in_two_columns_stay_two_boxes():
    texts = [box.texts[0].text for box in drawn(OURS).boxes if box.kind != "attention"]
    assert texts.count("query") == 1
    assert texts.count("Reshape,") == 2


def test_a_cache_goes_in_and_comes_out_in_one_column():
    boxes = {box.texts[0].text: box for box in drawn(OURS).boxes}
    assert boxes["past_key"].x == boxes["present_key"].x
    assert boxes["past_value"].x == boxes["present_value"].x
    assert drawn(FEW).width < 200


def test_a_line_that_is_too_long_is_drawn_narrower():
    wide = Neighbourhood("A", 1, (), {}, (lane("x", step("LayerNormalization")),), ())
    (text,) = (t for b in drawn(wide).boxes for t in b.texts if t.text == "LayerNormalization")
    assert text.text_length is not None
    assert text.text_length < 126


def _covers(box: Box, x: float) -> bool:
    return box.x < x < box.x + box.width


def _arrows_to(drawing: Drawing, box: Box) -> int:
    return sum(arrow.bottom == box.y and _covers(box, arrow.x) for arrow in drawing.arrows)
