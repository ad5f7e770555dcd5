"""Operators of other packages, and attention to packed sequences, as people call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from third_party import stand_ins
from third_party.newer_masks import Flex
from third_party.stand_ins import (
    BlockDiagonalMask,
    LowerTriangularMask,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    memory_efficient_attention,
)
from third_party.subjects import BATCH, TOKENS, D, E, H, Table, tokens
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from attn_export import Axis, Subject

stand_ins.install()


class Calls(Flex):
    """Self-attention by a function that takes `[B, L, H, D]`, as those of packages do."""

    def __init__(self, function: Callable[..., Tensor], kv_heads: int = H) -> None:
        self.kv_heads = kv_heads
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        found: Tensor = self.out(self.function(q, k, v, **others).flatten(2))
        return found


# -- flash_attn ---------------------------------------------------------------------------------


def flash_gemma(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=0.3, causal=True, window_size=(3, 0), softcap=20.0
    )


def flash_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), 0.0, None, True)


class FlashVarlen(nn.Module):
    """Packed tokens `[T, E]`, as the vision towers of Qwen2-VL."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        longest = (ends[1:] - ends[:-1]).max().item()
        return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], 3, H, D).unbind(1)
        found: Tensor = self.out(self.attend(q, k, v, cu_seqlens).reshape(x.shape[0], E))
        return found


class Varlen(FlashVarlen):
    """PyTorch's own function for packed tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        n = q.shape[0]
        found: Tensor = varlen_attn(q, k, v, ends, ends, n, n, window_size=(-1, 0))
        return found


class FlashDecode(nn.Module):
    """A step with a cache that is an input."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.qkv, self.own = nn.Linear(E, 3 * E), own

    def forward(self, x: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).unbind(2)
        new = {"k": k, "v": v} if self.own else {}
        y = flash_attn_with_kvcache(
            q, k_cache, v_cache, **new, cache_seqlens=cache_seqlens, causal=True
        )
        found: Tensor = y.flatten(2)
        return found


def varlen(module: nn.Module) -> Subject:
    def draw(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Any]:
        n, count = sizes["tokens"], sizes["ends"]
        ends = np.sort(rng.integers(0, n + 1, count - 2))
        every = np.concatenate([[0], ends, [n]]).astype(np.int32)
        return {"x": rng.standard_normal((n, E)), "cu_seqlens": every}

    axes = {"x": {0: "tokens"}, "cu_seqlens": {0: Axis("ends", min=2)}}
    return Subject(module.eval(), draw, axes, ["output"])


def flash_decode(own: bool) -> Subject:
    cache = torch.randn(2, 8, H, D)
    inputs = {
        "x": torch.randn(2, 1, E), "k_cache": cache, "v_cache": cache + 1,
        "cache_seqlens": torch.tensor([5, 3], dtype=torch.int32),
    }  # fmt: skip
    outputs = ["output", "k_cache_new", "v_cache_new"] if own else ["output"]
    axes = dict.fromkeys(inputs, BATCH)
    return Subject(FlashDecode(own).eval(), inputs, axes, outputs)


# -- xformers -----------------------------------------------------------------------------------


def xformers_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask(), p=0.0)


def xformers_biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    far = torch.arange(q.shape[1])
    bias = -0.1 * (far[:, None] - far).abs().float().expand(q.shape[0], H, -1, -1)
    mask = LowerTriangularMask().add_bias(bias)
    return memory_efficient_attention(q, k, v, attn_bias=mask, scale=0.5)


def xformers_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.zeros(q.shape[1], q.shape[1]).masked_fill(
        torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(2), float("-inf")
    )
    return memory_efficient_attention(q, k, v, attn_bias=bias)


def xformers_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = BlockDiagonalMask.from_seqlens([4, 6, 2])
    return memory_efficient_attention(q, k, v, attn_bias=mask)


def xformers_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within each row of a batch of fixed length that is one sequence to xformers."""
    mask = BlockDiagonalMask.from_seqlens([6] * 2).make_causal()
    flat = [t.reshape(1, -1, H, D) for t in (q, k, v)]
    return memory_efficient_attention(*flat, attn_bias=mask).view_as(q)


def fixed(module: nn.Module, *shape: int) -> Subject:
    return Subject(module.eval(), {"x": torch.randn(*shape, E)}, {}, ["output"])


# -- torch.library ------------------------------------------------------------------------------


@torch.library.custom_op("people::rotate_half", mutates_args=())
def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@rotate_half.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("people::fused_softmax", mutates_args=())
def fused_softmax(scores: Tensor, causal: bool = False) -> Tensor:
    values = scores.double().numpy()
    if causal:
        values = np.where(np.tri(*values.shape[-2:], dtype=bool), values, -np.inf)
    values = np.exp(values - values.max(-1, keepdims=True))
    return torch.from_numpy(values / values.sum(-1, keepdims=True)).to(scores.dtype)


def as_softmax(scores: Tensor, causal: bool = False) -> Tensor:
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1)


LIBRARY = torch.library.Library("people", "FRAGMENT")
LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> Tensor")
LIBRARY.define("add_into(Tensor(a!) x, Tensor y) -> ()")


@torch.library.impl(LIBRARY, "rms_norm", "CompositeExplicitAutograd")
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@torch.library.impl(LIBRARY, "add_into", "CPU")
def add_into(x: Tensor, y: Tensor) -> None:
    x.add_(y)


class Kernels(Flex):
    """A layer of a serving engine: norms, rotary and residuals by operators of its own."""

    def setup(self) -> None:
        self.weight = nn.Parameter(torch.rand(E))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(torch.ops.people.rms_norm(x, self.weight))
        angles = torch.outer(torch.arange(x.shape[1]).float(), 0.1 ** torch.arange(D // 2))
        cos, sin = (f(angles).repeat(1, 2) for f in (torch.cos, torch.sin))
        q, k = rotate_half(q, cos, sin), torch.ops.people.rotate_half(k, cos, sin)
        y = self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        torch.ops.people.add_into(y, x)
        return y


class OpaqueSoftmax(Flex):
    def attend(self, q, k, v):
        return fused_softmax(q @ k.mT * D**-0.5, causal=True) @ v


def opaque() -> Subject:
    subject = tokens(OpaqueSoftmax())
    return Subject(
        subject.module, dict(subject.inputs), {"x": TOKENS}, ["output"],
        translations={"people::fused_softmax": as_softmax},
    )  # fmt: skip


MODULES: Table = {
    "flash_attn_func, Gemma": lambda: tokens(Calls(flash_gemma, 2)),
    "flash_attn_qkvpacked_func": lambda: tokens(Calls(flash_packed)),
    "flash_attn_varlen_func": lambda: varlen(FlashVarlen()),
    "flash_attn_with_kvcache": lambda: flash_decode(False),
    "flash_attn_with_kvcache, a new key": lambda: flash_decode(True),
    "varlen_attn": lambda: varlen(Varlen()),
    "memory_efficient_attention, causal": lambda: tokens(Calls(xformers_causal)),
    "memory_efficient_attention, biased": lambda: tokens(Calls(xformers_biased)),
    "memory_efficient_attention, an added mask": lambda: tokens(Calls(xformers_added)),
    "memory_efficient_attention, blocks": lambda: fixed(Calls(xformers_blocks), 1, 12),
    "memory_efficient_attention, rows as blocks": lambda: fixed(Calls(xformers_batch), 2, 6),
    "operators of a serving engine": lambda: tokens(Kernels()),
    "an opaque softmax": opaque,
}
