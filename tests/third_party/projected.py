"""Attention of tokens and one thing more, of which only the way to attend is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from third_party.subjects import TOKENS, D, E, H
from torch import Tensor, nn

from attn_export import Subject


def heads(x: Tensor) -> Tensor:
    """Return `[B, L, E]` as `[B, H, L, D]`."""
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


def tokens_of(x: Tensor) -> Tensor:
    """Return `[B, H, L, D]` as `[B, L, E]`."""
    return x.transpose(1, 2).flatten(2)


class Projected(nn.Module):
    """Attention of tokens that is given one thing more.

    Args:
        attended: Takes the module, the tokens `[B, L, E]` and that thing; returns `[B, L, E]`.
    """

    def __init__(self, attended: Callable[..., Any], **parameters: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))
        self.u, self.w = nn.Parameter(torch.randn(H, 1, D)), nn.Parameter(torch.randn(H, 1, D))
        self.r = nn.Linear(E, E, bias=False)
        self.attended = attended
        for name, module in parameters.items():
            self.add_module(name, module)

    def forward(self, x: Tensor, other: Any) -> Any:
        return self.attended(self, x, other)

    def project(self, x: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, `[B, H, L, D]`."""
        keys = x if keys is None else keys
        return heads(self.q(x)), heads(self.k(keys)), heads(self.v(keys))

    def output(self, x: Tensor) -> Tensor:
        found: Tensor = self.o(tokens_of(x))
        return found


def shifted(scores: Tensor, keys: int) -> Tensor:
    """Turn columns that are distances into columns that are keys, as Transformer-XL does."""
    b, h, n, m = scores.shape
    return F.pad(scores, (1, 0)).view(b, h, m + 1, n)[:, :, 1:].view(b, h, n, m)[..., :keys]


def beside(
    attended: Callable[..., Any],
    other: Any,
    axes: Mapping[str, Mapping[int, Any]],
    *relations: str,
    length: int = 5,
    outputs: tuple[str, ...] = ("output",),
    **parameters: nn.Module,
) -> Subject:
    """Return a subject of tokens and one thing more; a relation is written `"axis = text"`."""
    return Subject(
        Projected(attended, **parameters).eval(),
        {"x": torch.randn(2, length, E), "other": other},
        {"x": TOKENS, **axes},
        list(outputs),
        relations=dict(relation.split(" = ") for relation in relations),
    )
