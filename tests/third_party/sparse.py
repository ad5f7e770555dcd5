"""Sparse, low-rank and other approximations of attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from third_party.by_hand import Heads, Own, plain
from third_party.subjects import D, E, H, Table, bounded, tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Axis


class With(nn.Module):
    """Self-attention with parameters of its own.

    Args:
        attended: Takes the module, queries, keys and values, `[B, H, L, D]`.
    """

    def __init__(self, attended: Heads, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = Own(attended)
        for index, shape in enumerate(shapes):
            self.inner.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def cope(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Count positions by gates, as CoPE does, and interpolate between their embeddings."""
    n = q.shape[2]
    scores = q @ k.mT * D**-0.5
    scores = scores + torch.full((n, n), -torch.inf).triu(1)
    gates = torch.sigmoid(scores)
    at = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=m.p0.shape[1] - 1)
    above, below = at.ceil().long(), at.floor().long()
    logits = q @ m.p0
    upper, lower = logits.gather(-1, above), logits.gather(-1, below)
    part = at - below
    return (scores + upper * part + lower * (1 - part)).softmax(-1) @ v


def performer(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Approximate softmax by positive random features."""

    def features(t: Tensor, each: bool) -> Tensor:
        t = t * D**-0.25
        found = t @ m.p0
        norm = (t**2).sum(-1, keepdim=True) / 2
        most = found.amax(-1, keepdim=True) if each else found.amax((-1, -2), keepdim=True)
        return m.p0.shape[1] ** -0.5 * (torch.exp(found - norm - most) + 1e-4)

    q, k = features(q, True), features(k, False)
    scale = 1 / torch.einsum("bhlm,bhm->bhl", q, k.sum(2))
    return torch.einsum("bhlm,bhmd,bhl->bhld", q, torch.einsum("bhsm,bhsd->bhmd", k, v), scale)


def performer_causal(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (F.relu(t @ m.p0) + 1e-3 for t in (q, k))
    context = torch.einsum("bhsm,bhsd->bhsmd", k, v).cumsum(2)
    scale = (q * k.cumsum(2)).sum(-1, keepdim=True)
    return torch.einsum("bhlm,bhlmd->bhld", q, context) / scale


def nystrom(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by 4 landmarks, with an iterative inverse."""
    b, h, n, d = q.shape
    q, k = q * d**-0.25, k * d**-0.25
    a, c = (t.reshape(b, h, 4, n // 4, d).mean(-2) for t in (q, k))
    first, middle, last = (
        F.softmax(left @ right.mT, -1) for left, right in ((q, c), (a, c), (a, k))
    )
    one = torch.eye(4)
    inverse = middle.mT / (middle.sum(-2).amax(-1)[..., None, None] * middle.sum(-1).max())
    for _step in range(6):
        x = middle @ inverse
        inverse = 0.25 * inverse @ (13 * one - x @ (15 * one - x @ (7 * one - x)))
    return (first @ inverse) @ (last @ v)


def linformer(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Project keys and values of up to 32 tokens to 6."""
    n = q.shape[2]
    k, v = (torch.einsum("bhnd,nk->bhkd", t, p[:n]) for t, p in ((k, m.p0), (v, m.p1)))
    return attend(q, k, v)


def longformer(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to 4 tokens at each side, in overlapping chunks of padded tokens."""
    n, w = q.shape[2], 4
    pad = -n % w
    q, k, v = (F.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
    k, v = (F.pad(t, (0, 0, w, w)).unfold(2, 3 * w, w).mT for t in (k, v))
    q = q.unflatten(2, (-1, w))
    chunk = torch.arange(q.shape[2])[:, None, None] * w
    i, j = torch.arange(w)[None, :, None] + chunk, torch.arange(3 * w)[None, None] - w + chunk
    seen = ((i - j).abs() <= w) & (j >= 0) & (j < n)
    scores = (q @ k.mT * D**-0.5).masked_fill(~seen, -1e9)
    return (scores.softmax(-1) @ v).flatten(2, 3)[:, :, :n]


def longformer_strided(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cut chunks of 8, which overlap by half, by `as_strided`."""
    b, h, n, d = q.shape

    def chunks(t: Tensor) -> Tensor:
        t = t.contiguous().view(b * h, n // 8, 8, d)
        size, stride = list(t.shape), list(t.stride())
        size[1], stride[1] = size[1] * 2 - 1, stride[1] // 2
        return t.as_strided(size, stride)

    q, k, v = chunks(q), chunks(k), chunks(v)
    return (
        (q @ k.mT * D**-0.5).softmax(-1).matmul(v).mean(1).view(b, h, 8, d).repeat(1, 1, n // 8, 1)
    )


def reformer(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sort tokens by the bucket of a hash; attend within chunks of 4 of them."""
    b, h, n, d = q.shape
    rotated = q @ m.p0
    buckets = torch.cat([rotated, -rotated], -1).argmax(-1)
    order = (buckets * n + torch.arange(n)).argsort(-1)
    back = order.argsort(-1)[..., None].expand(-1, -1, -1, d)
    order = order[..., None].expand(-1, -1, -1, d)
    q, v = (t.gather(2, order).view(b, h, n // 4, 4, d) for t in (q, v))
    return attend(q, F.normalize(q, dim=-1), v).flatten(2, 3).gather(2, back)


def sinkhorn(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Normalise rows and columns of the scores in turn."""
    scores = q @ k.mT * D**-0.5
    for _step in range(3):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp() @ v


def best_four(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Hide all keys but the best four of each query."""
    scores = q @ k.mT * D**-0.5
    least = scores.topk(4, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ v


def sparsemax(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5
    scores = scores - scores.amax(-1, keepdim=True)
    ordered = scores.sort(-1, descending=True).values
    total, at = ordered.cumsum(-1) - 1, torch.arange(1, k.shape[2] + 1)
    count = (at * ordered > total).sum(-1, keepdim=True)
    return (scores - total.gather(-1, count - 1) / count).clamp(min=0) @ v


def synthesizer(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights are learned, whatever the tokens are."""
    n = q.shape[2]
    return m.p0[:, :n, :n].softmax(-1) @ v


def induced(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by way of 3 learned points, as the set transformer does."""
    points = m.p0.expand(q.shape[0], -1, -1, -1)
    seen = attend(points, k, v)
    return attend(q, seen, seen)


def padded_bias(_: Own, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with a mask whose memory is padded to a multiple of 8, as xFormers wants it."""
    n = q.shape[2]
    memory = torch.zeros(1, H, n, (n + 7) // 8 * 8)
    bias = memory[..., :n]
    bias.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    return attend(q, k, v, attn_mask=bias.expand(q.shape[0], -1, -1, -1))


class Routed(nn.Module):
    """Each token goes to one of three value projections, by the largest of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(E, 3), nn.ModuleList(nn.Linear(E, E) for _ in range(3))
        self.attention = Own(plain)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.route(x).softmax(-1)
        best = F.one_hot(weights.argmax(-1), 3) * weights
        values = sum(expert(x) * best[..., i, None] for i, expert in enumerate(self.experts))
        found: Tensor = self.attention(values)
        return found


def by_distance(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add the product of a query and the embedding of the distance, by a `score_mod`."""

    def relative(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + q[b, h, i] @ m.p0[i - j + 31] * D**-0.5

    return flex_attention(q, k, v, score_mod=relative)


def nearby(attended: Heads, *shapes: tuple[int, ...], axis: Any = "query_len", length: int = 5):
    return partial(lambda: tokens(With(attended, *shapes), axis=axis, length=length))


FOURS = Axis("query_len", multiple_of=4)
MODULES: Table = {
    "CoPE": nearby(cope, (D, 8)),
    "Performer": nearby(performer, (D, 16)),
    "Performer, causal": nearby(performer_causal, (D, 16)),
    "Nystrom": nearby(nystrom, axis=FOURS, length=8),
    "Linformer": nearby(linformer, (32, 6), (32, 6), axis=bounded(1, 32)),
    "Longformer": nearby(longformer, length=9),
    "Longformer, strided": nearby(
        longformer_strided, axis=Axis("query_len", multiple_of=8), length=16
    ),
    "Reformer": nearby(reformer, (D, 2), axis=FOURS, length=8),
    "Sinkhorn": nearby(sinkhorn),
    "best four": nearby(best_four, axis=bounded(4)),
    "sparsemax": nearby(sparsemax),
    "Synthesizer": nearby(synthesizer, (H, 32, 32), axis=bounded(1, 32)),
    "induced points": nearby(induced, (1, H, 3, D)),
    "padded memory": nearby(padded_bias),
    "routed": lambda: tokens(Routed()),
    "products with distances": nearby(by_distance, (63, D), axis=bounded(1, 32)),
}
