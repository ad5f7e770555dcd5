"""Advice on axes without a name, with two names, or that are sums: what to write is named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Subject
from attn_export.errors import ExportError
from attn_export.export.export import export
from attn_export.export.naming_advice import naming_advice

E, H, D = 16, 2, 8
X = {0: "batch", 1: "query_len"}
PAST = {0: "batch", 2: "past_len"}
MASK = {0: "batch", 2: "query_len", 3: "total_len"}
SUM = {"total_len": "past_len + query_len"}


class Cached(nn.Module):
    """Attention to a past, with `extra` learned keys."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.proj, self.extra = nn.Linear(E, E), nn.Parameter(torch.randn(1, H, extra, D))

    def forward(self, x: Tensor, past: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        q = self.proj(x).unflatten(-1, (H, D)).transpose(1, 2)
        k = torch.cat([past, q, self.extra.expand(len(q), -1, -1, -1)], 2)
        return attend(q, k, k, attn_mask=mask).transpose(1, 2).flatten(2), k


class Cross(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q[:, None], k[:, None], v[:, None])[:, 0]


class Positions(nn.Module):
    def __init__(self, fits: Callable[[int], bool]) -> None:
        super().__init__()
        self.table, self.fits = nn.Embedding(20, E), fits

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if not self.fits(x.shape[1]):
            raise ValueError("a length that does not fit")
        return x + self.table(ids)


class Distances(nn.Module):
    """A bias for each distance, in rows of which Transformer-XL makes columns of keys."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        n = x.shape[1]
        bias = other.mT[:, torch.arange(n)[None] - torch.arange(n)[:, None] + n - 1]
        if len(other) != 2 * n - 1:
            raise ValueError(f"{len(other)} rows, not {2 * n - 1}")
        return attend(*[x.unflatten(-1, (H, D)).transpose(1, 2)] * 3, attn_mask=bias)


class Grid(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other.flatten(0, 1)


class Chunks(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return (x.view(len(x), len(other), 3, E) + other[:, None]).flatten(1, 2)


class Table(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other[: x.shape[1]]


class Square(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return attend(x, x, x, attn_mask=other)


def cached(axes: dict, extra: int = 0, **options: object) -> Subject:
    inputs = {
        "x": torch.randn(2, 3, E), "past": torch.randn(2, H, 4, D),
        "mask": torch.ones(2, 1, 3, 7 + extra, dtype=torch.bool),
    }  # fmt: skip
    return Subject(Cached(extra).eval(), inputs, axes, ["y", "k"], **options)


def cross(axes: dict) -> Subject:
    inputs = {"q": torch.randn(2, 3, E), "k": torch.randn(2, 5, E), "v": torch.randn(2, 5, E)}
    return Subject(Cross().eval(), inputs, axes, ["y"])


def positions(axes: dict, fits: Callable[[int], bool] = bool) -> Subject:
    inputs = {"x": torch.randn(2, 4, E), "ids": torch.arange(8).reshape(2, 4)}
    return Subject(Positions(fits).eval(), inputs, axes, ["y"])


def beside(module: nn.Module, x: tuple, other: tuple, axes: dict) -> Subject:
    inputs = {"x": torch.randn(2, *x), "other": torch.randn(other)}
    return Subject(module.eval(), inputs, {"x": X, "other": axes}, ["y"])


ADVICE = {
    "a sum without its relation": (
        lambda: cached({"x": X, "past": PAST, "mask": MASK}),
        "write relations={'total_len': 'query_len + past_len'}",
    ),
    "a sum with learned keys": (
        lambda: cached({"x": X, "past": PAST, "mask": MASK}, extra=2),
        "relations={'total_len': 'query_len + past_len + 2'}",
    ),
    "a mask without names": (
        lambda: cached({"x": X, "past": PAST}),
        f"name the axes of mask that change: axes={{'mask': {MASK}}}, and write "
        "relations={'total_len': 'query_len + past_len'}",
    ),
    "a past without names": (
        lambda: cached({"x": X, "mask": MASK}),
        "axes={'past': {0: 'batch', 2: 'past_2'}}, and write "
        "relations={'total_len': 'query_len + past_2'}",
    ),
    "one axis without a name": (
        lambda: cached({"x": X, "past": {2: "past_len"}, "mask": MASK}, relations=SUM),
        f"name the axes of past that change: axes={{'past': {PAST}}}",
    ),
    "two names of one size": (
        lambda: cross({"q": X, "k": {0: "batch", 1: "keys"}, "v": {0: "batch", 1: "values"}}),
        "give the equal axes 'keys' and 'values' one name",
    ),
    "integers without names": (
        lambda: positions({"x": X}), f"name the axes of ids that change: axes={{'ids': {X}}}",
    ),
    "all axes right": (lambda: positions({"x": X, "ids": X}), ""),
    "a multiple": (
        lambda: positions({"x": X, "ids": X}, fits=lambda n: n % 4 == 0),
        "write Axis('query_len', multiple_of=4) for the name of that axis",
    ),
    "squares": (
        lambda: positions({"x": X, "ids": X}, fits=lambda n: math.isqrt(n) ** 2 == n),
        "write Axis('query_len', sizes=(4, 9, 16, 25, 36)) for the name of that axis",
    ),
    "a largest size": (lambda: positions({"x": X, "ids": X}, fits=lambda n: n < 9), ""),
    "a cause that is no size": (
        lambda: positions({"x": X, "ids": X}, fits=lambda n: n in (4, 5)), "",
    ),
    "rows of distances": (
        lambda: beside(Distances(), (5, E), (9, H), {0: "rows"}),
        "write relations={'rows': '2*query_len - 1'}",
    ),
    "rows of distances without a name": (
        lambda: beside(Distances(), (5, E), (9, H), {}),
        "axes={'other': {0: 'other_0'}}, and write relations={'other_0': '2*query_len - 1'}",
    ),
    "a grid": (
        lambda: beside(Grid(), (6, E), (3, 2, E), {0: "height", 1: "width"}),
        "write relations={'query_len': 'height*width'}",
    ),
    "a grid without names": (
        lambda: beside(Grid(), (6, E), (3, 2, E), {}),
        "axes={'other': {0: 'other_0', 1: 'other_1'}}, and write "
        "relations={'query_len': 'other_0*other_1'}",
    ),
    "chunks": (
        lambda: beside(Chunks(), (6, E), (2, E), {0: "chunks"}),
        "write relations={'query_len': '3*chunks'}",
    ),
    "a table that is longer": (
        lambda: beside(Table(), (6, E), (16, E), {0: "most"}),
        "write relations={'most': '>= query_len'}",
    ),
    "a square mask without names": (
        lambda: beside(Square(), (6, E), (1, 6, 6), {}),
        "axes={'other': {1: 'query_len', 2: 'query_len'}}",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "says"), ADVICE.values(), ids=ADVICE)
def test_the_names_that_make_a_module_run_at_other_sizes_are_proposed(make, says: str):
    found = naming_advice(make())
    assert says in found
    assert bool(says) == bool(found)


def test_errors_of_an_export_propose_names_in_place_of_bounds():
    with pytest.raises(ExportError) as caught:
        export(cached({"x": X, "past": PAST, "mask": MASK}))
    said = str(caught.value)
    assert said.endswith("relations={'total_len': 'query_len + past_len'}")
    assert "Axis(" not in said
