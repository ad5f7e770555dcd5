"""Large weights in the oracle: shared with the module, and the numbers of a float64 copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small_spec
from torch import Tensor, nn

from attn_export import Subject
from attn_export.reference import float64_mode
from attn_export.reference.oracle import Oracle
from attn_export.results import Golden

WHOLE_COPY = math.inf
X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """Weights that are read in other ways than by `Linear`, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(16, 24)
        self.second = nn.Linear(16, 24)
        self.second.weight = self.first.weight
        self.direct = nn.Parameter(torch.randn(24, 16))
        self.register_buffer("table", torch.randn(3, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) @ self.direct + self.second(x)[..., :16]
        x = x + torch.einsum("ble,hdf->blf", x, self.table) / 100
        return x.to(self.direct.dtype) + (self.direct[:16] @ x[0, :1].T).T


def ours(**changes: object) -> Subject:
    return Subject.from_spec(small_spec(**changes))


def theirs() -> Subject:
    return Subject(Tied().eval(), {"x": X}, {"x": {0: "batch", 1: "query_len"}}, ["y"])


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "ours": ours,
    "ours, float16": lambda: ours(dtype="float16"),
    "ours, bfloat16": lambda: ours(dtype="bfloat16"),
    "theirs": theirs,
    # nn.MultiheadAttention has another path for weights of another type than its input.
    "looks at types": lambda: Subject(
        Joined().eval(), {"x": X}, {"x": {0: "batch", 1: "query_len"}}, ["y"]
    ),
}

COPIED = [name for name in SUBJECTS if name != "looks at types"]


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.fixture
def in_blocks(monkeypatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """Call a function twice: with a float64 copy, and with products of 3 to 6 columns."""

    def call(function: Callable[[], Any]) -> tuple[Any, Any]:
        monkeypatch.setattr(float64_mode, "LARGE", WHOLE_COPY)
        whole = function()
        monkeypatch.setattr(float64_mode, "LARGE", 64)
        monkeypatch.setattr(float64_mode, "WHOLE", 100)
        return whole, function()

    return call


def goldens(subject: Subject) -> list[Golden]:
    oracle = Oracle(subject)
    return [oracle.golden(case) for case in subject.plan().cases[:6]]


def references(subject: Subject) -> list[dict[str, np.ndarray]]:
    oracle = Oracle(subject)
    return [oracle.reference(case.inputs) for case in subject.plan().cases[:6]]


@pytest.mark.parametrize("name", COPIED)
def test_the_numbers_are_those_of_a_float64_copy_bit_by_bit(name, monkeypatch):
    subject = SUBJECTS[name]()
    monkeypatch.setattr(float64_mode, "LARGE", WHOLE_COPY)
    wanted, exact = goldens(subject), references(subject)
    monkeypatch.setattr(float64_mode, "LARGE", 64)
    for one, other in zip(references(subject), exact, strict=True):
        for output, array in other.items():
            np.testing.assert_array_equal(one[output], array)
            assert one[output].dtype == array.dtype
    for one, other in zip(goldens(subject), wanted, strict=True):
        assert one.tolerance == other.tolerance
        assert one.uncompared == other.uncompared


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_reference_by_blocks_of_columns_differs_by_rounding_only(name, in_blocks):
    whole, blocks = in_blocks(lambda: references(SUBJECTS[name]()))
    for one, other in zip(blocks, whole, strict=True):
        for output, array in other.items():
            np.testing.assert_allclose(one[output], array, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", COPIED)
def test_the_tolerance_by_blocks_of_columns_is_that_of_a_float64_copy(name, in_blocks):
    whole, blocks = in_blocks(lambda: goldens(SUBJECTS[name]()))
    for one, other in zip(blocks, whole, strict=True):
        for output, tolerance in other.tolerance.items():
            found = one.tolerance[output]
            assert (found is None) == (tolerance is None)
            if found is not None and tolerance is not None:
                assert found.whole == pytest.approx(tolerance.whole, rel=1e-6)
                assert found.row == pytest.approx(tolerance.row, rel=1e-6)


def test_large_weights_are_shared_and_the_module_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(float64_mode, "LARGE", 200)
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    copied = dict(float64_mode.widened_copy(module).state_dict())
    for name, tensor in module.state_dict().items():
        shared = copied[name].data_ptr() == tensor.data_ptr()
        assert shared == (tensor.numel() > 200), name
        assert copied[name].dtype == (torch.float32 if shared else torch.float64)
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert copied["first.weight"].data_ptr() == copied["second.weight"].data_ptr()


def test_no_more_than_one_block_is_widened_at_once(monkeypatch):
    monkeypatch.setattr(float64_mode, "WHOLE", 1000)
    a, b = torch.ones(2, 100, dtype=torch.float64), torch.ones(100, 35)
    seen: list[int] = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        seen.append(b.numel())
        return a @ b

    found = float64_mode._product(multiply, (a, b), {})
    assert seen == [1000, 1000, 1000, 500]
    torch.testing.assert_close(found, a @ b.double(), rtol=0, atol=0)
