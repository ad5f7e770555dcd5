"""Equal values that are ranked: the judge says ties, and still finds a wrong graph."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from made_golden import made_golden
from torch import Tensor, nn

from attn_export import Subject, build
from attn_export.commands.explain_failures import explain_failures
from attn_export.judge.judge import judge
from attn_export.parts.whole_models.model_oracle import ModelOracle
from attn_export.reference.oracle import Oracle
from attn_export.reference.ties import ORDERS, TieOrder
from attn_export.results import Case, Golden

RANKED = torch.tensor([[3.0, 1.0, 3.0, 0.0, 3.0], [0.0, 0.0, 2.0, 0.0, 0.0]])


class Ranked(nn.Module):
    def __init__(self, how: str, equal: bool) -> None:
        super().__init__()
        self.how, self.equal = how, equal

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.relu() if self.equal else x
        if self.how.endswith("topk"):
            return torch.topk(y * 1.1 if self.how.startswith("scaled") else y, 3)
        if self.how == "gathered":
            values, places = torch.topk(y, 3)
            return values, x.gather(-1, places)
        values, places = torch.sort(y, dim=-1, descending=True, stable=self.how == "stable sort")
        return values[..., :3], places[..., :3]


def subject(how: str, *, equal: bool) -> Subject:
    torch.manual_seed(0)
    return Subject(
        Ranked(how, equal).eval(), {"x": torch.randn(2, 5, 8)},
        {"x": {0: "batch", 1: "query_len"}}, ["values", "chosen"],
    )  # fmt: skip


def ranked_oracle(how: str, x: np.ndarray) -> tuple[Oracle, Case]:
    oracle = Oracle(subject(how, equal=False))
    return oracle, Case("c", "shape", {}, {"x": x.astype(np.float32)}, "")


@pytest.mark.parametrize(
    ("largest", "orders"),
    [(True, ([0, 2, 4], [4, 2, 0])), (False, ([3, 1, 0], [3, 1, 4]))],
)
def test_equal_values_are_ranked_in_the_chosen_order(largest, orders):
    for order, wanted in zip(ORDERS, orders, strict=False):
        with TieOrder(order):
            values, places = torch.topk(RANKED[0], 3, largest=largest)
            same, _ = torch.topk(RANKED, 3, dim=-1, largest=largest)
        assert places.tolist() == wanted
        assert torch.equal(values, RANKED[0][places])
        assert torch.equal(same[0], values)


X = np.random.default_rng(0).standard_normal((1, 4, 8))


@pytest.mark.parametrize(
    ("how", "gap", "tied", "uncompared"),
    [
        ("topk", 1.0, False, False),
        ("topk", 0.0, True, True),
        ("gathered", 0.0, False, False),  # equal values, equal elements
        ("stable sort", 0.0, False, False),
        ("sort", 0.0, True, False),  # as ONNX in PyTorch here, in no defined order elsewhere
        ("scaled topk", 4.8e-7, True, False),  # by one number of float32
        ("scaled topk", 1e-4, False, False),
    ],
)
def test_elements_that_ties_decide_are_known(how: str, gap: float, tied: bool, uncompared: bool):
    x = X.copy()
    x[..., 2:7] = 4 + gap * np.arange(5)
    oracle, case = ranked_oracle(how, x)
    golden = oracle.golden(case)
    assert bool(golden.tied) == tied
    assert bool(golden.uncompared) == uncompared


@pytest.mark.parametrize(
    ("got", "status", "says"),
    [
        ([5, 2, 7], "passed", ""),
        ([2, 5, 7], "unusable", "ties: 2 of 3 elements differ"),
        ([2, 5, 6], "failed", "1 of 3 elements, the first at [2]: actual 6, expected 7"),
    ],
)
def test_only_what_is_tied_may_differ(got: list[int], status: str, says: str):
    golden = dataclasses.replace(
        made_golden({"chosen": np.array([5, 2, 7])}),
        tied={"chosen": np.array([True, True, False])},
    )
    (verdict,) = judge("r", "g", golden, {"chosen": np.array(got)})
    assert verdict.status == status
    assert verdict.message.startswith(says)
    assert len(verdict.message) <= 300


@pytest.mark.parametrize(
    ("how", "equal", "says"),
    [
        ("topk", True, "the order of equal values decides chosen"),
        ("gathered", True, "the order of equal values decides chosen"),
        ("stable sort", True, ""),
        ("topk", False, ""),
    ],
)
def test_a_build_says_ties_and_passes_without(how: str, equal: bool, says: str, tmp_path):
    report = build(subject(how, equal=equal), tmp_path / "b", dialects=["standard"])
    assert report.passed == (not says)
    explanations = explain_failures(report, tmp_path / "b.failed").explanations
    assert len(explanations) == bool(says)
    assert all(said.startswith("ties: in ") and says in said for said in explanations)


class Mixture(nn.Module):
    """A token takes one of four experts by its embedding, and the next ones read what it gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.router = nn.Embedding(8, 16), nn.Linear(16, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 16))
        self.embedding.weight.data[0] = 0
        # Nearer to each other than rounding, where they are the best.
        self.router.weight.data[3] = self.router.weight.data[2] * (1 + 1e-7)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        _, chosen = self.router(x).topk(1)
        return (x + self.experts[chosen[..., 0]]).cumsum(1), x


def mixture_golden(rows: list[list[int]], name: str = "c") -> Golden:
    ids = torch.tensor(rows)
    axes = {"ids": {0: "batch", 1: "query_len"}}
    of = Subject(Mixture().eval(), {"ids": ids}, axes, ["hidden", "embedded"])
    return ModelOracle(of, 0.0).golden(Case(name, "shape", {}, {"ids": ids.numpy()}, ""))


def near_tie() -> int:
    with torch.inference_mode():
        return int((mix := Mixture()).router(mix.embedding.weight).argmax(-1).ge(2).int().argmax())


@pytest.mark.parametrize("tied", [0, near_tie()])
def test_positions_that_a_tied_choice_of_experts_decides_are_not_compared(tied: int):
    golden = mixture_golden([[1, tied, 2], [1, 1, 1]])
    assert not golden.uncompared
    assert golden.case.ignored_rows == (0,)
    assert golden.determined == {"hidden": (0,), "embedded": (0, 1, 2)}
    got = {name: array.copy() for name, array in golden.expected.items()}
    got["hidden"][0, 1:] += 1
    assert [v.status for v in judge("r", "g", golden, got)] == ["passed"] * 2
    for name, place in (("hidden", (0, 0)), ("embedded", (0, 1)), ("hidden", (1, 2))):
        wrong = {n: a.copy() for n, a in golden.expected.items()}
        wrong[name][place] += 1
        assert {v.output for v in judge("r", "g", golden, wrong) if v.status == "failed"} == {name}


def test_a_case_of_which_ties_leave_too_little_is_left_out_or_not_compared():
    for rows in ([[0, 1], [1, 1]], [[1, 0], [1, 0]]):
        left_out, base = mixture_golden(rows), mixture_golden(rows, "base")
        assert left_out.tied
        assert not left_out.uncompared
        assert base.uncompared.keys() == {"hidden"}
