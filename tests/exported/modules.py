"""Attention as people write it, in modules of 16 or 32 channels, for exporters of several kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

E, H, D = 16, 2, 8
Inputs = Mapping[str, Tensor]
Attend = Callable[..., Tensor]

TOKENS, PADDING = torch.zeros(2, 5, E), torch.ones(2, 5, dtype=torch.int64)


class Layer(nn.Module):
    """Projections around `attend`, which takes `[B, H, L, D]` and the further inputs."""

    def __init__(self, attend: Attend, heads: int = H, kv_heads: int = H) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.heads, self.kv_heads = attend, heads, kv_heads
        self.q = nn.Linear(E, heads * D)
        self.k, self.v = nn.Linear(E, kv_heads * D), nn.Linear(E, kv_heads * D)
        self.o = nn.Linear(heads * D, E)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        more = () if mask is None else (mask,)
        q = self.q(x).view(b, n, self.heads, D).transpose(1, 2)
        k, v = (p(x).view(b, n, self.kv_heads, D).transpose(1, 2) for p in (self.k, self.v))
        y = self.attend(q, k, v, *more).transpose(1, 2)
        return self.o(y.reshape(b, n, self.heads * D))


def padding(mask: Tensor) -> Tensor:
    return mask[:, None, None, :] > 0


def sdpa_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v)


def sdpa_bool(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=padding(mask))


def sdpa_float(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=torch.where(padding(mask), 0.0, -1e4), scale=0.3)


def sdpa_free(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend with a mask whose last axis has a name of its own."""
    return sdpa(q, k, v, attn_mask=mask)


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


def sdpa_gqa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=padding(mask), enable_gqa=True)


def sdpa_gqa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    b, g, n, d = k.shape
    k, v = (t[:, :, None].expand(b, g, 2, n, d).reshape(b, 2 * g, n, d) for t in (k, v))
    return sdpa(q, k, v, attn_mask=padding(mask))


def bert(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    low = (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    return nn.functional.dropout((scores + low).softmax(-1), 0.1, training=False) @ v


def gpt2(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype)
    causal = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
    seen = causal[:, :, : k.size(-2), : k.size(-2)]
    scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
    low = (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    return (scores + low).softmax(-1) @ v


def whisper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = torch.full((64, 64), -torch.inf).triu(1)
    scores = (q * D**-0.25) @ (k * D**-0.25).transpose(2, 3)
    scores = (scores + table[: q.shape[2], : q.shape[2]]).float()
    return torch.nn.functional.softmax(scores, dim=-1).to(q.dtype) @ v


def t5(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    n = torch.arange(q.shape[2])
    table = torch.linspace(-1, 1, 2 * 7).view(7, 2)
    bias = table[(n[None] - n[:, None]).clamp(-3, 3) + 3].permute(2, 0, 1)[None]
    bias = bias + torch.where(padding(mask), 0.0, torch.finfo(q.dtype).min)
    scores = torch.matmul(q, k.transpose(3, 2)) + bias
    return nn.functional.softmax(scores.float(), dim=-1).type_as(scores) @ v


def diffusers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(-1, t.shape[2], D) for t in (q, k, v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=D**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(-1, H, v.shape[1], D)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q * D**-0.5, k)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5
    scores = scores.masked_fill(~padding(mask), -torch.inf)
    return torch.nan_to_num(scores.softmax(-1), nan=0.0) @ v


def opt(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend with merged heads, which are split to add the mask."""
    b, _, n, _ = q.shape
    q, k, v = (t.reshape(b * H, -1, D) for t in (q * D**-0.5, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, H, n, n)
    low = torch.where(padding(mask), 0.0, torch.finfo(q.dtype).min)
    scores = torch.maximum((scores + low), torch.tensor(torch.finfo(q.dtype).min))
    return torch.bmm(scores.view(b * H, n, n).softmax(-1), v).view(b, H, n, D)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with an axis for the query heads of each K/V head."""
    b, h, n, d = q.shape
    q = q.view(b, 2, h // 2, n, d)
    scores = torch.einsum("bgrld,bgsd->bgrls", q, k) * D**-0.5
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -1e30).softmax(-1)
    return torch.einsum("bgrls,bgsd->bgrld", weights, v).reshape(b, h, n, d)


def stable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) / D**0.5
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


def softmax_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) / D**0.5
    scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)
    return scores.softmax(-1)[..., :-1] @ v


class Windows(Layer):
    """Attention within windows, with a mask for each of the 3 windows of an image, as in Swin."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, H, D).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = (q * D**-0.5) @ k.transpose(-2, -1) + torch.linspace(-1, 1, H * 25).view(
            1, H, 5, 5
        )
        hidden = torch.arange(75).view(3, 1, 5, 5) % 7 > 4
        scores = scores.view(-1, 3, H, 5, 5) + torch.where(hidden, -100.0, 0.0)
        y = scores.view(-1, H, 5, 5).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, n, H * D))


class Rows(Layer):
    """Attention along the rows of `[B, R, L, E]`."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(2, 3) for p in (self.q, self.k, self.v))
        y = (q @ k.transpose(-1, -2) / D**0.5).softmax(-1) @ v
        return self.o(y.transpose(2, 3).flatten(3))


class Latents(Layer):
    """Attention of 3 learned queries, of batch size 1."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q = self.q.weight[None, :3].expand(len(x), -1, -1)
        k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.k, self.v))
        y = sdpa(q.unflatten(-1, (H, D)).transpose(1, 2), k, v)
        return self.o(y.transpose(1, 2).flatten(2))


class Timm(nn.Module):
    """One projection for queries, keys and values, as in timm."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj, self.fused = nn.Linear(E, 3 * E), nn.Linear(E, E), fused

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = sdpa(q, k, v)
        else:
            y = ((q * D**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, N, C))


class LengthFirst(nn.Module):
    """Attention of `[L, B, E]`, as in fairseq."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        n, b, _ = x.shape
        q, k, v = (p(x).view(n, b * H, D).transpose(0, 1) for p in (self.q, self.k, self.v))
        scores = torch.bmm(q * D**-0.5, k.transpose(1, 2)).view(b, H, n, n)
        scores = scores.masked_fill(hidden[:, None, None].to(torch.bool), -torch.inf)
        weights = scores.view(b * H, n, n).softmax(-1)
        return self.o(torch.bmm(weights, v).transpose(0, 1).reshape(n, b, E))


class Channels(nn.Module):
    """Attention of one head over the pixels of an image, in the order of old VAEs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Conv2d(E, E, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (p(x).reshape(b, c, h * w) for p in (self.q, self.k, self.v))
        scores = torch.bmm(q.permute(0, 2, 1), k) * c**-0.5
        y = torch.bmm(v, scores.softmax(dim=2).permute(0, 2, 1))
        return x + self.o(y.reshape(b, c, h, w))


class Cross(nn.Module):
    """`nn.MultiheadAttention` of two sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mha = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor, y: Tensor, hidden: Tensor) -> Tensor:
        hidden = hidden.to(torch.bool)
        return self.mha(x, y, y, key_padding_mask=hidden, need_weights=False)[0]


class Cached(Layer):
    """Attention to past and new keys, as decoders compute it."""

    def forward(  # type: ignore[override]
        self, x: Tensor, past_key: Tensor, past_value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, self.heads, D).transpose(1, 2)
        k, v = (p(x).view(b, n, self.kv_heads, D).transpose(1, 2) for p in (self.k, self.v))
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
        mine, others = torch.arange(n)[:, None] + past_key.shape[2], torch.arange(k.shape[2])
        b, g, s, _ = k.shape
        key, value = (
            t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(b, 2 * g, s, D) for t in (k, v)
        )
        scores = q @ key.transpose(2, 3) / math.sqrt(D)
        low = torch.where(others <= mine, 0.0, torch.finfo(x.dtype).min)
        y = nn.functional.softmax(scores + low, dim=-1, dtype=torch.float32) @ value
        return self.o(y.transpose(1, 2).reshape(b, n, self.heads * D)), k, v


class Padded(Cached):
    """`Cached` with padding: two masks of the lowest number, whose sum is kept above it."""

    def forward(  # type: ignore[override]
        self, x: Tensor, past_key: Tensor, past_value: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, self.heads, D).transpose(1, 2)
        k, v = (p(x).view(b, n, self.kv_heads, D).transpose(1, 2) for p in (self.k, self.v))
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
        key, value = (t.repeat_interleave(2, dim=1) for t in (k, v))
        low, past = torch.finfo(x.dtype).min, past_key.shape[2]
        causal = torch.full((n, past + n), low).triu(1 + past)
        hidden = causal + (1 - mask[:, None, None].to(x.dtype)) * low
        scores = q @ key.transpose(2, 3) / math.sqrt(D) + hidden.clamp(min=low)
        y = scores.softmax(-1) @ value
        return self.o(y.transpose(1, 2).reshape(b, n, self.heads * D)), k, v


X = {"x": TOKENS}
MASKED = {"x": TOKENS, "mask": PADDING}
PAST, NOTHING = torch.zeros(2, 2, 3, D), torch.zeros(2, 7, dtype=torch.int64)

CACHED = {"x": TOKENS, "past_key": PAST, "past_value": PAST}

MODULES: Mapping[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "sdpa": (lambda: Layer(sdpa_plain), X),
    "sdpa_bool": (lambda: Layer(sdpa_bool), MASKED),
    "sdpa_float": (lambda: Layer(sdpa_float), MASKED),
    "sdpa_causal": (lambda: Layer(sdpa_causal), X),
    "sdpa_gqa": (lambda: Layer(sdpa_gqa, 4), MASKED),
    "sdpa_gqa_causal": (lambda: Layer(sdpa_gqa_causal, 4), X),
    "sdpa_repeated": (lambda: Layer(sdpa_repeated, 4), MASKED),
    "bert": (lambda: Layer(bert), MASKED),
    "gpt2": (lambda: Layer(gpt2), MASKED),
    "whisper": (lambda: Layer(whisper), X),
    "t5": (lambda: Layer(t5), MASKED),
    "diffusers": (lambda: Layer(diffusers), X),
    "einsum": (lambda: Layer(einsum), X),
    "filled": (lambda: Layer(filled), MASKED),
    "opt": (lambda: Layer(opt), MASKED),
    "grouped": (lambda: Layer(grouped, 4), X),
    "stable": (lambda: Layer(stable), X),
    "timm": (lambda: Timm(fused=False), X),
    "timm_fused": (lambda: Timm(fused=True), X),
    "length_first": (LengthFirst, {"x": torch.zeros(5, 2, E), "hidden": NOTHING[:, :5]}),
    "channels": (Channels, {"x": torch.zeros(2, E, 3, 4)}),
    "cross": (Cross, {"x": TOKENS, "y": torch.zeros(2, 7, E), "hidden": NOTHING}),
    "cached": (lambda: Cached(sdpa_plain, 4), CACHED),
    "padded": (lambda: Padded(sdpa_plain, 4), {**CACHED, "mask": torch.ones(2, 8).long()}),
    "sdpa_free": (lambda: Layer(sdpa_free), {"x": TOKENS, "mask": torch.zeros(2, H, 5, 5)}),
    "softmax_one": (lambda: Layer(softmax_one), X),
    "windows": (lambda: Windows(sdpa_plain), {"x": torch.zeros(6, 5, E)}),
    "rows": (lambda: Rows(sdpa_plain), {"x": torch.zeros(2, 3, 5, E)}),
    "latents": (lambda: Latents(sdpa_plain), X),
}  # fmt: skip

AXES: Mapping[str, Mapping[int, str]] = {
    "x": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "length"},
    "y": {0: "batch", 1: "keys"}, "past_key": {0: "batch", 2: "past"},
    "past_value": {0: "batch", 2: "past"},
}  # fmt: skip
OTHER_AXES: Mapping[str, Mapping[str, Mapping[int, str]]] = {
    "length_first": {"x": {0: "length", 1: "batch"}, "hidden": {0: "batch", 1: "length"}},
    "channels": {"x": {0: "batch", 2: "height", 3: "width"}},
    "padded": {"mask": {0: "batch", 1: "total"}},
    "sdpa_free": {"mask": {0: "batch", 2: "length", 3: "keys"}},
    "windows": {"x": {0: "batch"}},
    "rows": {"x": {0: "batch", 1: "rows", 2: "length"}},
    "cross": {"hidden": {0: "batch", 1: "keys"}},
}
"""The names of the dynamic axes of inputs, and of those that differ in a module."""


def axes_of(name: str) -> dict[str, Mapping[int, str]]:
    """Return the dynamic axes of the inputs of a module."""
    return {n: {**AXES, **OTHER_AXES.get(name, {})}[n] for n in MODULES[name][1]}
