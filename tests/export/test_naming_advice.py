"""Advice on axes without a name, with two names, or that are sums: what to write is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Subject, build
from attn_export.errors import ExportError
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
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, E)

    def forward(self, x: Tensor, ids: Tensor, even: bool = False) -> Tensor:
        if even and x.shape[1] % 2:
            raise ValueError("odd")
        return x + self.table(ids)


def cached(axes: dict, extra: int = 0, **options: object) -> Subject:
    inputs = {
        "x": torch.randn(2, 3, E), "past": torch.randn(2, H, 4, D),
        "mask": torch.ones(2, 1, 3, 7 + extra, dtype=torch.bool),
    }  # fmt: skip
    return Subject(Cached(extra).eval(), inputs, axes, ["y", "k"], **options)


def cross(axes: dict) -> Subject:
    inputs = {"q": torch.randn(2, 3, E), "k": torch.randn(2, 5, E), "v": torch.randn(2, 5, E)}
    return Subject(Cross().eval(), inputs, axes, ["y"])


def positions(axes: dict, **more: object) -> Subject:
    inputs = {"x": torch.randn(2, 4, E), "ids": torch.arange(8).reshape(2, 4), **more}
    return Subject(Positions().eval(), inputs, axes, ["y"])


ADVICE = {
    "a sum without its relation": (
        lambda: cached({"x": X, "past": PAST, "mask": MASK}),
        "say which axis is a sum: relations={'total_len': 'query_len + past_len'}",
    ),
    "a sum with learned keys": (
        lambda: cached({"x": X, "past": PAST, "mask": MASK}, extra=2),
        "relations={'total_len': 'query_len + past_len + 2'}",
    ),
    "a mask without names": (
        lambda: cached({"x": X, "past": PAST}),
        f"name the axes of mask that change: axes={{'mask': {MASK}}}, and say which axis is a sum: "
        "relations={'total_len': 'query_len + past_len'}",
    ),
    "a past without names": (
        lambda: cached({"x": X, "mask": MASK}),
        "axes={'past': {0: 'batch', 2: 'past_2'}}, and say which axis is a sum: "
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
    "a cause that is no name": (lambda: positions({"x": X, "ids": X}, even=True), ""),
}  # fmt: skip


@pytest.mark.parametrize(("make", "says"), ADVICE.values(), ids=ADVICE)
def test_the_names_that_make_a_module_run_at_other_sizes_are_proposed(make, says: str):
    found = naming_advice(make())
    assert says in found
    assert bool(says) == bool(found)


def test_errors_of_an_export_propose_names_in_place_of_bounds(tmp_path: Path):
    with pytest.raises(ExportError) as caught:
        build(cached({"x": X, "past": PAST, "mask": MASK}), tmp_path / "b")
    said = str(caught.value)
    assert said.endswith("relations={'total_len': 'query_len + past_len'}")
    assert "Axis(" not in said
