"""Reference of modules that use float32 internally: computed in float64, measured, noted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attn_export import Subject, build
from attn_export.reference.notes import POOR, ChangedInputs, precision
from attn_export.reference.oracle import Oracle
from attn_export.results import Case

X = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))


class FloatNorm(nn.Module):
    """The norm of most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.table = torch.linspace(-1, 1, 16)  # no buffer: stays float32 in a float64 copy

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)  # here
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        scale = torch.full((1,), 0.5, dtype=torch.float32)
        return self.weight * x.to(kind) * scale + self.table


HERE = next(
    number
    for number, line in enumerate(Path(__file__).read_text().splitlines(), start=1)
    if line.endswith("# here")
)


def subject() -> Subject:
    return Subject(FloatNorm().eval(), {"x": X}, {"x": {0: "batch", 1: "query_len"}}, ["y"])


def case() -> Case:
    return Case("base", "probe", {"batch": 2, "query_len": 3}, {"x": X.numpy()}, "")


def in_float64(x: np.ndarray) -> np.ndarray:
    weight, table = (torch.linspace(*ends, 16).double().numpy() for ends in ((0.5, 1.5), (-1, 1)))
    x = x.astype(np.float64)
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * 0.5 + table


def test_explicit_float32_is_computed_in_float64():
    found = Oracle(subject()).reference({"x": X.numpy()})["y"]
    np.testing.assert_allclose(found, in_float64(X.numpy()), rtol=1e-14, atol=1e-15)


def test_the_precision_of_the_reference_is_measured():
    oracle = Oracle(subject())
    changed = ChangedInputs.of(oracle.subject, case())
    assert precision(oracle, changed) < 1e-14
    oracle.widening = None  # as a reference without it would be
    oracle.precise.table = oracle.precise.table.double()
    assert 1e-9 < precision(oracle, changed) < 1e-6
    assert precision(oracle, changed) > POOR


def test_the_report_names_the_lines_and_the_precision(tmp_path: Path):
    assert build(subject(), tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"]).passed
    notes = json.loads((tmp_path / "b" / "report.json").read_text())["notes"]
    (note,) = (note for note in notes if "casts to float32" in note)
    assert f"casts to float32 or less at test_float64_mode.py:{HERE}, test_float64_mode.py:" in note
    assert "(effect: " in note


def test_a_module_that_asks_for_nothing_has_no_note_on_its_reference():
    linear = Subject(nn.Linear(16, 4).eval(), {"input": X}, {}, ["y"])
    given = Case("base", "probe", {}, {"input": X.numpy()}, "")
    (note,) = Oracle(linear).notes(given)
    assert note.startswith("fixed axes were not varied")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_explicit_half_precision_is_computed_in_float64(dtype: torch.dtype):
    class Rounding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(dtype).to(x.dtype) * 3

    rounding = Subject(Rounding().eval(), {"x": X}, {}, ["y"])
    np.testing.assert_array_equal(
        Oracle(rounding).reference({"x": X.numpy()})["y"], X.double().numpy() * 3
    )
