"""Modules named as flash_attn and xformers, whose operators compute attention by loops in NumPy."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor


def loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Any = None,
    bias: Any = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend: `[L, H, D]` and `[S, G, D]` to `[L, H, D]`, and the logarithms of sums `[H, L]`."""
    queries, keys, values = (t.detach().double().numpy() for t in (q, k, v))
    y, sums = np.zeros_like(queries), np.zeros(queries.shape[1::-1])
    for h in range(queries.shape[1]):
        g = h * keys.shape[1] // queries.shape[1]
        scores = queries[:, h] @ keys[:, g].T * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[h]
        if seen is not None:
            scores = np.where(seen, scores, -np.inf)
        largest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
        weights = np.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        y[:, h] = weights @ values[:, g] / np.where(total, total, 1)
        with np.errstate(divide="ignore"):
            sums[h] = (np.log(total) + largest)[:, 0]
    return torch.from_numpy(y).to(q.dtype), torch.from_numpy(sums).float()


def aligned(length: int, keys: int, causal: bool, left: int, right: int) -> Any:
    """Return which keys queries see, the last query beside the last key: bool `[L, S]`."""
    ahead = np.arange(keys)[None] - (np.arange(length)[:, None] + keys - length)
    seen = np.ones((length, keys), bool)
    if causal or right >= 0:
        seen &= ahead <= (0 if causal else right)
    if left >= 0:
        seen &= ahead >= -left
    return seen


# -- flash_attn ---------------------------------------------------------------------------------


@torch.library.custom_op("flash_stand_in::forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_starts: Tensor, k_ends: Tensor,
    scale: float, causal: bool, left: int, right: int, softcap: float,
) -> Tensor:  # fmt: skip
    y, start = torch.zeros_like(q), 0
    for end, first, last in zip(q_ends.tolist(), k_starts.tolist(), k_ends.tolist(), strict=True):
        seen = aligned(end - start, last - first, causal, left, right)
        part = q[start:end], k[first:last], v[first:last]
        y[start:end], start = loops(*part, scale, seen, softcap=softcap)[0], end
    return y


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    n, s = q.shape[1], k.shape[1]
    return flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
        torch.arange(len(q) + 1) * n, torch.arange(len(q) + 1) * s, n, s, dropout_p,
        softmax_scale, causal, window_size, softcap,
    ).unflatten(0, (-1, n))  # fmt: skip


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, **options):
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, **options)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    keys = cu_seqlens_k[:-1], cu_seqlens_k[1:]
    return flash_forward(q, k, v, cu_seqlens_q[1:], *keys, scale, causal, *window_size, softcap)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, **options,
):  # fmt: skip
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    b, n, capacity = len(q), q.shape[1], k_cache.shape[1]
    lengths = torch.as_tensor(capacity if cache_seqlens is None else cache_seqlens).expand(b)
    if k is not None:
        for row, length in enumerate(lengths.tolist()):
            k_cache[row, length : length + k.shape[1]] = k[row]
            v_cache[row, length : length + k.shape[1]] = v[row]
        lengths = lengths + k.shape[1]
    starts = torch.arange(b) * capacity
    return flash_forward(
        q.flatten(0, 1), k_cache.flatten(0, 1), v_cache.flatten(0, 1), torch.arange(1, b + 1) * n,
        starts, starts + lengths, scale, causal, *window_size, softcap,
    ).unflatten(0, (b, n))  # fmt: skip


# -- xformers -----------------------------------------------------------------------------------


class LowerTriangularMask:
    def materialize(self, shape: Sequence[int], dtype=torch.float32, device="cpu") -> Tensor:
        return torch.full(tuple(shape), -torch.inf, dtype=dtype, device=device).triu(1)

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def materialize(self, shape: Sequence[int], dtype=torch.float32, device="cpu") -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias


@dataclasses.dataclass
class _SeqLenInfo:
    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, lengths: Sequence[int]) -> _SeqLenInfo:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        return cls(torch.tensor(starts, dtype=torch.int32), max(lengths), min(lengths), starts)

    def intervals(self) -> Any:
        return zip(self.seqstart_py, self.seqstart_py[1:], strict=False)


@dataclasses.dataclass
class BlockDiagonalMask:
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None):
        q = _SeqLenInfo.from_seqlens(q_seqlen)
        return cls(q, _SeqLenInfo.from_seqlens(kv_seqlen) if kv_seqlen else q)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def _create_block_mask(self, shape: Sequence[int], dtype: Any, device: Any) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def materialize(self, shape: Sequence[int], dtype=torch.float32, device="cpu") -> Tensor:
        mask = torch.full(tuple(shape[-2:]), -torch.inf, dtype=dtype, device=device)
        pairs = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for (a, b), (c, d) in pairs:
            mask[a:b, c:d] = self._create_block_mask((b - a, d - c), dtype, device)
        return mask.expand(tuple(shape))


class BlockDiagonalCausalMask(BlockDiagonalMask):
    def _create_block_mask(self, shape: Sequence[int], dtype: Any, device: Any) -> Tensor:
        return LowerTriangularMask().materialize(shape, dtype, device)


@torch.library.custom_op("xformers_stand_in::forward", mutates_args=())
def xformers_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> Tensor:  # [B, L, H, D]
    y = torch.zeros_like(q)
    for row in range(len(q)):
        added = None if bias is None else bias[row].double().numpy()
        y[row] = loops(q[row], k[row], v[row], scale, bias=added)[0]
    return y


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    q, k, v = (t if t.dim() == 4 else t[:, :, None] for t in (query, key, value))
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if attn_bias is not None and not isinstance(attn_bias, Tensor):
        attn_bias = attn_bias.materialize(shape, q.dtype)
    bias = None if attn_bias is None else attn_bias.expand(shape)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return xformers_forward(q, k, v, bias, scale).reshape(query.shape)


def install() -> None:
    """Load the stand-ins where the packages are not loaded."""
    masks = {each.__name__: each for each in (
        LowerTriangularMask, LowerTriangularMaskWithTensorBias, BlockDiagonalMask,
        BlockDiagonalCausalMask,
    )}  # fmt: skip
    flash = {each.__name__: each for each in (
        flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache,
    )}  # fmt: skip
    memory = {"memory_efficient_attention": memory_efficient_attention, **masks}
    for name, holds in {
        "flash_attn": flash, "flash_attn.flash_attn_interface": flash, "xformers": {},
        "xformers.ops": memory, "xformers.ops.fmha": memory, "xformers.ops.fmha.attn_bias": masks,
    }.items():  # fmt: skip
        made: Any = ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(made).update(holds)
        sys.modules.setdefault(name, made)
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, sys.modules[name])
