"""FlexAttention whose masks are made of inputs, as people write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from third_party.newer_masks import Flex, causal
from third_party.subjects import BATCH, TOKENS, D, E, H, Table
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

from attn_export import Axis, Subject


class Documents(Flex):
    def attend(self, q, k, v, document_ids):
        def same(b, h, q_idx, kv_idx):
            return document_ids[b, q_idx] == document_ids[b, kv_idx]

        n = q.shape[2]
        mask = create_block_mask(and_masks(causal, same), q.shape[0], None, n, n, q.device)
        return flex_attention(q, k, v, block_mask=mask)


class PackedDocuments(Flex):
    """One packed sequence; as in attention-gym, positions start anew in each document."""

    def attend(self, q, k, v, offsets):
        counts = offsets[1:] - offsets[:-1]
        numbers = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)

        def document(b, h, q_idx, kv_idx):
            inner = causal(b, h, q_idx - offsets[numbers[q_idx]], kv_idx - offsets[numbers[kv_idx]])
            return (numbers[q_idx] == numbers[kv_idx]) & inner

        n = q.shape[2]
        mask = create_block_mask(document, None, None, n, n, device="cpu")
        return flex_attention(q, k, v, block_mask=mask)


class PrefixLM(Flex):
    kv_heads = 2

    def attend(self, q, k, v, prefix_length):
        def prefix(b, h, q_idx, kv_idx):
            return kv_idx <= prefix_length[b]

        b, _, n, _ = q.shape
        mask = create_block_mask(or_masks(prefix, causal), b, None, n, n, device=q.device)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


class Transfusion(Flex):
    """Causal, and both ways within each image."""

    def attend(self, q, k, v, images):
        def mod(b, h, q_idx, kv_idx):
            start, end = images[b, :, 0], images[b, :, 0] + images[b, :, 1]
            both = (q_idx >= start) & (q_idx < end) & (kv_idx >= start) & (kv_idx < end)
            return (q_idx >= kv_idx) | both.any()

        b, _, n, _ = q.shape
        mask = create_block_mask(mod, b, None, n, n, device=q.device)
        return flex_attention(q, k, v, block_mask=mask)


class PaddedCausal(Flex):
    def attend(self, q, k, v, lengths):
        def padding(b, h, q_idx, kv_idx):
            return (kv_idx < lengths[b]) & (q_idx < lengths[b])

        b, _, n, _ = q.shape
        mask = create_block_mask(and_masks(padding, causal), b, H, n, n, device=q.device)
        return flex_attention(q, k, v, block_mask=mask)


class Paged(nn.Module):
    """Queries of one step over pages of keys, by the logical place of each page."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, position: Tensor) -> Tensor:
        def mod(b, h, q_idx, physical):
            logical = pages[b, physical // 4]
            place = logical * 4 + physical % 4
            return (logical >= 0) & (position[b] + q_idx >= place)

        b, _, n, _ = q.shape
        mask = create_block_mask(mod, b, None, n, k.shape[2], device=q.device)
        k, v = k.expand(b, -1, -1, -1), v.expand(b, -1, -1, -1)
        return flex_attention(q, k, v, block_mask=mask)


class GptFast(nn.Module):
    """A static cache with a mask of all positions, of which the present ones are used."""

    def __init__(self) -> None:
        super().__init__()
        self.causal = create_block_mask(causal, 1, 1, 32, 32, device="cpu")

    def forward(self, q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        def offset(b, h, q_idx, kv_idx):
            return causal(b, h, q_idx + position[0], kv_idx)

        mask = self.causal
        n = q.shape[2]
        mask = create_block_mask(offset, 1, 1, n, keys.shape[2], device=q.device)
        return flex_attention(q, keys, values, block_mask=mask, enable_gqa=True)


class Memory(nn.Module):
    """Cross-attention with memory of some length in each row."""

    def forward(self, q: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        def valid(b, h, q_idx, kv_idx):
            return kv_idx < lengths[b]

        b, _, n, _ = q.shape
        mask = create_block_mask(valid, b, None, n, memory.shape[2], device=q.device)
        return flex_attention(q, memory, memory, block_mask=mask)


def of_tokens(module: nn.Module, name: str, given: Tensor, axes: Mapping[int, Any]) -> Subject:
    """Return a subject of tokens beside another input."""
    inputs = {"x": torch.randn(2, 6, E), name: given}
    return Subject(module.eval(), inputs, {"x": TOKENS, name: axes}, ["output"])


def lengths() -> Tensor:
    return torch.tensor([6, 3])


def packed() -> Subject:
    def draw(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Any]:
        n, count = sizes["tokens"], sizes["documents+1"]
        ends = np.sort(rng.integers(0, n + 1, count - 2))
        offsets = np.concatenate([[0], ends, [n]])
        return {"x": rng.standard_normal((1, n, E)), "offsets": offsets}

    axes = {"x": {1: "tokens"}, "offsets": {0: Axis("documents+1", min=2)}}
    return Subject(PackedDocuments().eval(), draw, axes, ["output"])


def images() -> Subject:
    spans = torch.tensor([[[1, 2], [4, 1]], [[0, 3], [3, 3]]])
    return of_tokens(Transfusion(), "images", spans, {0: "batch", 1: "images"})


def paged() -> Subject:
    q, cache = torch.randn(2, H, 1, D), torch.randn(1, H, 24, D)
    pages = torch.tensor([[0, -1, 1, -1, -1, 2], [-1, 0, -1, 1, -1, -1]])
    inputs = {"q": q, "k": cache, "v": cache + 1, "pages": pages, "position": torch.tensor([9, 5])}
    axes = {"q": BATCH, "pages": BATCH, "position": BATCH}
    return Subject(Paged().eval(), inputs, axes, ["output"])


def gpt_fast() -> Subject:
    cache = torch.randn(2, 2, 32, D)
    inputs = {
        "q": torch.randn(2, H, 3, D), "keys": cache, "values": -cache,
        "position": torch.arange(4, 7),
    }  # fmt: skip
    keys = {0: "batch", 2: "query_len"}
    axes = {"q": keys, "keys": BATCH, "values": BATCH, "position": {0: "query_len"}}
    return Subject(GptFast().eval(), inputs, axes, ["output"])


def memory() -> Subject:
    inputs = {
        "q": torch.randn(2, H, 5, D), "memory": torch.randn(2, H, 6, D), "lengths": lengths(),
    }  # fmt: skip
    axes = {
        "q": {0: "batch", 2: "query_len"},
        "memory": {0: "batch", 2: "key_len"},
        "lengths": BATCH,
    }
    return Subject(Memory().eval(), inputs, axes, ["output"])


MODULES: Table = {
    "flex, documents": lambda: of_tokens(
        Documents(), "document_ids", torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 3, 3]]), TOKENS
    ),
    "flex, packed documents": packed,
    "flex, a prefix": lambda: of_tokens(PrefixLM(), "prefix_length", lengths() - 2, BATCH),
    "flex, images in text": images,
    "flex, causal and padded": lambda: of_tokens(PaddedCausal(), "lengths", lengths(), BATCH),
    "flex, pages": paged,
    "flex, a static cache": gpt_fast,
    "flex, memory": memory,
}
