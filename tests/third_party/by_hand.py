"""Attention as people write it in their own files."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from third_party.subjects import D, E, H, Table, bounded, tokens
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

Heads = Callable[["Own", Tensor, Tensor, Tensor], Tensor]


class Own(nn.Module):
    """Self-attention with a way of its own to attend.

    Args:
        attended: Takes the module, queries `[B, H, L, D]`, keys and values `[B, kv_heads, L, D]`.
        kv_heads: The number of heads of keys and values.
    """

    def __init__(self, attended: Heads, kv_heads: int = H) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(E, E), nn.Linear(E, 2 * kv_heads * D)
        self.o, self.table = nn.Linear(E, E), nn.Embedding(32, H)
        self.sinks = nn.Parameter(torch.randn(H))
        self.norm = nn.RMSNorm(D)
        self.attended, self.kv_heads = attended, kv_heads
        angles = torch.outer(torch.arange(512.0), 10000 ** -(torch.arange(0, D, 2) / D))
        self.register_buffer("complex", torch.polar(torch.ones_like(angles), angles), False)
        self.register_buffer("causal", torch.ones(512, 512).tril().view(1, 1, 512, 512))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (self.q(x), k, v))
        found: Tensor = self.o(self.attended(self, q, k, v).transpose(1, 2).flatten(2))
        return found


def lower(q: Tensor) -> Tensor:
    """Return which keys queries `[..., L, D]` may see: bool `[L, L]`."""
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()


def plain(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1) @ v


def scaled_queries(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q * D**-0.5) @ k.mT, dim=-1) @ v


def both_scaled(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * D**-0.25) @ (k * D**-0.25).mT).softmax(-1) @ v


def einsum(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhld,bhsd->bhls", q, k) * D**-0.5
    scores = scores.masked_fill(~lower(q), -torch.inf)
    return torch.einsum("bhls,bhsd->bhld", scores.float().softmax(-1).to(q.dtype), v)


def einsum_tokens_first(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = torch.einsum("blhd,bshd->bhls", q, k).div(D**0.5).softmax(-1)
    return torch.einsum("bhls,bshd->blhd", weights, v).transpose(1, 2)


def batched(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = q.shape[0]
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    zeros = torch.zeros(q.shape[0], q.shape[1], k.shape[1])
    weights = torch.baddbmm(zeros, q, k.mT, beta=0, alpha=D**-0.5).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (count, H))


def triangle(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((q.shape[2], q.shape[2]), -torch.inf).triu(1)
    return (q @ k.mT * D**-0.5 + mask).softmax(-1) @ v


def smallest_number(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.where(lower(q), 0.0, torch.finfo(q.dtype).min)
    return attend(q, k, v, attn_mask=mask)


def buffered_triangle(m: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    scores = (q @ k.mT) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(m.causal[:, :, :n, :n] == 0, float("-inf"))
    return F.softmax(scores, dim=-1) @ v


def compared_positions(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    scores = torch.where(i[None] <= i[:, None], q @ k.mT * D**-0.5, -1e9)
    return scores.softmax(-1) @ v


def window(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    distance = i[:, None] - i[None]
    return attend(q, k, v, attn_mask=(distance >= 0) & (distance < 4))


def shared_by_repeat(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


def shared_by_expand(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, n, d = k.shape
    k, v = (t[:, :, None].expand(b, h, 2, n, d).reshape(b, 2 * h, n, d) for t in (k, v))
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


def shared_by_groups(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (2, 2))
    weights = (q @ k[:, :, None].mT * D**-0.5).softmax(-1)
    return (weights @ v[:, :, None]).flatten(1, 2)


def one_head(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


def capped(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 20 * torch.tanh(q @ k.mT * D**-0.5 / 20)
    return scores.masked_fill(~lower(q), -torch.inf).softmax(-1) @ v


def learned_bias(m: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    bias = m.table((i[None] - i[:, None]).clamp(-16, 15) + 16).permute(2, 0, 1)
    return (q @ k.mT + bias).softmax(-1) @ v


def slopes(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    slope = 2.0 ** -torch.arange(1, H + 1)
    bias = (i[None] - i[:, None])[None] * slope[:, None, None]
    scores = q @ k.mT * D**-0.5 + bias
    return scores.masked_fill(~lower(q), -torch.inf).softmax(-1) @ v


def sinks(m: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5
    sink = m.sinks.view(1, H, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return weights @ v


def quiet(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    exponentials = (q @ k.mT * D**-0.5).exp()
    return (exponentials / (1 + exponentials.sum(-1, keepdim=True))) @ v


def by_exponentials(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True) @ v


def normed(m: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(m.norm(q), m.norm(k), v, is_causal=True)


def cosine(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10).softmax(-1) @ v


def turned(q: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(3).type_as(q)


def complex_rotary(m: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = m.complex[: q.shape[2]]
    return attend(turned(q, table), turned(k, table), v, is_causal=True)


def polar_within(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    inverse = 1.0 / 10000 ** (torch.arange(0, D, 2).float() / D)
    angles = torch.outer(torch.arange(q.shape[2]), inverse)
    table = torch.polar(torch.ones_like(angles), angles)[None, None]
    return attend(turned(q, table), turned(k, table), v, is_causal=True)


def halves(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    inverse = 1.0 / 10000 ** (torch.arange(0, D, 2).float() / D)
    angles = torch.outer(torch.arange(q.shape[2]).float(), inverse).repeat(1, 2)

    def turn(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return t * angles.cos() + torch.cat((-b, a), -1) * angles.sin()

    return attend(turn(q), turn(k), v, is_causal=True)


def best_two(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * D**-0.5).softmax(-1)
    most, where = weights.topk(2, dim=-1)
    return torch.zeros_like(weights).scatter(-1, where, most) @ v


def linear(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)


def sigmoid(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT * D**-0.5 - 2) @ v


def channels(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v @ ((q.mT @ k) * 0.1).softmax(-1)


def talking(m: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5
    mixed = torch.einsum("bhls,hg->bgls", scores, m.table.weight[:H])
    return mixed.softmax(-1) @ v


def dropped(m: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.dropout(plain_weights(q, k), 0.1, m.training)
    return weights @ v


def plain_weights(q: Tensor, k: Tensor) -> Tensor:
    return F.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D), -1, dtype=torch.float32)


def flat_heads(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b = q.shape[0]
    q, k, v = (t.reshape(-1, t.shape[2], D) for t in (q, k, v))
    return attend(q, k, v, is_causal=True).view(b, H, -1, D)


def precise(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return attend(q.float(), k.float(), v.float()).type_as(q)


def own(attended: Heads, kv_heads: int = H):
    return partial(lambda f, n: tokens(Own(f, n)), attended, kv_heads)


MODULES: Table = {
    function.__name__.replace("_", " "): own(function)
    for function in (
        plain, scaled_queries, both_scaled, einsum, einsum_tokens_first, batched, triangle,
        smallest_number, compared_positions, window, capped, learned_bias, slopes, sinks, quiet,
        by_exponentials, normed, cosine, polar_within, halves, linear, sigmoid, channels, talking,
        dropped, flat_heads, precise,
    )
} | {
    "shared by repeat": own(shared_by_repeat, 2),
    "shared by expand": own(shared_by_expand, 2),
    "shared by groups": own(shared_by_groups, 2),
    "one head": own(one_head, 1),
    "best two": lambda: tokens(Own(best_two), axis=bounded(2)),
    "buffered triangle": lambda: tokens(Own(buffered_triangle), axis=bounded(1, 512)),
    "complex rotary": lambda: tokens(Own(complex_rotary), axis=bounded(1, 512)),
}  # fmt: skip
