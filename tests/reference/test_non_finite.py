"""NaN and infinities in inputs: where they determine outputs, these are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from made_golden import made_golden
from torch import nn

from attn_export import Subject
from attn_export.bundle.golden import read_golden, write_index, write_inputs, write_outputs
from attn_export.judge.judge import judge, undetermined_note
from attn_export.reference.non_finite import determined_rows
from attn_export.reference.oracle import Oracle
from attn_export.results import Case, Golden

ROWS = (1, 2)
L, E = 3, 4


class Module(nn.Module):
    """A module of a user, whose attention is a function of the query, which is key and value."""

    def __init__(self, attend: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.attend = nn.Linear(E, E), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(self.linear(x))


def golden_of(attend: Callable[[torch.Tensor], torch.Tensor]) -> Golden:
    """Return a case with NaN in all of batch element 1, and in the last token of 2."""
    axes = {"x": {0: "batch", 1: "tokens"}}
    subject = Subject(Module(attend).eval(), {"x": torch.randn(2, L, E)}, axes, ["y"])
    x = np.random.default_rng(0).standard_normal((4, L, E)).astype(np.float32)
    x[1], x[2, -1, 0] = np.nan, np.nan
    case = Case("nan", "probe", {"batch": 4, "tokens": L}, {"x": x}, "", ignored_rows=ROWS)
    return Oracle(subject).golden(case)


def by_hand(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    scores = x @ x.transpose(1, 2)
    return (scores if mask is None else scores + mask).softmax(-1) @ x


def causal(x: torch.Tensor) -> torch.Tensor:
    return by_hand(x, torch.full((L, L), -torch.inf).triu(1))


def zero_of_nan_queries(x: torch.Tensor) -> torch.Tensor:
    """Return 0 for queries of NaN in float32 only, as a kernel of PyTorch on the CPU may."""
    y = by_hand(x)
    return y if x.dtype == torch.float64 else y.masked_fill(x.isnan(), 0.0)


ALL = tuple(range(L, 3 * L))


@pytest.mark.parametrize(
    ("attend", "determined"),
    [
        (by_hand, ALL),
        (causal, (*ALL[:L], 3 * L - 1)),  # 0 · NaN may be NaN or 0
        (lambda x: by_hand(x).nan_to_num(), ()),  # a mask may let them through
        (zero_of_nan_queries, tuple(range(2 * L, 3 * L - 1))),
        # The largest of several elements is not defined if one is NaN.
        (lambda x: by_hand(x) - x.amax(-1, keepdim=True), ()),
        (lambda x: by_hand(x) + x.argmax(-1, keepdim=True), ()),
    ],
    ids=["by hand", "causal", "finite", "kernel", "largest", "index of the largest"],
)  # fmt: skip
def test_rows_are_compared_where_nan_determines_them(attend, determined: tuple[int, ...]):
    golden = golden_of(attend)
    assert golden.determined.get("y", ()) == determined
    has_nan = np.isnan(golden.expected["y"]).any()
    assert bool(undetermined_note([golden])) == (has_nan and determined != ALL)


def test_infinities_have_a_sign_and_vanishing_weights_determine_nothing():
    x = np.zeros((3, 1, 2), np.float32)
    x[1, 0, 0], x[2, 0, 0] = np.inf, np.inf
    case = Case("inf", "probe", {}, {"x": x}, "", ignored_rows=(1, 2))
    reference = {"y": np.where(np.isinf(x), x, 1.0)}
    other = {"y": np.where(np.isinf(x), [[[1.0]], [[1.0]], [[-1.0]]] * x, 1.0)}
    assert determined_rows(case, (reference, other), lambda inputs: {"y": inputs["x"] + 1.0}) == {
        "y": (1,)
    }
    tiny = determined_rows(
        case, (reference, reference), lambda inputs: {"y": inputs["x"] * 1e-9 + 1.0}
    )
    assert tiny == {}


def test_a_determined_row_must_be_nan_and_another_may_be_anything():
    reference = np.ones((2, 3, 2), np.float32)
    reference[1, :, 0] = np.nan
    golden = made_golden({"y": reference})
    case = dataclasses.replace(golden.case, ignored_rows=(1,))
    golden = dataclasses.replace(golden, case=case, determined={"y": (3, 5)})
    for row, status in ((0, "failed"), (1, "passed"), (2, "failed")):
        got = reference.copy()
        got[1, row, 0] = 0.0
        (verdict,) = judge("r", "g", golden, {"y": got})
        assert verdict.status == status
    assert undetermined_note([golden])[1].endswith("that are not compared: y[1] in base")


def test_an_output_without_elements_ignores_no_rows(tmp_path):
    """A merged decoder gives no keys of the encoder after the first run."""
    golden = made_golden({"y": np.ones((2, 3), np.float32), "z": np.ones((0, 3), np.float32)})
    golden = dataclasses.replace(golden, case=dataclasses.replace(golden.case, ignored_rows=(1,)))
    write_inputs(tmp_path, 0, golden.case)
    write_outputs(tmp_path, 0, golden)
    write_index(tmp_path, [golden])
    (read,) = read_golden(tmp_path)
    assert {v.status for v in judge("r", "g", read, read.expected)} == {"passed"}
    assert undetermined_note([read]) == ()


def test_determined_rows_are_stored_and_must_be_ignored_ones(tmp_path):
    golden = golden_of(by_hand)
    write_inputs(tmp_path, 0, golden.case)
    write_outputs(tmp_path, 0, golden)
    write_index(tmp_path, [golden])
    assert read_golden(tmp_path)[0].determined == {"y": ALL}
    for rows in ((0,), (3 * L,), (10**6,)):
        write_index(tmp_path, [dataclasses.replace(golden, determined={"y": rows})])
        with pytest.raises(Exception, match="compares rows of y that it does not ignore"):
            read_golden(tmp_path)
