"""Module with one attention for each of many masks that it computes itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_export.export.subject import Subject

H, D = 4, 8
TABLE = 96
LOWEST = torch.finfo(torch.float32).min

Mask = Callable[["Masks", int, int], Tensor]
"""Of the module and of L and P: the mask `[.., L, P + L]`."""


class Masks(nn.Module):
    """The same queries on a cache of its own for each mask, if there is one."""

    def __init__(self, masks: Mapping[str, Mask]) -> None:
        super().__init__()
        self.masks = masks
        self.register_buffer("seen", torch.ones(TABLE, TABLE).tril().bool())
        self.register_buffer("bias", torch.full((TABLE, TABLE), -torch.inf).triu(1))

    def forward(self, q: Tensor, past: list[Tensor] | None = None) -> list[Tensor]:
        found, new = [], q[:, :2]
        for index, make in enumerate(self.masks.values()):
            if past is None:
                k = v = new
                P = 0
            else:
                k, v = (torch.cat([x, new], dim=2) for x in past[2 * index : 2 * index + 2])
                P = past[2 * index].shape[2]
                found += [k, v]
            mask = make(self, q.shape[2], P)
            found.append(F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True))
        return found


def subject(masks: Mapping[str, Mask], *, past: bool = False) -> Subject:
    """Return a subject in which each attention is an output named after its mask."""
    random = torch.Generator().manual_seed(0)
    inputs: dict[str, object] = {"q": torch.randn(2, H, 5, D, generator=random)}
    axes = {"q": {0: "batch", 2: "query_len"}}
    if not past:
        return Subject(Masks(masks).eval(), inputs, axes, [*masks])
    inputs["past"] = [torch.randn(2, 2, 3, D, generator=random) for _ in range(2 * len(masks))]
    axes |= {f"past.{index}": {0: "batch", 2: "past_len"} for index in range(2 * len(masks))}
    outputs = [f"{part}{name}" for name in masks for part in ("key ", "value ", "")]
    relations = {"total_len": "past_len + query_len"}
    return Subject(Masks(masks).eval(), inputs, axes, outputs, relations=relations)


USUAL: dict[str, tuple[bool, Mask]] = {
    "tril of ones": (True, lambda _, L, P: torch.tril(torch.ones(L, P + L), P) == 1),
    "triu of -inf": (
        True,
        lambda _, L, P: torch.triu(torch.full((L, P + L), -torch.inf), diagonal=P + 1)[None, None],
    ),
    "arange": (
        True, lambda _, L, P: torch.arange(P + L) <= torch.arange(P, P + L)[:, None],
    ),
    "a buffer": (True, lambda m, L, P: m.seen[P : P + L, : P + L]),
    "a buffer of -inf": (True, lambda m, L, P: m.bias[None, None, P : P + L, : P + L]),
    "masked_fill": (
        True,
        lambda _, L, P: torch.zeros(L, P + L).masked_fill(
            ~torch.ones(L, P + L, dtype=torch.bool).tril(P), LOWEST
        ),
    ),
    "window": (
        False,
        lambda _, L, P: torch.ones(L, P + L, dtype=torch.bool).tril(P).triu(P - 2),
    ),
    "diagonal 1": (False, lambda _, L, P: torch.ones(L, P + L, dtype=torch.bool).tril(P + 1)),
}  # fmt: skip
"""Masks as they are usually written, and whether they are causal."""
