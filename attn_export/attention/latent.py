"""Queries, keys and values of multi-head latent attention (MLA; DeepSeek-AI 2024, sec. 2.1).

Legend: H heads, L new tokens, D width of a query head, R its rotated elements, N = D - R the other
elements, C width of the latent, Dv width of a value head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_export.spec import AttentionSpec


class LatentProjections(nn.Module):
    """Projections of MLA, with those from the latent absorbed into queries and outputs.

    The key of head h is ``key_up[h] @ latent`` and its value ``value_up[h] @ latent``, where the
    latent `[C]` of a token is the same for all heads. A score is therefore the product of the
    latent and ``query @ key_up[h]``, and the result of a head is ``value_up[h]`` times the weighted
    mean of latents (ibid., sec. 2.1.2). So one key/value head of width C serves all query heads,
    and the cache holds only the latent and the R rotated elements of each key.

    Attributes:
        key_up: The projection from the latent to keys, `[H, N, C]`.
        value_up: The projection from the latent to values, `[H, Dv, C]`.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        H, C, R = spec.num_heads, spec.kv_latent_dim, spec.rotary_dim
        bias = spec.bias == "all"
        if spec.q_latent_dim:
            self.q_down: nn.Linear = nn.Linear(spec.embed_dim, spec.q_latent_dim, bias=bias)
            self.q_norm: nn.RMSNorm = nn.RMSNorm(spec.q_latent_dim, eps=spec.norm_eps)
        self.q_up: nn.Linear = nn.Linear(
            spec.q_latent_dim or spec.embed_dim, H * spec.head_dim, bias=False
        )
        self.kv_down: nn.Linear = nn.Linear(spec.embed_dim, C + R, bias=bias)
        self.kv_norm: nn.RMSNorm = nn.RMSNorm(C, eps=spec.norm_eps)
        self.key_up: nn.Parameter = nn.Parameter(_uniform(H, spec.head_dim - R, C))
        self.value_up: nn.Parameter = nn.Parameter(_uniform(H, spec.v_head_dim, C))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, the elements of keys that will be rotated, and latents of `[B, L, E]`.

        Queries are `[B, H, L, R + C]`, and their first R elements will be rotated. Keys are
        `[B, 1, L, R]`, and latents `[B, 1, L, C]`.
        """
        C, R = self.spec.kv_latent_dim, self.spec.rotary_dim
        q = self.q_up(self.q_norm(self.q_down(x)) if self.spec.q_latent_dim else x)
        q = q.unflatten(-1, (self.spec.num_heads, -1)).transpose(1, 2)  # [B, H, L, D]
        plain, rotated = q.split((self.spec.head_dim - R, R), dim=-1)
        latent, k = self.kv_down(x).unsqueeze(1).split((C, R), dim=-1)
        return torch.cat([rotated, plain @ self.key_up], dim=-1), k, self.kv_norm(latent)

    def values(self, attended: Tensor) -> Tensor:
        """Project weighted means of latents `[B, H, L, C]` to outputs of heads `[B, H, L, Dv]`."""
        return attended @ self.value_up.transpose(1, 2)


def _uniform(heads: int, rows: int, columns: int) -> Tensor:
    """Return a random matrix for each head, drawn as `nn.Linear` draws its weight."""
    bound = columns**-0.5
    return torch.empty(heads, rows, columns).uniform_(-bound, bound)
