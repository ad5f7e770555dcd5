"""FlexAttention of users' modules becomes one `Attention` node, or operations that are right."""

# ruff: noqa: ARG005
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import operators, right_graphs
from shared import extended
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

from attn_export import Subject
from attn_export.errors import ExportError, UsageError
from attn_export.export.export import export

H, HKV, D = 4, 2, 4
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
TOKENS = {0: "batch", 1: "query_len"}


class Flexible(nn.Module):
    def __init__(self, attend: Callable[..., Any], heads: int = H) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv = nn.Linear(16, H * D), nn.Linear(16, 2 * heads * D)
        self.attend, self.gqa = attend, heads != H
        self.slopes = nn.Buffer(0.5 ** torch.arange(1.0, H + 1))
        self.table = nn.Parameter(torch.randn(H, 33))
        self.compiled = torch.compile(flex_attention)

    def forward(self, x: Tensor, ids: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (H, D)).transpose(1, 2)
        kv = self.kv(x if memory is None else memory).unflatten(-1, (2, -1, D))
        k, v = kv.transpose(1, 3).unbind(2)
        y = self.attend(self, q, k, v) if ids is None else self.attend(self, q, k, v, ids)
        return y if isinstance(y, tuple) else y.transpose(1, 2).flatten(2)


def causal(b, h, q, kv):
    return q >= kv


def window(b, h, q, kv):
    return (q - kv).abs() <= 2


def blocks(mask, q, k, heads=None, batch=None):
    return create_block_mask(mask, batch, heads, q.shape[2], k.shape[2], device="cpu")


def masked(mask) -> Callable[..., Tensor]:
    def attend(m, q, k, v):
        return flex_attention(q, k, v, block_mask=blocks(mask, q, k), enable_gqa=m.gqa)

    return attend


def scored(make) -> Callable[..., Tensor]:
    def attend(m, q, k, v):
        return flex_attention(q, k, v, score_mod=make(m), enable_gqa=m.gqa)

    return attend


def documents(m, q, k, v, ids):
    def same(b, h, i, j):
        return (ids[b, i] == ids[b, j]) & (i >= j)

    return flex_attention(q, k, v, block_mask=blocks(same, q, k, batch=q.shape[0]))


def prefix(m, q, k, v, ids):
    def seen(b, h, i, j):
        return j < ids[b]

    return flex_attention(
        q, k, v, block_mask=blocks(or_masks(causal, seen), q, k, None, q.shape[0])
    )


def alibi(m):
    return lambda score, b, h, i, j: score + m.slopes[h] * (j - i)


def softcap_causal(m, q, k, v):
    def cap(score, b, h, i, j):
        score = torch.tanh(score / 3) * 3
        return torch.where(i >= j, score, -float("inf"))

    return m.compiled(q, k, v, score_mod=cap, scale=0.7, enable_gqa=m.gqa)


def relative(m):
    return lambda score, b, h, i, j: score + m.table[h, (i - j).clamp(-16, 16) + 16]


def soft_gate(m):
    return lambda score, b, h, i, j: torch.where(i - j > 3, score * 0.5, score)


def biased_window(m, q, k, v):
    mask = blocks(and_masks(causal, window), q, k)
    return flex_attention(q, k, v, alibi(m), mask, enable_gqa=m.gqa)


def with_statistics(m, q, k, v):
    y, lse = flex_attention(q, k, v, block_mask=blocks(causal, q, k), return_lse=True)
    return y.transpose(1, 2).flatten(2) + lse.mean(1)[..., None]


@functools.lru_cache
def kept_mask(mask, length):
    return create_block_mask(mask, None, None, length, length, device="cpu")


def cached(m, q, k, v):
    return flex_attention(q, k, v, block_mask=kept_mask(causal, q.shape[2]))


MODULES: dict[str, tuple[Callable[..., Any], int, str, int]] = {
    "plain": (lambda m, q, k, v: flex_attention(q, k, v, enable_gqa=m.gqa), HKV, "", 1),
    "causal with shared heads": (masked(causal), HKV, "", 1),
    "causal window with ALiBi": (biased_window, HKV, "", 1),
    "documents": (documents, H, "ids", 1),
    "softcap, causal, compiled": (softcap_causal, HKV, "", 1),
    "relative": (scored(relative), H, "", 1),
    "statistics": (with_statistics, H, "", 1),
    "a cached mask": (cached, H, "", 1),
    "scores by distance": (scored(soft_gate), H, "", 0),
}


IN_SHORT = {"plain", "relative", "scores by distance"}


def subject_of(name: str) -> Subject:
    attend, heads, extra, _ = MODULES[name]
    inputs, axes = {"x": X}, {"x": TOKENS}
    if extra == "ids":
        inputs["ids"] = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 3]])
        axes["ids"] = TOKENS
    elif extra == "spans":
        inputs["ids"] = torch.tensor([[[0, 3], [3, 5]], [[1, 2], [2, 5]]])
        axes["ids"] = {0: "batch", 1: "spans"}
    elif extra == "prefix":
        inputs["ids"], axes["ids"] = torch.tensor([0, 3]), {0: "batch"}
    elif extra:
        inputs["memory"], axes["memory"] = X[:, [0, 1, 2, 3]], {0: "batch", 1: "key_len"}
    return Subject(Flexible(attend, heads).eval(), inputs, axes, ["y"])


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("name", extended(MODULES, IN_SHORT.__contains__))
def test_flex_attention_passes_in_one_node_where_it_can(name: str):
    nodes = operators(right_graphs(subject_of(name))["model.onnx"])
    assert nodes.count("Attention") == MODULES[name][3]
    assert ("Softmax" in nodes) == (not MODULES[name][3])


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_mods_in_half_precision_are_taken_although_they_round_otherwise():
    def seen(s, b, h, q, kv):
        return torch.where(q >= kv, s, float("-inf"))

    module = Flexible(lambda m, q, k, v: flex_attention(q, k, v, score_mod=seen), heads=H)
    inputs, axes = {"x": X.half()}, {"x": TOKENS}
    model = export(Subject(module.half().eval(), inputs, axes, ["y"])).model
    assert "Attention" in [node.op_type for node in model.graph]


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_block_masks_of_another_place_are_refused_with_what_to_write():
    mask = create_block_mask(causal, None, None, 5, 5, device="cpu")
    module = Flexible(lambda m, q, k, v: flex_attention(q, k, v, block_mask=mask)).eval()
    subject = Subject(module, {"x": X}, {"x": TOKENS}, ["y"])
    said = r"sizes 1, 1, 5, 5.*; make it in forward: create_block"
    with torch.inference_mode(), pytest.raises(ExportError, match=said):
        subject.call(module, subject.draw({"batch": 2, "query_len": 3}, "other"))
    with pytest.raises(UsageError, match=r"bm\.mask_mod is a function.*make BlockMask in forward"):
        Subject(TakesMask().eval(), {"x": X, "bm": mask}, {"x": TOKENS}, ["y"])


class TakesMask(nn.Module):
    def forward(self, x: Tensor, bm: Any) -> Tensor:
        return flex_attention(x[:, None], x[:, None], x[:, None], block_mask=bm)
