"""FlexAttention and masks by functions, as people write them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from third_party.subjects import BATCH, TOKENS, D, E, H, Table, bounded, ids, taken, tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    create_mask,
    flex_attention,
)

from attn_export import Subject


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding(size: int):
    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= size) & (q_idx >= kv_idx)

    return window


class Flex(nn.Module):
    """Self-attention of tokens `[B, L, E]`; `attend` takes queries, keys and values."""

    kv_heads = H

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, E + 2 * self.kv_heads * D), nn.Linear(E, E)
        self.setup()

    def setup(self) -> None:
        """Make what a class needs beside."""

    def heads(self, x: Tensor) -> list[Tensor]:
        parts = self.qkv(x).split([E, self.kv_heads * D, self.kv_heads * D], -1)
        return [part.unflatten(-1, (-1, D)).transpose(1, 2) for part in parts]

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        y: Tensor = self.attend(*self.heads(x), **others)
        found: Tensor = self.out(y.transpose(1, 2).reshape(x.shape[0], -1, E))
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **others: Tensor) -> Tensor:
        raise NotImplementedError


class CausalScores(Flex):
    def attend(self, q, k, v):
        def mod(score, b, h, q_idx, kv_idx):
            return torch.where(q_idx >= kv_idx, score, -float("inf"))

        return flex_attention(q, k, v, score_mod=mod)


class SlidingWindow(Flex):
    def setup(self) -> None:
        self.compiled = torch.compile(flex_attention, dynamic=False)

    def attend(self, q, k, v):
        length = q.shape[-2]
        mask = create_block_mask(sliding(3), None, None, length, length, device=q.device)
        return self.compiled(q, k, v, block_mask=mask)


class FixedMask(Flex):
    """A block mask of one size, made once."""

    def setup(self) -> None:
        self.mask = create_block_mask(sliding(4), None, None, 16, 16, device="cpu")

    def attend(self, q, k, v):
        return flex_attention(q, k, v, block_mask=self.mask)


@functools.lru_cache
def cached_mask(mod, b, h, length, device):
    return create_block_mask(mod, b, h, length, length, device=device)


class CachedMask(Flex):
    """As in attention-gym: a block mask per length, kept."""

    def attend(self, q, k, v):
        mask = cached_mask(causal, None, None, q.shape[2], q.device)
        return flex_attention(q, k, v, block_mask=mask)


class CompiledMask(Flex):
    def attend(self, q, k, v):
        mask = create_block_mask(causal, 1, 1, q.size(2), k.size(2), q.device, _compile=True)
        return flex_attention(q, k, v, block_mask=mask)


class Alibi(Flex):
    def attend(self, q, k, v):
        def alibi(score, b, h, q_idx, kv_idx):
            scale = torch.exp2(-((h + 1) * 8.0 / H))
            return score + (kv_idx - q_idx) * scale

        n = q.shape[2]
        mask = create_block_mask(causal, None, None, n, n, device=q.device)
        return flex_attention(q, k, v, score_mod=alibi, block_mask=mask)


class Gemma(Flex):
    """Capped scores in a window, with shared heads."""

    kv_heads = 2

    def attend(self, q, k, v):
        def cap(score, b, h, q_idx, kv_idx):
            return 20.0 * torch.tanh(score / 20.0)

        n = q.shape[2]
        mask = create_block_mask(sliding(4), None, None, n, n, device=q.device)
        return flex_attention(
            q, k, v, cap, mask, scale=0.2, enable_gqa=True, kernel_options={"BLOCK_M": 32}
        )


class T5(Flex):
    def setup(self) -> None:
        self.bias = nn.Embedding(16, H)

    def attend(self, q, k, v):
        def bucket(distance):
            side = (distance > 0).to(torch.long) * 8
            distance = distance.abs()
            far = 4 + (torch.log(distance.float() / 4) / math.log(16) * 4).long()
            return side + torch.where(distance < 4, distance, far.clamp(max=7))

        def mod(score, b, h, q_idx, kv_idx):
            return score + self.bias.weight[bucket(kv_idx - q_idx), h]

        return flex_attention(q, k, v, score_mod=mod, scale=1.0)


class Natten(Flex):
    """Neighbours of 3 x 3 on a canvas of 4 x 5, moved inwards at its edges."""

    def attend(self, q, k, v):
        def get_x_y(index):
            return index // 5, index % 5

        def natten(b, h, q_idx, kv_idx):
            (q_x, q_y), (kv_x, kv_y) = get_x_y(q_idx), get_x_y(kv_idx)
            center_x, center_y = q_x.clamp(1, 4 - 1 - 1), q_y.clamp(1, 5 - 1 - 1)
            return ((center_x - kv_x).abs() <= 1) & ((center_y - kv_y).abs() <= 1)

        mask = create_block_mask(natten, 1, 1, 20, 20, device=q.device, BLOCK_SIZE=(16, 16))
        return flex_attention(q, k, v, block_mask=mask)


class Dilated(Flex):
    def attend(self, q, k, v):
        def dilated(b, h, q_idx, kv_idx):
            diff = torch.abs(q_idx - kv_idx)
            return (diff <= 6) & (diff % 2 == 0)

        n = q.shape[2]
        return flex_attention(
            q, k, v, block_mask=create_block_mask(dilated, None, None, n, n, "cpu")
        )


class HeadWindows(Flex):
    def setup(self) -> None:
        self.register_buffer("windows", torch.tensor([1, 2, 4, 64]))

    def attend(self, q, k, v):
        def mod(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx < self.windows[h])

        n = q.shape[2]
        mask = create_block_mask(mod, None, H, n, n, device=q.device)
        return flex_attention(q, k, v, block_mask=mask)


class Forgetting(Flex):
    """Forgetting attention: a bias from gates that the tokens give."""

    def setup(self) -> None:
        self.gate = nn.Linear(E, H)

    def forward(self, x):
        q, k, v = self.heads(x)
        decay = nn.functional.logsigmoid(self.gate(x)).cumsum(1).transpose(1, 2)

        def mod(score, b, h, q_idx, kv_idx):
            return score + decay[b, h, q_idx] - decay[b, h, kv_idx]

        mask = create_block_mask(causal, None, None, x.shape[1], x.shape[1], device=x.device)
        y = flex_attention(q, k, v, mod, mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Sinks(Flex):
    """Sinks from the logarithm of the sums, as transformers does for GPT-OSS."""

    def setup(self) -> None:
        self.sinks = nn.Parameter(torch.randn(H))

    def attend(self, q, k, v):
        n = q.shape[2]
        mask = create_block_mask(causal, None, None, n, n, device=q.device)
        y, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
        return y * torch.sigmoid(lse - self.sinks[None, :, None])[..., None]


class Merged(Flex):
    """Attention to two halves of the keys, merged by the sums that return_aux gives."""

    def attend(self, q, k, v):
        half = k.shape[2] // 2
        parts = [(k[:, :, :half], v[:, :, :half]), (k[:, :, half:], v[:, :, half:])]
        found = [flex_attention(q, *part, return_aux=AuxRequest(lse=True)) for part in parts]
        sums = torch.stack([aux.lse for _, aux in found])
        weights = sums.softmax(0)[..., None]
        return sum(weight * y for weight, (y, _) in zip(weights, found, strict=True))


class Largest(Flex):
    def attend(self, q, k, v):
        y, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
        return y * (aux.max_scores - aux.lse).exp()[..., None]


class AsAMask(Flex):
    """A mask by functions for scaled_dot_product_attention."""

    def attend(self, q, k, v):
        n = q.shape[2]
        mask = create_mask(sliding(3), 1, 1, n, n, device=q.device)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def transformer(kind: str, **options: Any) -> Subject:
    """Return a subject of a model of transformers with FlexAttention."""
    import transformers

    settings = {
        "vocab_size": 50, "hidden_size": E, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": H, "num_key_value_heads": 2, "head_dim": D, "pad_token_id": 0,
        "attn_implementation": "flex_attention", "use_cache": False, **options,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**settings)
    inputs = {"input_ids": ids()}
    return taken(getattr(transformers, f"{kind}Model")(config), inputs, {"input_ids": TOKENS})


def fixed(module: nn.Module, length: int) -> Subject:
    """Return a subject of tokens of one length."""
    inputs = {"x": torch.randn(2, length, E)}
    return Subject(module.eval(), inputs, {"x": BATCH}, ["output"])


MODULES: Table = {
    "flex, causal by scores": lambda: tokens(CausalScores()),
    "flex, a window, compiled": lambda: tokens(SlidingWindow()),
    "flex, a mask of one size made once": lambda: fixed(FixedMask(), 16),
    "flex, a cached mask": lambda: tokens(CachedMask()),
    "flex, a compiled mask": lambda: tokens(CompiledMask()),
    "flex, ALiBi": lambda: tokens(Alibi()),
    "flex, Gemma": lambda: tokens(Gemma()),
    "flex, T5's bias": lambda: tokens(T5()),
    "flex, neighbours": lambda: fixed(Natten(), 20),
    "flex, dilated": lambda: tokens(Dilated()),
    "flex, windows of heads": lambda: tokens(HeadWindows()),
    "flex, forgetting": lambda: tokens(Forgetting()),
    "flex, sinks": lambda: tokens(Sinks()),
    "flex, merged halves": lambda: tokens(Merged(), axis=bounded(2)),
    "flex, largest scores": lambda: tokens(Largest()),
    "flex, as a mask": lambda: tokens(AsAMask()),
    "flex, Llama": lambda: transformer("Llama"),
    "flex, Gemma2": lambda: transformer("Gemma2", sliding_window=3),
}
