"""Notes on a user's module: dependent batch elements, branches for exports."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_exporting

from attn_export import Subject
from attn_export.reference.oracle import Oracle


class Does(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def notes(function: Callable[[Tensor], Tensor]) -> tuple[str, ...]:
    axes = {"x": {0: "batch", 1: "frames"}}
    subject = Subject(Does(function).eval(), {"x": torch.ones(2, 5, 4)}, axes, ["y"])
    case = next(case for case in subject.plan().cases if case.name == "base")
    fixed, *others = Oracle(subject).notes(case)
    assert fixed.startswith("fixed axes were not varied: x [batch, frames, 4]")
    return tuple(others)


@pytest.mark.parametrize(
    "mixes",
    [
        lambda x: x - x.mean(0, keepdim=True), lambda x: x + 1e-6 * x.sum(0, keepdim=True),
        lambda x: x.softmax(0), lambda x: x * x.abs().amax(), lambda x: x.roll(1, 0),
    ],
)  # fmt: skip
def test_rows_of_a_batch_that_depend_on_one_another_are_noted(mixes):
    (note,) = notes(mixes)
    assert note.startswith("rows of a batch depend on one another: y of row 0 changes with")


@pytest.mark.parametrize(
    "keeps_apart", [lambda x: x.softmax(-1), lambda x: x * x.abs().amax((1, 2), keepdim=True)]
)
def test_rows_that_do_not_are_not(keeps_apart):
    assert notes(keeps_apart) == ()


@pytest.mark.parametrize(
    ("asks", "name"),
    [
        (torch.compiler.is_exporting, "is_exporting"), (is_exporting, "is_exporting"),
        (torch.compiler.is_compiling, "is_compiling"), (torch.jit.is_tracing, "is_tracing"),
        (torch.onnx.is_in_onnx_export, "is_in_onnx_export"),
        (torch.compiler.is_dynamo_compiling, "is_dynamo_compiling"),
    ],
)  # fmt: skip
def test_a_module_that_asks_whether_it_is_exported_is_noted_with_its_line(asks, name: str):
    (note,) = notes(lambda x: x if asks() else x * 2)
    assert note.startswith(
        f"the model behaves differently under torch.export ({name}() at test_notes.py:"
    )
    assert note.endswith("; graph and reference took different branches")


def test_a_run_under_a_profiler_has_no_such_note_and_goes_on():
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        assert not notes(lambda x: x if is_exporting() else x * 2)
        assert sys.getprofile() is profiler
    finally:
        profiler.disable()
