"""Every way to call `F.scaled_dot_product_attention` becomes one correct `Attention` node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agreement import operators, right_graphs
from shared import extended
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from attn_export import Subject

Axes = dict[int, str]
TOKENS: Axes = {0: "batch", 1: "query_len"}


def heads(x: Tensor, count: int = 4) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def square_mask(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


FORMS: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], tuple[int, ...], Axes]] = {
    "[B, L, D]": (lambda f, x: F.scaled_dot_product_attention(f(x), x, x), (2, 5, 8), TOKENS),
    "[B·H, L, D] with a mask for each": (
        lambda f, x: F.scaled_dot_product_attention(
            *(heads(t).flatten(0, 1) for t in (f(x), x, x)),
            heads(x).flatten(0, 1) @ heads(x).flatten(0, 1).mT,
        ).unflatten(0, (-1, 4)).sum(1),
        (2, 5, 8), TOKENS,
    ),
    "[B, N, H, L, D] with a mask": (
        lambda f, x: F.scaled_dot_product_attention(
            *(torch.stack([heads(t), 2 * heads(t)], 1) for t in (f(x), x, x)), square_mask(x)
        ),
        (2, 5, 8), TOKENS,
    ),
    "enable_gqa with shared heads": (
        lambda f, x: F.scaled_dot_product_attention(
            heads(f(x)), heads(x)[:, 1:3], heads(x)[:, 1:3], enable_gqa=True
        ),
        (2, 5, 8), TOKENS,
    ),
    "a mask of torch.nn.attention.bias": (
        lambda f, x: F.scaled_dot_product_attention(
            heads(f(x)), *[torch.cat([heads(x)] * 2, 2)] * 2,
            attn_mask=causal_lower_right(x.shape[1], 2 * x.shape[1]),
        ),
        (2, 5, 8), TOKENS,
    ),
}  # fmt: skip


class Calls(nn.Module):
    def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


@pytest.mark.parametrize("name", extended(FORMS, lambda name: name in [*FORMS][::2]))
def test_a_form_is_one_node_and_passes(name: str):
    function, shape, axes = FORMS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    subject = Subject(Calls(function).eval(), {"x": x}, {"x": axes}, ["y"])
    nodes = operators(right_graphs(subject)["model.onnx"])
    assert nodes.count("Attention") == 1
    assert "Softmax" not in nodes
