"""Modules that are given caches and other states as objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from third_party.subjects import TOKENS, D, E, H, Table
from torch import Tensor, nn

from attn_export import Axis, Subject

PAST = {0: "batch", 2: "past_len"}


class Attending(nn.Module):
    """Causal attention to a past and to tokens; a subclass says how it keeps the past."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return q, k, v

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        joined: Tensor = self.o(found.transpose(1, 2).flatten(2))
        return joined


def past(length: int = 6) -> Tensor:
    return torch.randn(2, H, length, D)


class Pair(NamedTuple):
    k: Tensor
    v: Tensor


@dataclass
class Layer:
    k: Tensor
    v: Tensor


@dataclass
class Inference:
    """What a decoder keeps, as in many files called generate.py."""

    layers: list[Layer] = field(default_factory=list)
    seen: int = 0


class Plain:
    """A cache with a method, and nothing that PyTorch knows."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        return self.k, self.v


class OfPlain(Attending):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        q, k, v = self.heads(x)
        return self.attended(q, *cache.update(k, v))


class OfNamedTuple(Attending):
    def forward(self, x: Tensor, cache: Pair) -> tuple[Tensor, Pair]:
        q, k, v = self.heads(x)
        cache = Pair(torch.cat([cache.k, k], 2), torch.cat([cache.v, v], 2))
        return self.attended(q, *cache), cache


class OfDataclass(Attending):
    def forward(self, x: Tensor, cache: Inference) -> Tensor:
        for layer in cache.layers:
            q, k, v = self.heads(x)
            layer.k, layer.v = torch.cat([layer.k, k], 2), torch.cat([layer.v, v], 2)
            x = x + self.attended(q, layer.k, layer.v)
        cache.seen += x.shape[1]
        return x


class OfTuples(Attending):
    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Any]]:
        present = []
        for old_k, old_v in past:
            q, k, v = self.heads(x)
            k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
            present.append((k, v))
            x = x + self.attended(q, k, v)
        return x, present


class OfDict(Attending):
    """As in T5's earlier forms: a dict of dicts, replaced in place and returned."""

    def forward(self, x: Tensor, cache: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        q, k, v = self.heads(x)
        own = cache["self"]
        own["k"], own["v"] = torch.cat([own["k"], k], 2), torch.cat([own["v"], v], 2)
        y = x + self.attended(q, own["k"], own["v"])
        q = self.heads(y)[0]
        found = F.scaled_dot_product_attention(q, cache["cross"]["k"], cache["cross"]["v"])
        return y + found.transpose(1, 2).flatten(2), cache


class OfDictInPlace(Attending):
    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        q, k, v = self.heads(x)
        cache["k"] = torch.cat([cache["k"], k], 2)
        cache["v"] = torch.cat([cache["v"], v], 2)
        return self.attended(q, cache["k"], cache["v"])


class OfBuffers(Attending):
    """Written at given places of buffers of a fixed size, as in gpt-fast."""

    def forward(self, x: Tensor, positions: Tensor, cache: Layer) -> Tensor:
        q, k, v = self.heads(x)
        cache.k[:, :, positions] = k
        cache.v[:, :, positions] = v
        mask = torch.arange(cache.k.shape[2])[None] <= positions[:, None]
        found = F.scaled_dot_product_attention(q, cache.k, cache.v, attn_mask=mask)
        out: Tensor = self.o(found.transpose(1, 2).flatten(2))
        return out


class OfRing(Attending):
    """The last 8 tokens, moved on by what is new."""

    def forward(self, x: Tensor, cache: Pair) -> tuple[Tensor, Pair]:
        q, k, v = self.heads(x)
        k, v = torch.cat([cache.k, k], 2), torch.cat([cache.v, v], 2)
        i = torch.arange(q.shape[2])[:, None] + 8 - torch.arange(k.shape[2])[None]
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=(i >= 0) & (i < 8))
        return self.o(found.transpose(1, 2).flatten(2)), Pair(k[:, :, -8:], v[:, :, -8:])


class OfBeams(Attending):
    """The rows of a cache follow the beams that are kept."""

    def forward(self, x: Tensor, cache: Plain, beams: Tensor) -> Tensor:
        cache.k, cache.v = cache.k.index_select(0, beams), cache.v.index_select(0, beams)
        q, k, v = self.heads(x)
        return self.attended(q, *cache.update(k, v))


class Optional(Attending):
    """A cache that may be left out, here with places of the tokens."""

    def forward(self, x: Tensor, cache: Plain | None = None, use_cache: bool = True) -> Any:
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = cache.update(k, v)
        return {"hidden": self.attended(q, k, v), "cache": cache if use_cache else None}


@dataclass
class MambaState:
    conv: Tensor
    ssm: Tensor


class OfStates(nn.Module):
    """One step of a Mamba layer with both of its states, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(E, 2 * E), nn.Linear(E, E)
        self.parameters_of_x = nn.Linear(E, 2 * D + 1)
        self.kernel, self.rate = nn.Parameter(torch.randn(E, 4)), nn.Parameter(torch.randn(E, D))

    def forward(self, x: Tensor, state: MambaState) -> Tensor:
        x, z = self.into(x).chunk(2, -1)
        state.conv.copy_(torch.roll(state.conv, -1, -1))
        state.conv[..., -1] = x
        x = F.silu((state.conv * self.kernel).sum(-1))
        dt, b, c = self.parameters_of_x(x).split([1, D, D], -1)
        dt = F.softplus(dt)[..., None]
        decay = (dt * -self.rate.exp()).exp()
        state.ssm.copy_(state.ssm * decay + dt * x[..., None] * b[:, None])
        out: Tensor = self.out((state.ssm * c[:, None]).sum(-1) * F.silu(z))
        return out


def kept(
    module: nn.Module,
    cache: Any,
    outputs: tuple[str, ...] = ("output",),
    axes: Any = PAST,
    name: str = "cache",
    **more: Any,
) -> Subject:
    inputs = {"x": torch.randn(2, 3, E), name: cache, **more}
    return Subject(module.eval(), inputs, {"x": TOKENS, name: axes}, list(outputs))


def dicts() -> Subject:
    cache = {"self": {"k": past(), "v": past()}, "cross": {"k": past(5), "v": past(5)}}
    axes = {"x": TOKENS, "cache.self": PAST, "cache.cross": {0: "batch", 2: "key_len"}}
    inputs = {"x": torch.randn(2, 3, E), "cache": cache}
    return Subject(OfDict().eval(), inputs, axes, ["output", "cache"])


def buffers() -> Subject:
    module = OfBuffers().eval()

    def draw(sizes, rng):
        start = int(rng.integers(0, 33 - sizes["query_len"]))
        shape = (sizes["batch"], H, 32, D)
        return {
            "x": rng.standard_normal((sizes["batch"], sizes["query_len"], E)),
            "positions": start + torch.arange(sizes["query_len"]),
            "cache": Layer(*torch.from_numpy(rng.standard_normal((2, *shape), np.float32))),
        }

    query = Axis("query_len", max=32)
    axes = {"x": {0: "batch", 1: query}, "positions": {0: query}, "cache": {0: "batch"}}
    return Subject(module, draw, axes, ["output"])


def beams() -> Subject:
    inputs = {
        "x": torch.randn(4, 1, E), "cache": Plain(torch.randn(4, H, 6, D), torch.randn(4, H, 6, D)),
        "beams": torch.tensor([0, 0, 3, 1]),
    }  # fmt: skip
    axes = {"x": {}, "cache": {2: "past_len"}, "beams": {}}
    return Subject(OfBeams().eval(), inputs, axes, ["output"])


def states() -> Subject:
    inputs = {
        "x": torch.randn(2, E),
        "state": MambaState(torch.randn(2, E, 4), torch.randn(2, E, D)),
    }
    return Subject(OfStates().eval(), inputs, {n: {0: "batch"} for n in inputs}, ["output"])


MODULES: Table = {
    "cache, plain": lambda: kept(OfPlain(), Plain(past(), past())),
    "cache, named tuple": lambda: kept(OfNamedTuple(), Pair(past(), past()), ("output", "cache")),
    "cache, dataclass": lambda: kept(
        OfDataclass(), Inference([Layer(past(), past()), Layer(past(), past())], 6)
    ),
    "cache, tuples": lambda: kept(
        OfTuples(), [(past(), past()), (past(), past())], ("output", "present"), name="past"
    ),
    "cache, dicts": dicts,
    "cache, dict in place": lambda: kept(OfDictInPlace(), {"k": past(), "v": past()}),
    "cache, buffers": buffers,
    "cache, ring": lambda: kept(
        OfRing(), Pair(past(8), past(8)), ("output", "cache"), {0: "batch"}
    ),
    "cache, beams": beams,
    "cache, optional": lambda: kept(
        Optional(), Plain(past(), past()), ("hidden", "cache"), use_cache=True
    ),
    "cache, states": states,
}  # fmt: skip
