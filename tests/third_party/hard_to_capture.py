"""Attention whose code is hard to capture: parts by values, mods of vectors, compiled weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from third_party.by_hand import Own, plain
from third_party.projected import Projected, beside
from third_party.subjects import BATCH, TOKENS, D, E, H, Table, ids, padding, taken, tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Axis, Subject


class Vision(nn.Module):
    """Qwen2-VL's attention over packed patches `[patches, E]`, whose images `cu_seqlens` part."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, angles: Tensor) -> Tensor:
        n = hidden.shape[0]
        q, k, v = self.qkv(hidden).reshape(n, 3, H, -1).permute(1, 0, 2, 3).unbind(0)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        q, k = (
            t * cos + torch.cat([-t[..., D // 2 :], t[..., : D // 2]], -1) * sin for t in (q, k)
        )
        image = (torch.arange(n)[:, None] >= cu_seqlens[None, 1:]).sum(-1)
        mask = (image[:, None] == image[None])[None]
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        found = attend(q[None], k[None], v[None], attn_mask=mask).squeeze(0).transpose(0, 1)
        return self.proj(found.reshape(n, -1))


class VisionOfSlices(Vision):
    """The same with a loop over the images, as its eager code is."""

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, angles: Tensor) -> Tensor:
        n = hidden.shape[0]
        q, k, v = self.qkv(hidden + angles.repeat(1, H)).reshape(n, 3, H, -1).permute(1, 2, 0, 3)
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        parts = (t.split(lengths, 1) for t in (q, k, v))
        found = torch.cat([attend(*each) for each in zip(*parts, strict=True)], 1)
        return self.proj(found.transpose(0, 1).reshape(n, -1))


def patches(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Any]:
    n = sizes["patches"]
    ends = np.sort(rng.integers(0, n + 1, sizes["offsets"] - 2))
    offsets = np.concatenate([[0], ends, [n]]).astype(np.int32)
    drawn = {"hidden": rng.standard_normal((n, E)), "angles": rng.standard_normal((n, D))}
    return {**drawn, "cu_seqlens": offsets}


def vision(module: nn.Module) -> Subject:
    at = {0: "patches"}
    axes = {"hidden": at, "cu_seqlens": {0: Axis("offsets", min=2)}, "angles": at}
    return Subject(module.eval(), patches, axes, ["output"])


def flags(m: Projected, x: Tensor, flags: Tensor) -> Tensor:
    """See the tokens that share one of 3 flags, by a `mask_mod`."""

    def shared(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (flags[b, i] & flags[b, j]).any() | (i == j)

    n = x.shape[1]
    mask = create_block_mask(shared, x.shape[0], None, n, n, device="cpu")
    return m.output(flex_attention(*m.project(x), block_mask=mask))


def apart(m: Projected, x: Tensor, points: Tensor) -> Tensor:
    """Lower the scores of tokens whose points are far from each other."""

    def near(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - (points[b, i] - points[b, j]).norm()

    return m.output(flex_attention(*m.project(x), score_mod=near))


def traced() -> Subject:
    """Return a subject of which a part was traced."""
    x = torch.randn(2, 5, E)
    return taken(torch.jit.trace(Own(plain).eval(), x), {"x": x}, {"x": TOKENS}, take=F.relu)


def of_quantized() -> Subject:
    module = nn.TransformerEncoderLayer(E, H, 48, batch_first=True).eval()
    return tokens(torch.ao.quantization.quantize_dynamic(module, {nn.Linear}), name="src")


def big_bird(axes: Mapping[int, Any]) -> Subject:
    from transformers import BigBirdConfig, BigBirdModel

    config = BigBirdConfig(
        vocab_size=50, hidden_size=E, num_hidden_layers=1, num_attention_heads=H, block_size=4,
        intermediate_size=48, num_random_blocks=1, max_position_embeddings=128,
    )  # fmt: skip
    inputs = {"input_ids": ids(length=64), "attention_mask": padding(64)}
    return taken(BigBirdModel(config), inputs, dict.fromkeys(inputs, axes), use_cache=False)


FLAGS = torch.tensor([[[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]]] * 2).bool()
MODULES: Table = {
    "Qwen2-VL, packed": lambda: vision(Vision()),
    "Qwen2-VL, slices": lambda: vision(VisionOfSlices()),
    "flags that are shared": lambda: beside(flags, FLAGS, {"other": TOKENS}),
    "points apart": lambda: beside(apart, torch.randn(2, 5, 3), {"other": TOKENS}),
    "BigBird": lambda: big_bird(BATCH),
    "BigBird, any length": lambda: big_bird(TOKENS),
    "quantize_dynamic": of_quantized,
    "traced": traced,
}
