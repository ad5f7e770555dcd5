"""PyTorch's rarer forms of attention, and modules with functions of autograd and of torch.jit."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from third_party.newer_masks import Flex
from third_party.of_pytorch import decoder_layer, layer
from third_party.subjects import BATCH, KEYS, TOKENS, D, E, H, Table, bounded, padding, tokens
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.utils import parametrizations, parametrize

from attn_export import Subject


class Norm(torch.autograd.Function):
    """A norm with setup_context, as of fused kernels."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x * scale * weight, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


class Tiled(torch.autograd.Function):
    """FlashAttention's loop over tiles of the keys, two of them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * q.shape[-1] ** -0.5
        total = torch.zeros_like(q)
        sums = torch.zeros(q.shape[:-1], dtype=q.dtype)[..., None]
        largest = torch.full_like(sums, -torch.inf)
        for keys, values in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True):
            scores = q @ keys.mT
            now = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, old = (scores - now).exp(), (largest - now).exp()
            sums, total = sums * old + weights.sum(-1, keepdim=True), total * old + weights @ values
            largest = now
        ctx.save_for_backward(q, k, v)
        return total / sums


class WithNorm(Flex):
    def setup(self) -> None:
        self.weight = nn.Parameter(torch.rand(D))

    def attend(self, q, k, v):
        q, k = (Norm.apply(t, self.weight, 1e-6)[0] for t in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class WithTiles(Flex):
    def attend(self, q, k, v):
        return Tiled.apply(q, k, v)


class Lora(nn.Module):
    def __init__(self, out: int, rank: int = 2) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(rank, E)), nn.Parameter(torch.randn(out, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.5 * self.b @ self.a


class Parametrized(Flex):
    """Weights by LoRA, by weight_norm and by an orthogonal map."""

    def setup(self) -> None:
        parametrize.register_parametrization(self.qkv, "weight", Lora(3 * E))
        parametrizations.weight_norm(self.out)
        self.turn = parametrizations.orthogonal(nn.Linear(D, D, bias=False))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(self.turn(q), self.turn(k), v)


# -- torch.jit ----------------------------------------------------------------------------------


def masked_softmax(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.softmax((scores * scale).masked_fill(mask, -10000.0), dim=-1)


class ScriptedFunction(Flex):
    """A fused softmax by torch.jit.script, as in Megatron's early layers."""

    def setup(self) -> None:
        self.softmax = torch.jit.script(masked_softmax)

    def attend(self, q, k, v):
        n = q.shape[2]
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        return self.softmax(q @ k.mT, hidden, 1 / math.sqrt(D)) @ v


class ScriptedPart(Flex):
    def setup(self) -> None:
        self.norm = torch.jit.script(nn.LayerNorm(D))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(self.norm(q), self.norm(k), v)


# -- scaled_dot_product_attention -----------------------------------------------------------------


class Chunk(nn.Module):
    """A chunk of queries after the keys of those before, aligned to the last key."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal_lower_right(q.shape[2], k.shape[2])
        found: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return found


class UpperLeft(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal_upper_left(q.size(-2), k.size(-2))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class Frames(nn.Module):
    """Attention within each frame of a video `[B, T, L, E]`, whose last tokens are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).movedim(3, 0).transpose(3, 4)
        mask = valid[:, :, None, None, :]  # [B, T, 1, 1, L]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(2, 3).flatten(3)


class FlatHeads(nn.Module):
    """Heads within the batch, with a padding mask that is repeated for each, as in fairseq."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (
            t.view(b, n, H, D).transpose(1, 2).reshape(b * H, n, D)
            for t in self.qkv(x).chunk(3, -1)
        )
        added = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask == 0, float("-inf"))
        added = added[:, None, :].repeat_interleave(H, 0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
        return y.view(b, H, n, D).transpose(1, 2).reshape(b, n, E)


class Decoder(nn.Module):
    """A decoder that makes its causal mask, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(decoder_layer(), 2)

    def forward(self, tgt: Tensor, memory: Tensor, memory_hidden: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        return self.decoder(
            tgt, memory, tgt_mask=mask, memory_key_padding_mask=memory_hidden, tgt_is_causal=True
        )


class UsersDecoder(nn.Module):
    """A decoder that is given a mask, which it is also told to be causal."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(decoder_layer(), 1)

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor) -> Tensor:
        return self.decoder(tgt, memory, tgt_mask=tgt_mask, tgt_is_causal=True)


class Encoder(nn.Module):
    """An encoder with padding, in its defaults: nested tensors within."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer(), 2)

    def forward(self, src: Tensor, mask: Tensor) -> Tensor:
        hidden = mask == 0
        y = self.encoder(src, src_key_padding_mask=hidden)
        return y.masked_fill(hidden[..., None], 0.0)


class Nested(Flex):
    """Sequences of other lengths in a nested tensor that is made within."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        start = torch.zeros_like(lengths)
        nested = torch.nested.narrow(x, 1, start, lengths, layout=torch.jagged).contiguous()
        q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in self.qkv(nested).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return torch.nested.to_padded_tensor(self.out(y), 0.0, (x.shape[0], x.shape[1], E))


def scores(module: nn.Module, queries: int, keys: int, kv_heads: int = H) -> Subject:
    """Return a subject of queries, keys and values in heads."""
    inputs = {
        "q": torch.randn(2, H, queries, D), "k": torch.randn(2, kv_heads, keys, D),
        "v": torch.randn(2, kv_heads, keys, D),
    }  # fmt: skip
    held = {0: "batch", 2: "key_len"}
    axes = {"q": {0: "batch", 2: "query_len"}, "k": held, "v": held}
    return Subject(module.eval(), inputs, axes, ["output"])


def chunk() -> Subject:
    subject = scores(Chunk(), 3, 7)
    return Subject(
        subject.module, dict(subject.inputs), subject.axes, ["output"],
        relations={"key_len": ">= query_len"},
    )  # fmt: skip


def frames() -> Subject:
    valid = torch.ones(2, 3, 5, dtype=torch.bool)
    valid[0, 1, 3:] = valid[1, :, 4:] = False
    inputs = {"x": torch.randn(2, 3, 5, E), "valid": valid}
    axes = {name: {0: "batch", 1: "frames", 2: "query_len"} for name in inputs}
    return Subject(Frames().eval(), inputs, axes, ["output"])


def flat_heads() -> Subject:
    inputs = {"x": torch.randn(2, 5, E), "mask": padding()}
    return Subject(FlatHeads().eval(), inputs, dict.fromkeys(inputs, TOKENS), ["output"])


def memory(module: nn.Module, name: str, given: Tensor, axes: Any) -> Subject:
    inputs = {"tgt": torch.randn(2, 5, E), "memory": torch.randn(2, 6, E), name: given}
    return Subject(module.eval(), inputs, {"tgt": TOKENS, "memory": KEYS, name: axes}, ["output"])


def encoder() -> Subject:
    inputs = {"src": torch.randn(2, 5, E), "mask": padding()}
    return Subject(Encoder().eval(), inputs, dict.fromkeys(inputs, TOKENS), ["output"])


def nested() -> Subject:
    inputs = {"x": torch.randn(2, 5, E), "lengths": torch.tensor([5, 3])}
    return Subject(Nested().eval(), inputs, {"x": TOKENS, "lengths": BATCH}, ["output"])


MODULES: Table = {
    "autograd, a norm": lambda: tokens(WithNorm()),
    "autograd, tiles": lambda: tokens(WithTiles(), axis=bounded(2)),
    "parametrizations": lambda: tokens(Parametrized()),
    "jit, a scripted function": lambda: tokens(ScriptedFunction()),
    "jit, a scripted part": lambda: tokens(ScriptedPart()),
    "causal_lower_right, a chunk": chunk,
    "causal_upper_left": lambda: scores(UpperLeft(), 4, 6, 2),
    "five dimensions with padding": frames,
    "heads within the batch with padding": flat_heads,
    "TransformerDecoder, causal": lambda: memory(
        Decoder(), "memory_hidden", padding(6) == 0, KEYS
    ),
    "TransformerDecoder, a mask that is causal": lambda: memory(
        UsersDecoder(), "tgt_mask", nn.Transformer.generate_square_subsequent_mask(5),
        {0: "query_len", 1: "query_len"},
    ),
    "TransformerEncoder with padding": encoder,
    "a nested tensor within": nested,
}  # fmt: skip
