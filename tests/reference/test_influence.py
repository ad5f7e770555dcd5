"""Checks that every input changes an output, and that every output changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import small_spec
from made_golden import TOLERANCE, made_golden
from torch import Tensor, nn

from attn_export import Axis
from attn_export.cases.influence import CLEARLY as CLEARLY_MOVED
from attn_export.cases.influence import check_influence, find_influence
from attn_export.errors import ExportError
from attn_export.export.subject import Subject
from attn_export.reference.oracle import Oracle
from attn_export.results import Golden
from attn_export.schema import Tolerance

CLEARLY = 100 * TOLERANCE.whole
"""Least change of an output, relative to itself."""


def goldens(*, a: dict[str, object], b: dict[str, object], dtype: type = np.float64):
    """Return the base, with outputs of 1, and the outputs after changes of inputs a and b."""
    outputs = {"base": dict.fromkeys(a, 1), "changed_a": a, "changed_b": b}
    inputs = {"a": np.zeros(1), "b": np.zeros(1)}
    return [
        made_golden(
            {name: np.full((2, 3), value, dtype) for name, value in values.items()},
            case=case,
            inputs=inputs,
        )
        for case, values in outputs.items()
    ]


@pytest.mark.parametrize(
    ("a", "b", "dtype"),
    [
        pytest.param({"y": 2}, {"y": 3}, float, id="both inputs move the output"),
        pytest.param({"y": 2, "z": 1}, {"y": 1, "z": 2}, float, id="each moves one output"),
        pytest.param({"y": 1 + 1.01 * CLEARLY}, {"y": 2}, float, id="moved just enough"),
        pytest.param({"y": 0}, {"y": 2}, int, id="integers: any difference"),
    ],
)
def test_inputs_that_matter_pass(a, b, dtype):
    check_influence(goldens(a=a, b=b, dtype=dtype))


@pytest.mark.parametrize(
    ("a", "b", "dtype", "named"),
    [
        pytest.param({"y": 1}, {"y": 2}, float, "the input a changes no output", id="a"),
        pytest.param({"y": 2}, {"y": 1}, float, "the input b changes no output", id="b"),
        pytest.param(
            {"y": 1 + 0.99 * CLEARLY}, {"y": 2}, float, "the input a changes no output",
            id="moved too little to see a fault by",
        ),
        pytest.param({"y": 1}, {"y": 2}, int, "the input a changes no output", id="integers"),
        pytest.param(
            {"y": 2, "z": 1}, {"y": 2, "z": 1}, float, "the output z reacts to no input", id="z"
        ),
    ],
)  # fmt: skip
def test_an_idle_input_or_output_is_refused_by_name(a, b, dtype, named):
    with pytest.raises(ExportError, match=named):
        check_influence(goldens(a=a, b=b, dtype=dtype))


def test_one_row_shows_an_influence_that_a_long_past_hides_in_the_whole():
    rows = {case: np.full((9, 3), 1e6) for case in ("base", "changed_a")}
    rows["base"][8], rows["changed_a"][8] = 1, 2
    inputs = {"a": np.zeros(1)}
    check_influence([made_golden({"y": y}, case=case, inputs=inputs) for case, y in rows.items()])


def test_an_error_without_a_limit_is_said_to_be_one():
    found = goldens(a={"y": 2}, b={"y": 3})
    endless = {"y": Tolerance(np.inf, np.inf)}
    found = [dataclasses.replace(golden, tolerance=endless) for golden in found]
    with pytest.raises(ExportError, match="the tolerance for y is infinite in the case base"):
        check_influence(found)


def goldens_of(subject: Subject) -> list[Golden]:
    plan = subject.plan()
    oracle = Oracle(subject)
    return [oracle.golden(case) for case in plan.cases if case.kind == "probe"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attn_mask": "float[B,H,L,S]", "attn_weights": True},
        {"attn_mask": "bool[L,S]", "causal": False, "cache": "none"},
        {"attn_mask": "bool[B,1,1,S]", "cross": True, "causal": False, "cache": "none"},
        {"attn_mask": "none", "num_kv_heads": 1, "bias": False},
    ],
    ids=str,
)
def test_every_input_of_a_specs_module_matters(changes):
    check_influence(goldens_of(Subject.from_spec(small_spec(**changes))))


class Idle(nn.Module):
    """Module that takes a scale without a use, or returns a constant."""

    def __init__(self, uses_bias: bool, returns_constant: bool) -> None:
        super().__init__()
        self.uses_bias = uses_bias
        self.returns_constant = returns_constant

    def forward(self, x: Tensor, bias: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = x.softmax(-1) + (bias if self.uses_bias else 0 * bias)
        return (y, torch.ones_like(x)) if self.returns_constant else y


@pytest.mark.parametrize(
    ("uses_bias", "returns_constant", "named"),
    [
        (True, False, None),
        (False, False, "the input bias changes no output"),
        (True, True, "the output constant reacts to no input"),
    ],
)
def test_a_users_module_with_something_idle_is_refused(uses_bias, returns_constant, named):
    example = {"x": torch.zeros(2, 8), "bias": torch.zeros(2, 8)}
    axes = {name: {0: "batch"} for name in example}
    outputs = ["y", "constant"] if returns_constant else ["y"]
    found = goldens_of(Subject(Idle(uses_bias, returns_constant).eval(), example, axes, outputs))
    if named is None:
        check_influence(found)
        return
    with pytest.raises(ExportError, match=named):
        check_influence(found)


# -- inputs that matter at some sizes, or beside some other inputs -------------------------------


class Gated(nn.Module):
    """Module whose bias matters only where a switch is on."""

    def forward(self, x: Tensor, bias: Tensor, switch: Tensor) -> Tensor:
        return torch.where(switch, x + bias, x * 2)


class Distant(nn.Module):
    """Module whose bias matters to tokens behind the fifth."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        behind = torch.arange(x.shape[1]) >= 5
        return torch.where(behind[:, None], x + bias, x)


class Segments(nn.Module):
    """Module of packed sequences: the first and the last cut are the ends of all."""

    def forward(self, x: Tensor, cuts: Tensor) -> Tensor:
        segment = (torch.arange(x.shape[0])[:, None] >= cuts[1:]).sum(-1)
        return (segment[:, None] == segment[None]).to(x.dtype) @ x


def gated() -> Subject:
    example = {"x": torch.ones(2, 8), "bias": torch.ones(2, 8), "switch": torch.ones(1) > 0}
    axes = {"x": {0: "batch"}, "bias": {0: "batch"}}
    return Subject(Gated().eval(), example, axes, ["y"])


def distant() -> Subject:
    example = {"x": torch.ones(2, 4, 8), "bias": torch.ones(8)}
    return Subject(Distant().eval(), example, {"x": {0: "batch", 1: "query_len"}}, ["y"])


def segments() -> Subject:
    def draw(sizes, rng):
        inner = np.sort(rng.integers(0, sizes["tokens"] + 1, sizes["cuts"] - 2))
        cuts = np.concatenate([[0], inner, [sizes["tokens"]]])
        return {"x": rng.standard_normal((sizes["tokens"], 4)), "cuts": cuts.astype(np.int64)}

    axes = {"x": {0: "tokens"}, "cuts": {0: Axis("cuts", min=3, max=64)}}
    return Subject(Segments().eval(), draw, axes, ["y"])


@pytest.mark.parametrize("subject_of", [gated, distant, segments])
def test_an_input_that_matters_now_and_then_is_drawn_until_it_does(subject_of):
    subject = subject_of()
    plan, oracle = subject.plan(), Oracle(subject)
    with pytest.raises(ExportError, match="changes no output"):  # as they are drawn first
        check_influence([oracle.golden(case) for case in plan.cases if case.kind == "probe"])
    cases, known = find_influence(plan.cases, plan.interface, oracle.golden, CLEARLY_MOVED)
    check_influence(list(known.values()))
    assert [case.name for case in cases] == [case.name for case in plan.cases]
    base = next(case for case in cases if case.name == "base")
    for name in subject.inputs:
        changed = next(case for case in cases if case.name == f"changed_{name}")
        assert changed.sizes == base.sizes
        differing = [n for n, a in base.inputs.items() if not np.array_equal(a, changed.inputs[n])]
        assert differing == [name]
