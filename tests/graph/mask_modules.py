"""Modules of users that compute their mask themselves, and what their masks are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_export.subject import Subject

H, D = 4, 8
E = H * D
LONGEST = 96
LOWEST = torch.finfo(torch.float32).min

Mask = Callable[[Tensor, int, int], Tensor | None]
"""Of the input `[B, L, E]` and the sizes L and P: the mask `[.., L, P + L]`."""


class Computed(nn.Module):
    """Self-attention with a cache that is concatenated, if there is one, under a mask of its own.

    Args:
        mask: Makes the mask.
        causal: What SDPA is told.
    """

    def __init__(self, mask: Mask, *, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.mask, self.causal = mask, causal
        self.register_buffer("seen", torch.ones(LONGEST, LONGEST).tril().bool())
        self.register_buffer("bias", torch.full((LONGEST, LONGEST), -torch.inf).triu(1))

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        P = 0
        if past_key is not None and past_value is not None:
            P = past_key.shape[2]
            k, v = torch.cat([past_key, k], dim=2), torch.cat([past_value, v], dim=2)
        mask = self.mask(self if padding is None else padding, x.shape[1], P)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        y = self.out(y.transpose(1, 2).flatten(2))
        return y if past_key is None else (y, k, v)


def subject(mask: Mask, *, past: bool = False, padding: bool = False, causal: bool = False) -> Subject:
    torch.manual_seed(0)
    B, L, P = 2, 5, 3
    inputs = {"x": torch.randn(B, L, E)}
    axes = {"x": {0: "batch", 1: "query_len"}}
    if padding:
        inputs["padding"] = torch.ones(B, 1, 1, P + L if past else L, dtype=torch.bool)
        axes["padding"] = {0: "batch", 3: "total_len" if past else "query_len"}
    if past:
        inputs |= {name: torch.randn(B, H, P, D) for name in ("past_key", "past_value")}
        axes |= dict.fromkeys(("past_key", "past_value"), {0: "batch", 2: "past_len"})
    outputs = ["y", *(["present_key", "present_value"] if past else [])]
    relations = {"total_len": "past_len + query_len"} if past else {}
    module = Computed(mask, causal=causal).eval()
    return Subject(module, inputs, axes, outputs, relations=relations)
