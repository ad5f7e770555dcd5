"""Loops over a sequence, as people write them with the loops of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from third_party.subjects import D, E, H, Table, tokens
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.associative_scan import associative_scan

from attn_export import Axis, Subject

Mixed = Callable[["Mixer", Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Mixer(nn.Module):
    """A mixer of tokens that is a recurrence.

    Args:
        mixed: Takes the module, queries, keys and values `[B, L, H, D]`, the logarithm of a decay
            and a strength in (0, 1), both `[B, L, H]`.
    """

    def __init__(self, mixed: Mixed) -> None:
        super().__init__()
        self.qkv, self.gates, self.o = nn.Linear(E, 3 * E), nn.Linear(E, 2 * H), nn.Linear(E, E)
        self.first, self.rate = nn.Parameter(torch.randn(H, D)), nn.Parameter(torch.randn(H, D))
        self.cell, self.mixed = nn.GRUCell(E, E), mixed

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, D)) for t in self.qkv(x).chunk(3, -1))
        decay, strength = self.gates(x).chunk(2, -1)
        mixed = self.mixed(self, q, k, v, F.logsigmoid(decay), strength.sigmoid())
        found: Tensor = self.o(mixed.flatten(2))
        return found


def empty(q: Tensor) -> Tensor:
    return q.new_zeros(q.shape[0], H, D, D)


def read(state: Tensor, q: Tensor) -> Tensor:
    return (q[:, :, None] @ state)[:, :, 0]


def linear(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    def step(state, x):
        q, k, v = x
        state = state + k[..., None] * v[:, :, None]
        return state, read(state, q)

    return scan(step, empty(q), tuple(t.transpose(0, 1) for t in (q, k, v)))[1].transpose(0, 1)


def gated(_: Mixer, q: Tensor, k: Tensor, v: Tensor, g: Tensor, __: Tensor) -> Tensor:
    def step(state, x):
        q, k, v, g = x
        state = state * g.exp()[..., None, None] + torch.einsum("bhk,bhv->bhkv", k, v)
        return state, torch.einsum("bhk,bhkv->bhv", q, state)

    return scan(step, empty(q), (q, k, v, g), dim=1)[1]


def delta(_: Mixer, q: Tensor, k: Tensor, v: Tensor, __: Tensor, b: Tensor) -> Tensor:
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)

    def step(state, x):
        new = (x["v"] - read(state, x["k"])) * x["b"][..., None]
        state = state + x["k"][..., None] * new[:, :, None]
        return state, read(state, x["q"])

    return scan(step, empty(q), {"q": q, "k": k, "v": v, "b": b}, dim=1)[1]


def gated_delta(_: Mixer, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    q, k = F.normalize(q, dim=-1) * D**-0.5, F.normalize(k, dim=-1)

    def step(state, x):
        q, k, v, g, b = x
        state = state * g.exp()[..., None, None]
        state = state + k[..., None] * ((v - read(state, k)) * b[..., None])[:, :, None]
        return state, read(state, q)

    return scan(step, empty(q), (q, k, v, g, b), dim=1)[1]


def rwkv_4(m: Mixer, r: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    first, rate = m.first, -m.rate.exp()

    def step(carry, x):
        a, b, most = carry
        k, v = x
        top = torch.maximum(most, k + first)
        old, new = (most - top).exp(), (k + first - top).exp()
        out = (old * a + new * v) / (old * b + new)
        top = torch.maximum(most + rate, k)
        old, new = (most + rate - top).exp(), (k - top).exp()
        return (old * a + new * v, old * b + new, top), out

    zero = torch.zeros_like(k[:, 0])
    _, out = scan(step, (zero, zero.clone(), zero - 1e38), (k, v), dim=1)
    return r.sigmoid() * out


def rwkv_7(m: Mixer, r: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    a = F.normalize(k * m.first, dim=-1)

    def step(state, x):
        r, k, v, g, a, b = x
        taken = (state @ -a[..., None]) @ (a * b[..., None])[:, :, None]
        state = (
            state * torch.exp(-0.6 * g.exp())[..., None, None]
            + taken
            + v[..., None] * k[:, :, None]
        )
        return state, (state @ r[..., None])[..., 0]

    return scan(step, empty(r), (r, k, v, g, a, b), dim=1)[1]


def selective(m: Mixer, c: Tensor, b: Tensor, x: Tensor, g: Tensor, _: Tensor) -> Tensor:
    a, dt = -m.rate.exp(), F.softplus(g)[..., None]

    def step(state, each):
        x, b, c, dt = each
        state = (dt * a)[..., None].exp() * state + (dt * x)[..., None] * b[:, :, None]
        return state, (state * c[:, :, None]).sum(-1) + m.first * x

    return scan(step, empty(x), (x, b, c, dt), dim=1)[1]


def combined(left, right):
    return left[0] * right[0], left[1] * right[0] + right[1]


def selective_in_parallel(
    m: Mixer, c: Tensor, b: Tensor, x: Tensor, g: Tensor, _: Tensor
) -> Tensor:
    dt = F.softplus(g)[..., None]
    decay = (dt * -m.rate.exp())[..., None].exp().expand(*x.shape, D)
    added = (dt * x)[..., None] * b[..., None, :]
    _, state = associative_scan(combined, (decay.contiguous(), added), 1, combine_mode="generic")
    return (state @ c[..., None])[..., 0] + m.first * x


def retention(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    kept = 1 - 2.0 ** (-5 - torch.arange(H).float())

    def step(state, x):
        q, k, v = x
        state = kept[:, None, None] * state + k[..., None] * v[:, :, None]
        return state, read(state, q)

    found = scan(step, empty(q), (q * D**-0.5, k, v), dim=1)[1]
    return F.group_norm(found.flatten(0, 1).flatten(1), H).view_as(found)


def both_ways(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    def step(h, x):
        h = x[0] * h + (1 - x[0]) * x[1]
        return h, h.clone()

    start = torch.zeros_like(v[:, 0])
    there = scan(step, start, (k.sigmoid(), v), dim=1)[1]
    back = scan(step, start, (q.sigmoid(), v), dim=1, reverse=True)[1]
    return there + back


def chunks(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    """Attend to 4 keys at a time and rescale what was summed, as FlashAttention does."""
    q, k, v = (t.transpose(1, 2) for t in (q * D**-0.5, k, v))
    blocks = tuple(t.unflatten(2, (-1, 4)).movedim(2, 0) for t in (k, v))

    def step(carry, block):
        summed, total, most = carry
        scores = q @ block[0].mT
        top = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, old = (scores - top).exp(), (most - top).exp()
        summed, total = (
            summed * old + weights @ block[1],
            total * old + weights.sum(-1, keepdim=True),
        )
        return (summed, total, top), total.clone()

    zero = q.new_zeros(*q.shape[:3], 1)
    start = (q.new_zeros(q.shape), zero, zero - torch.inf)
    (summed, total, _), _ = scan(step, start, blocks)
    return (summed / total).transpose(1, 2)


def nested(_: Mixer, q: Tensor, k: Tensor, v: Tensor, g: Tensor, __: Tensor) -> Tensor:
    def step(state, x):
        q, k, v, g = x
        state = state * g.exp()[..., None, None] + k[..., None] * v[:, :, None]
        return state, read(state, q)

    def chunk(state, xs):
        return scan(step, state, xs)

    xs = tuple(t.transpose(0, 1).unflatten(0, (-1, 4)) for t in (q, k, v, g))
    return scan(chunk, empty(q), xs)[1].flatten(0, 1).transpose(0, 1)


def recurrent_cell(m: Mixer, q: Tensor, *_: Tensor) -> Tensor:
    x = q.flatten(2)

    def step(h, x):
        h = m.cell(x, h)
        return h, h.clone()

    return scan(step, torch.zeros_like(x[:, 0]), x, dim=1)[1]


def one_key_at_a_time(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    """Attend with a `while_loop` over the keys."""
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q * D**-0.5, k, v))

    def more(i, *_):
        return i < k.shape[2]

    def step(i, summed, total, most):
        scores = q @ k.index_select(2, i.view(1)).mT
        top = torch.maximum(most, scores)
        weights, old = (scores - top).exp(), (most - top).exp()
        summed = summed * old + weights * v.index_select(2, i.view(1))
        return i + 1, summed, total * old + weights, top

    zero = torch.zeros_like(q[..., :1])
    start = (torch.tensor(0), torch.zeros_like(q), zero, zero - 1e30)
    _, summed, total, _ = while_loop(more, step, start)
    return (summed / total).transpose(1, 2)


def written_rows(_: Mixer, q: Tensor, k: Tensor, v: Tensor, g: Tensor, __: Tensor) -> Tensor:
    """Write each row of a result in a `while_loop`."""
    q, k, v, g = (t.clone() for t in (q, k, v, g))

    def more(i, *_):
        return i < q.shape[1]

    def step(i, state, out):
        q_, k_, v_, g_ = (t.index_select(1, i.view(1))[:, 0] for t in (q, k, v, g))
        state = state * g_.exp()[..., None, None] + k_[..., None] * v_[:, :, None]
        return i + 1, state, out.index_copy(1, i.view(1), read(state, q_)[:, None])

    return while_loop(more, step, (torch.tensor(0), empty(q), torch.zeros_like(v)))[2]


def running_maximum(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    high = associative_scan(torch.maximum, k, 1, combine_mode="generic")
    return q.sigmoid() * high + v.cumsum(1) / torch.arange(1, v.shape[1] + 1).view(-1, 1, 1)


def reset(_: Mixer, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """Sum from the last token that begins a part, both ways."""
    begins = (b > 0.5)[..., None].expand_as(v).contiguous()

    def join(left, right):
        return torch.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

    there = associative_scan(join, (v, begins), 1, combine_mode="generic")[0]
    return there + associative_scan(join, (k, begins), 1, reverse=True, combine_mode="generic")[0]


def stepwise(_: Mixer, q: Tensor, k: Tensor, v: Tensor, g: Tensor, __: Tensor) -> Tensor:
    state, found = empty(q), []
    for i in range(q.shape[1]):
        state = state * g[:, i].exp()[..., None, None] + k[:, i][..., None] * v[:, i][:, :, None]
        found.append(read(state, q[:, i]))
    return torch.stack(found, 1)


def fours() -> Any:
    return Axis("query_len", min=4, multiple_of=4)


def mixer(mixed: Mixed, axis: Callable[[], Any] = lambda: "query_len", length: int = 5) -> Subject:
    return tokens(Mixer(mixed), axis=axis(), length=length)


MODULES: Table = {
    f"loop, {function.__name__.replace('_', ' ')}": partial(mixer, function)
    for function in (
        linear, gated, delta, gated_delta, rwkv_4, rwkv_7, selective, selective_in_parallel,
        retention, both_ways, recurrent_cell, one_key_at_a_time, written_rows, running_maximum,
        reset, stepwise,
    )
} | {
    "loop, chunks": partial(mixer, chunks, fours, 8),
    "loop, nested": partial(mixer, nested, fours, 8),
    "loop, stepwise over a fixed length": lambda: Subject(
        Mixer(stepwise).eval(), {"x": torch.randn(2, 7, E)}, {"x": {0: "batch"}}, ["output"]
    ),
}  # fmt: skip
