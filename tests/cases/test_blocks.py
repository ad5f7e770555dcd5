"""Sizes at the blocks of kernels: small layers try all, others blocks first, with a note."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import onnx
import pytest
import shared
from conftest import interface_of
from mutants.planting import Planter, float_values, plant

from attn_export import verify
from attn_export.cases.blocks import BlockSizes
from attn_export.cases.draw import Interface, Sizes
from attn_export.cases.input_patterns import VALUES
from attn_export.cases.mask_patterns import LENGTHS, MASKS
from attn_export.cases.plan import Plan, plan_cases
from attn_export.interface import Input
from attn_export.spec import AttentionSpec

BLOCKS = (16, 32, 64, 128, 256, 512, 1024)
NEAR = sorted(block + step for block in BLOCKS for step in (-1, 0, 1))
OPAQUE = {c.name for c in (*VALUES, *MASKS, *LENGTHS) if c.is_opaque}

SMALL = {"embed_dim": 64, "num_heads": 4, "num_kv_heads": 2}
CROSS = {"num_kv_heads": 4, "cross": True}
SPECS: dict[str, dict[str, object]] = {
    "append": {"causal": True, "cache": "append"},
    "append, masked": {"causal": True, "cache": "append", "attn_mask": "bool[B,1,1,S]"},
    "in place": {"causal": True, "cache": "in-place"},
    "no cache": {"causal": True},
    "no cache, not causal": {},
    "cross": CROSS,
    "cross, masked": {**CROSS, "attn_mask": "bool[B,1,1,S]"},
}


class Call(NamedTuple):
    """The numbers of queries, past keys and all keys."""

    L: int
    P: int
    S: int


CALLS: dict[str, Callable[[Call], bool]] = {
    "whole": lambda call: call.L > 1 and call.P == 0,
    "one query": lambda call: call.L == 1 and call.S > 1,
    "chunk": lambda call: call.L > 1 and call.P > 0,
}
AXES = ("L", "P", "S")


def call_of(sizes: Sizes) -> Call:
    L, P = sizes["query_len"], sizes.get("past_len", 0)
    return Call(L, P, sizes.get("key_len", L + P))


def plan_of(**changes: object) -> Plan:
    return plan_cases(interface_of(AttentionSpec.from_dict({**SMALL, **changes})))


def plainly_tried(plan: Plan) -> list[Sizes]:
    """Return the sizes of the cases whose contents hide nothing."""
    return [case.sizes for case in plan.cases if OPAQUE.isdisjoint(case.contents)]


def can_vary(spec: str, call: str, axis: str) -> bool:
    has_past, is_cross = "cache" in SPECS[spec], spec.startswith("cross")
    if call == "chunk":
        return has_past
    if call == "one query":
        return axis in "PS" if has_past else axis == "S" and is_cross
    return axis in "LS"


@pytest.mark.parametrize("spec", SPECS)
def test_a_layer_of_64_wide_tries_several_sequences_at_every_block_in_every_call(spec):
    plan = plan_of(**SPECS[spec])
    tried = {
        (call, axis, getattr(call_of(sizes), axis))
        for sizes in plainly_tried(plan)
        if sizes["batch"] > 1
        for call, holds in CALLS.items()
        if holds(call_of(sizes))
        for axis in AXES
    }
    wanted = {
        (call, axis, size)
        for call in CALLS
        for axis in AXES
        if can_vary(spec, call, axis)
        for size in NEAR
    }
    assert len(wanted) >= 2 * len(NEAR)
    assert wanted - tried == set()
    assert not any("at blocks" in note for note in plan.notes)


@pytest.mark.parametrize("spec", SPECS)
def test_each_call_is_tried_with_each_batch_size(spec):
    tried = plainly_tried(plan_of(**SPECS[spec]))
    for call, holds in CALLS.items():
        if any(can_vary(spec, call, axis) for axis in AXES):
            assert {1, 2, 3, 8, 16, 17} <= {s["batch"] for s in tried if holds(call_of(s))}, call


@pytest.mark.parametrize("relation", ["m + t", "t + m"])
def test_the_axes_of_users_are_tried_under_any_name(relation):
    inputs = {"x": Input(("batch", "t", 8)), "past": Input(("batch", "m", 8))}
    plan = plan_cases(Interface(inputs, {"y": ("batch", "t", 8)}, sums={"all": relation}))
    sizes = plainly_tried(plan)
    for axis in ("t", "m"):
        other = "m" if axis == "t" else "t"
        for size in NEAR:
            assert any(each[axis] == size and each[other] == 1 for each in sizes)
            assert any(each[axis] == size and each[other] > 1 for each in sizes)
            assert any(each["all"] == size and each[axis] == 1 for each in sizes)
    assert all(any(each["all"] == n and each["t"] > 1 < each["m"] for each in sizes) for n in NEAR)


def test_a_product_with_the_batch_is_tried():
    sizes = BlockSizes(["batch", "beams"], {"rows": "batch*beams"})
    assert {"beams": 16, "batch": 17} in list(sizes.candidates())


def test_bounds_limit_the_sizes_and_the_least_size_of_an_axis():
    sizes = BlockSizes(["batch", "frames"], {}, {"frames": (3, 40)})
    assert "frames 16 where frames > 3, one sequence" in sizes.conditions()
    plan = plan_cases(
        Interface({"x": Input(("batch", "frames", 4))}, {"y": ("batch", "frames", 4)},
                  bounds={"frames": range(3, 41)})
    )  # fmt: skip
    assert {15, 16, 17, 31, 32, 33} <= {case.sizes["frames"] for case in plan.cases}
    assert plan.notes == ()


# -- layers that are too large for all sizes ----------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"embed_dim": 512, "num_heads": 8, "num_kv_heads": 1},
        {"embed_dim": 512, "num_heads": 8, "num_kv_heads": 8, "attn_mask": "bool[B,1,1,S]"},
        {"embed_dim": 4096, "num_heads": 32, "num_kv_heads": 8},
        {"embed_dim": 512, "num_heads": 8, "num_kv_heads": 2, "cache": "in-place"},
    ],
    ids=str,
)
def test_sizes_that_are_left_out_are_named_and_blocks_come_before_their_neighbours(changes):
    plan = plan_of(**{"causal": True, "cache": "append", **changes})
    tried = [call_of(sizes) for sizes in plainly_tried(plan) if sizes["batch"] > 1]
    (note,) = (note for note in plan.notes if "at block sizes of kernels" in note)
    texts = [part for part in note.partition(": ")[2].split("; ") if "several" in part]
    parts = {
        call: next((part for part in texts if where in part), "") for call, where in WHERE.items()
    }
    for call, holds in CALLS.items():
        for axis in AXES:
            if not can_vary("append", call, axis):
                continue
            found = {getattr(each, axis) for each in tried if holds(each)}
            assert named(parts[call], axis) == {size for size in NEAR if size not in found}
            for block in BLOCKS if call != "chunk" else ():
                assert block in found or not {block - 1, block + 1} <= found


WHERE = {
    "whole": "where query_len > 1, past_len = 0", "one query": "where query_len = 1, past_len > 0",
    "chunk": "where query_len > 1, past_len > 0",
}  # fmt: skip
NAMES = {"L": "query_len", "P": "past_len", "S": "total_len|capacity"}


def named(part: str, axis: str) -> set[int]:
    """Return the sizes of an axis that a part of a note names."""
    sizes: set[int] = set()
    for names, numbers in re.findall(r"([a-z][a-z_ ]*) ([\d, -]+)(?=, [a-z]| where)", part):
        if re.search(NAMES[axis], names):
            for run in numbers.split(", "):
                first, _, last = run.partition("-")
                sizes |= set(range(int(first), int(last or first) + 1))
    return sizes


# -- faults at exact sizes ----------------------------------------------------------------------

FAULTS = {
    "S % 32 == 0": ("S", "Mod", 32),
    "S == 32": ("S", "", 32),
    "L == 31": ("L", "", 31),
    "B == 16": ("B", "", 16),
    "P == 33": ("P", "", 33),
    "L == 16": ("L", "", 16),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_one_size_fails(fault: str, tmp_path: Path):
    assert failed_cases(shared.bundle_of("append"), *FAULTS[fault], tmp_path)


def test_a_fault_at_a_far_position_fails(tmp_path: Path):
    found = failed_cases(shared.bundle_of("in-place"), "position", "", 16385, tmp_path)
    assert found == {"far_positions", "far_positions_one_query"}


def test_faults_at_larger_blocks_fail(tmp_path: Path):
    bundle = shared.bundle_of("append")
    assert failed_cases(bundle, "S", "", 2048, tmp_path) == {"far_past_2047"}
    assert failed_cases(bundle, "P", "", 4096, tmp_path) == {
        "far_past_4096", "far_past_4096_L3",
    }  # fmt: skip


def test_a_small_layer_decodes_after_long_pasts():
    plan = plan_of(embed_dim=16, num_heads=2, num_kv_heads=1, causal=True, cache="append")
    calls = {case.name: call_of(case.sizes) for case in plan.cases}
    assert calls["far_past_2047"] == Call(L=1, P=2047, S=2048)
    assert calls["far_past_4096"] == Call(L=1, P=4096, S=4097)
    assert plan.notes == ()


def failed_cases(bundle: Path, axis: str, operator: str, number: int, folder: Path) -> set[str]:
    """Return the cases that fail where the output is wrong at one size, or one position."""
    model = onnx.load(bundle / "model.portable.onnx")
    source, place = {
        "B": ("query", 0), "L": ("query", 1), "P": ("past_key", 2), "S": ("present_key", 2),
        "position": ("position_ids", None),
    }[axis]  # fmt: skip

    def wrong(p: Planter, x: str) -> str:
        largest = p("ReduceMax", source, keepdims=0) if place is None else ""
        size = largest or p.size(source, place)
        at = p("Equal", p("Mod", size, number), 0) if operator else p("Equal", size, number)
        return p("Where", at, p("Mul", x, 1.5), x)

    (output,) = (value for value in float_values(model) if value.name == "output")
    plant(model, output, wrong)
    onnx.save(model, folder / "wrong.onnx")
    report = verify(bundle, graph=folder / "wrong.onnx", runtimes=["ort-cpu"])
    return {v.case for v in report.verdicts if v.status == "failed"}


def test_positions_at_and_beside_16384_are_tried_in_one_row_and_in_one_query():
    plan = plan_of(causal=True, cache="in-place", rotary="half", position_ids=True)
    tried = [
        c.inputs["position_ids"] for c in plan.cases if (c.inputs["position_ids"] > 16382).any()
    ]
    assert [x.shape for x in tried] == [(1, 12), (12, 1)]
    assert all({2047, 2048, 4095, 4096, 8191, 8192, 8193, 16384} <= set(x.flat) for x in tried)


def test_long_pasts_that_are_left_out_are_named():
    (note,) = (n for n in plan_of(embed_dim=512, causal=True, cache="append").notes if "pasts" in n)
    assert note == (
        "no case has these queries after long pasts, which would be too large: 3 after 1040, "
        "1 after 2047, 3 after 2047 …"
    )
