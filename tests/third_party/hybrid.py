"""Linear and hybrid attention in plain PyTorch, and the loops of decoders and taggers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from third_party.recurrent import Mixer, empty, fours, gated, mixer, read
from third_party.subjects import TOKENS, D, E, H, Table, taken, tokens
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop

from attn_export import Axis, Subject


def retention_at_once(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    kept = torch.log(1 - 2.0 ** (-5 - torch.arange(H).float()))
    i = torch.arange(q.shape[1])
    distance = (i[:, None] - i[None]).float()
    decay = torch.where(distance >= 0, (distance * kept[:, None, None]).exp(), 0.0)
    scores = torch.einsum("blhd,bshd->bhls", q, k) * D**-0.5 * decay
    scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)
    return torch.einsum("bhls,bshd->blhd", scores, v)


def gates_at_once(_: Mixer, q: Tensor, k: Tensor, v: Tensor, g: Tensor, __: Tensor) -> Tensor:
    total = g.cumsum(1).transpose(1, 2)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    return torch.einsum("bhls,bshd->blhd", torch.einsum("blhd,bshd->bhls", q, k) * decay, v)


def summed_products(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("blhk,blhv->blhkv", k, v).cumsum(1)
    total = torch.einsum("blhk,blhk->blh", q, k.cumsum(1))
    return torch.einsum("blhk,blhkv->blhv", q, state) / (total[..., None] + 1e-6)


def taylor(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    """Based: features up to the second power, causal."""

    def features(x: Tensor) -> Tensor:
        second = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
        return torch.cat([torch.ones_like(x[..., :1]), x, second], -1)

    q, k = features(q * D**-0.25), features(k * D**-0.25)
    weights = torch.einsum("blhf,bshf->bhls", q, k).tril()
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    return torch.einsum("bhls,bshd->blhd", weights, v)


def segment_sums(x: Tensor) -> Tensor:
    size = x.shape[-1]
    x = x[..., None].expand(*x.shape, size).tril(-1).cumsum(-2)
    return x.masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(), -torch.inf)


def state_space_duality(_: Mixer, c: Tensor, b: Tensor, x: Tensor, a: Tensor, __: Tensor) -> Tensor:
    """Mamba 2's own short form, in chunks of 4."""
    x, a, b, c = (t.unflatten(1, (-1, 4)) for t in (x, a, b, c))
    a = a.movedim(-1, 1)
    total = a.cumsum(-1)
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, segment_sums(a).exp(), x)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, (total[..., -1:] - total).exp(), x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    between = segment_sums(F.pad(total[..., -1], (1, 0))).exp()
    states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
    across = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, total.exp())
    return (within + across).flatten(1, 2)


def solved_in_chunks(_: Mixer, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """The gated delta rule in chunks of 4, with a loop over the chunks by `scan`."""
    q, k = F.normalize(q, dim=-1) * D**-0.5, F.normalize(k, dim=-1)
    q, k, v, g, b = (t.transpose(1, 2).unflatten(2, (-1, 4)) for t in (q, k, v, g, b))
    g = g.cumsum(-1)
    lower = torch.ones(4, 4, dtype=torch.bool).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    system = (((k * b[..., None]) @ k.mT) * decay).tril(-1)
    inverse = torch.eye(4) - system
    inverse = inverse @ (torch.eye(4) + system @ system)
    u, w = inverse @ (v * b[..., None]), inverse @ (k * b[..., None] * g.exp()[..., None])

    def chunk(state, x):
        q, k, u, w, g, decay = x
        new = u - w @ state
        out = (q * g.exp()[..., None]) @ state + (q @ k.mT * decay) @ new
        last = g[..., -1:]
        return state * last.exp()[..., None] + (k * (last - g).exp()[..., None]).mT @ new, out

    xs = tuple(t.movedim(2, 0) for t in (q, k, u, w, g, decay))
    return scan(chunk, empty(q), xs)[1].movedim(0, 2).flatten(2, 3).transpose(1, 2)


def chunks_of_a_list(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *__: Tensor) -> Tensor:
    """Linear attention over a fixed length, with a Python loop over chunks of 4."""
    state, found = empty(q), []
    for q_, k_, v_ in zip(*(t.transpose(1, 2).split(4, 2) for t in (q, k, v)), strict=True):
        found.append(q_ @ state + (q_ @ k_.mT).tril() @ v_)
        state = state + k_.mT @ v_
    return torch.cat(found, 2).transpose(1, 2)


class ShortConvolution(nn.Module):
    """A depthwise causal convolution that is given the last tokens, and returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(E, E, 4, groups=E)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([state, x.transpose(1, 2)], 2)
        return F.silu(self.convolution(joined)).transpose(1, 2), joined[..., -3:]


class OneStep(nn.Module):
    """One step of a gated delta net behind a short convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates, self.o = nn.Linear(E, 3 * E), nn.Linear(E, 2 * H), nn.Linear(E, E)
        self.weight = nn.Parameter(torch.randn(3 * E, 4) / 2)

    def forward(self, x: Tensor, past_conv: Tensor, past_state: Tensor) -> tuple[Tensor, ...]:
        conv = torch.cat([past_conv[..., 1:], self.qkv(x)[..., None]], -1)
        q, k, v = F.silu((conv * self.weight).sum(-1)).unflatten(-1, (3, H, D)).unbind(1)
        decay, strength = self.gates(x).chunk(2, -1)
        k = F.normalize(k, dim=-1)
        state = past_state * F.logsigmoid(decay).exp()[..., None, None]
        new = (v - read(state, k)) * strength.sigmoid()[..., None]
        state = state + k[..., None] * new[:, :, None]
        return self.o(read(state, F.normalize(q, dim=-1)).flatten(1)), conv, state


class Hybrid(nn.Module):
    """A layer of a loop over the sequence, then one of causal attention."""

    def __init__(self, mixed: Any) -> None:
        super().__init__()
        self.mixer, self.norm = Mixer(mixed), nn.RMSNorm(E)
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + found.transpose(1, 2).flatten(2)


class Tagger(nn.Module):
    """A conditional random field: the logarithm of its sum, and the best path."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.moves = nn.Linear(E, 5), nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(x)
        first = scores[:, 0].clone()

        def forward(total, x):
            new = torch.logsumexp(total[..., None] + self.moves, 1) + x[0]
            total = torch.where(x[1][:, None], new, total)
            return total, total.clone()

        def best(score, x):
            score, where = (score[..., None] + self.moves).max(1)
            return score + x, where

        def back(tag, where):
            tag = where.gather(1, tag[:, None])[:, 0]
            return tag, tag.clone()

        total, _ = scan(forward, first, (scores[:, 1:], mask[:, 1:]), dim=1)
        score, where = scan(best, first, scores[:, 1:].transpose(0, 1))
        last = score.argmax(-1)
        _, path = scan(back, last, where, reverse=True)
        return total.logsumexp(-1), torch.cat([path, last[None]]).T


class Greedy(nn.Module):
    """A decoder that writes 12 tokens, each the likeliest."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(20, E), nn.GRUCell(E, E), nn.Linear(E, 20)

    def forward(self, h: Tensor) -> Tensor:
        def more(i, h, tokens):
            return i < 12

        def step(i, h, tokens):
            h = self.cell(self.embed(tokens.index_select(1, i.view(1))[:, 0]), h)
            return i + 1, h, tokens.index_copy(1, (i + 1).view(1), self.head(h).argmax(-1)[:, None])

        start = torch.zeros(h.shape[0], 13, dtype=torch.int64)
        found: Tensor = while_loop(more, step, (torch.tensor(0), h, start))[2]
        return found


class Halting(nn.Module):
    """Adaptive computation: each token stops when it is sure, at the latest after 8 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.halt = nn.Linear(E, E), nn.Linear(E, 1)

    def forward(self, x: Tensor) -> Tensor:
        def more(i, x, halted, out):
            return (i < 8) & (halted < 0.99).any()

        def step(i, x, halted, out):
            x = torch.tanh(self.step(x))
            part = torch.minimum(self.halt(x).sigmoid(), 1 - halted)
            return i + 1, x, halted + part, out + part * x

        start = (torch.tensor(0), x, torch.zeros_like(x[..., :1]), torch.zeros_like(x))
        found: Tensor = while_loop(more, step, start)[3]
        return found


def inverse_by_newton(_: Mixer, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    """Attention of Nyström's kind: an inverse that 6 steps of Newton's approach."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    marks = F.normalize(k, dim=-1)
    a = marks.mT @ marks + torch.eye(D)
    bound = a.abs().sum(-1).amax(-1) * a.abs().sum(-2).amax(-1)
    start = a.mT / bound[..., None, None]

    def step(i, z):
        return i + 1, 2 * z - z @ a @ z

    def more(i, z):
        return i < 6

    _, inverse = while_loop(more, step, (torch.tensor(0), start))
    return (q @ inverse @ (marks.mT @ v)).transpose(1, 2)


def tagger() -> Subject:
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    axis = {0: "batch", 1: Axis("query_len", min=2)}
    inputs = {"x": torch.randn(2, 5, E), "mask": mask}
    return Subject(Tagger().eval(), inputs, dict.fromkeys(inputs, axis), ["total", "path"])


def convolution() -> Subject:
    inputs = {"x": torch.randn(2, 5, E), "state": torch.randn(2, E, 3)}
    axes = {"x": TOKENS, "state": {0: "batch"}}
    return Subject(ShortConvolution().eval(), inputs, axes, ["output", "new_state"])


def one_step() -> Subject:
    inputs = {
        "x": torch.randn(2, E), "past_conv": torch.randn(2, 3 * E, 4),
        "past_state": torch.randn(2, H, D, D),
    }  # fmt: skip
    axes = {name: {0: "batch"} for name in inputs}
    return Subject(OneStep().eval(), inputs, axes, ["output", "present_conv", "present_state"])


MODULES: Table = {
    f"linear, {function.__name__.replace('_', ' ')}": partial(mixer, function)
    for function in (
        retention_at_once, gates_at_once, summed_products, taylor, inverse_by_newton,
    )
} | {
    "linear, state space duality": partial(mixer, state_space_duality, fours, 8),
    "linear, solved in chunks": partial(mixer, solved_in_chunks, fours, 8),
    "linear, chunks of a list": lambda: Subject(
        Mixer(chunks_of_a_list).eval(), {"x": torch.randn(2, 10, E)}, {"x": {0: "batch"}}, ["out"]
    ),
    "linear, short convolution": convolution,
    "linear, one step": one_step,
    "hybrid, gated and attention": lambda: tokens(Hybrid(gated)),
    "loop, tagger": tagger,
    "loop, greedy": lambda: taken(Greedy(), {"h": torch.randn(2, E)}, {"h": {0: "batch"}}),
    "loop, halting": lambda: tokens(Halting()),
}  # fmt: skip
