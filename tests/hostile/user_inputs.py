"""Hostile inputs and functions of users, given to `Subject`: each is taken, or refused in one line.

`scripts/fuzz --functions` tries them, as it does orders of calls of a `DecodeSession`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from hostile.decoding import pick
from torch import Tensor, nn

from attn_export import Subject
from attn_export.errors import AttnExportError


def x() -> Tensor:
    return torch.ones(2, 5)


def endless() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


def quantised() -> Tensor:
    return torch.quantize_per_tensor(x(), 0.1, 0, torch.qint8)


def fake() -> Tensor:
    return torch._subclasses.FakeTensorMode().from_tensor(x())


RAGGED = [torch.ones(2), torch.ones(3)]
ODD: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: "a", lambda: b"a", object, lambda: 1, lambda: 1.5, lambda: [[1.0], []],
    lambda: np.array([[1], [1, 2]], object), lambda: np.array(["a"]), lambda: np.zeros(2, "M8[D]"),
    lambda: np.zeros(2, [("a", "f4")]), lambda: np.ones((2, 5), ">f4"),
    lambda: np.ones((2, 5), "longdouble"), lambda: np.ma.masked_array([1.0]),
    lambda: np.matrix([[1.0, 2.0]]), lambda: torch.ones(2, 5, device="meta"), fake, quantised,
    lambda: torch.eye(5).to_sparse(), lambda: torch.eye(5).to_sparse_csr(),
    lambda: x().to_mkldnn(), lambda: torch.nested.nested_tensor(RAGGED),
    lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged), lambda: x() + 1j,
    lambda: x().requires_grad_(), lambda: x().requires_grad_() * 2, lambda: nn.Parameter(x()),
    lambda: x().double(), lambda: x().to(torch.float8_e4m3fn), lambda: x().to(torch.uint16),
    lambda: torch.tensor(1.0), lambda: torch.ones(0, 5), lambda: torch.ones([2] * 9),
    lambda: torch.ones(1, 5).expand(2, 5), lambda: x().T.contiguous().T, lambda: x() * np.nan,
    lambda: torch.ones(4, 5), lambda: torch.ones(5), lambda: [x(), torch.ones(3)],
    lambda: {"a": x()}, lambda: {1: x()}, lambda: {"x": x(), "file": x(), "self": x()}, endless,
    lambda: functools.reduce(lambda inner, _: [inner], range(3000), x()), lambda: nn.Linear(2, 2),
    lambda: (lambda a: a), lambda: iter([x()]), lambda: torch.inference_mode()(x)(),
)  # fmt: skip
"""What is no input, or an unusual one."""

NAMES = ("file", "args", "kwds", "input", "output", "name", "shape", "module", "print", "x")
"""Names that a parameter of a function or a field may have; all are right."""


class Sum(nn.Module):
    """A module of two inputs, one of them of any name."""

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        """Add up."""
        return x + sum(others.values())


def give(number: int) -> str:
    """Make a subject with one thing wrong or unusual; return what was said of it.

    Raises:
        AssertionError: If an error is not one line.
    """
    random = np.random.default_rng(number)
    kind, odd, name = number % 4, pick(random, ODD), pick(random, NAMES[:-1])
    calls: list[int] = []

    def draw(sizes: Mapping[str, int], _: np.random.Generator) -> Any:
        calls.append(1)
        if kind == 1 and len(calls) > int(random.integers(3)):
            return odd()
        is_odd = kind == 2 or (kind == 3 and len(calls) > 1)
        right = torch.ones(sizes["n"], 5)
        return {"x": right, name: odd() if is_odd else right}

    try:
        inputs = draw if kind else {"x": x() + 1, name: odd()}
        subject = Subject(Sum().eval(), inputs, {"x": {0: "n"}, name: {0: "n"}}, ["y"])
        subject.plan()
        subject.interface()
    except AttnExportError as error:
        text = str(error)
        assert text.isprintable(), text
        assert len(text) <= 420, text
        return text
    return "taken"
