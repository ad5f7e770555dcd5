"""Attention with inputs of tied sizes: tables of distances, memories, caches, stacked rows."""

from __future__ import annotations

import math

import torch
from third_party.projected import Projected, beside, heads, shifted
from third_party.subjects import TOKENS, D, E, H, Table
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Subject

r = torch.randn


def distances(m: Projected, x: Tensor, table: Tensor) -> Tensor:
    n = x.shape[1]
    i = torch.arange(n)
    bias = table[:, i[None] - i[:, None] + n - 1]
    return m.output(attend(*m.project(x), attn_mask=bias[None]))


def conformer(m: Projected, x: Tensor, positions: Tensor) -> Tensor:
    q, k, v = m.project(x)
    p = heads(m.r(positions))
    assert p.shape[2] == 2 * x.shape[1] - 1, f"{p.shape[2]} positions for {x.shape[1]} tokens"
    scores = (q + m.u) @ k.mT + shifted((q + m.w) @ p.mT, k.shape[2])
    return m.output((scores / math.sqrt(D)).softmax(-1) @ v)


class Stacked(nn.Module):
    """Heads lie in the batch; the mask has one row for each."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = torch.baddbmm(mask, query, key.mT, alpha=D**-0.5)
        return torch.bmm(scores.softmax(-1), value)


class StackedHeads(nn.Module):
    """Heads lie in the batch; the mask of hidden keys has one row for each batch element."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        scores = torch.bmm(query, key.mT).view(hidden.shape[0], H, query.shape[1], -1)
        scores = scores.masked_fill(hidden[:, None, None], -1e9).view(
            -1, query.shape[1], key.shape[1]
        )
        return torch.bmm(scores.softmax(-1), value)


def masked_rows(m: Projected, x: Tensor, mask: Tensor) -> Tensor:
    """Give `nn.MultiheadAttention` a mask `[B * H, L, L]`."""
    found: Tensor = m.inner(x, x, x, attn_mask=mask, need_weights=False)[0]
    return found


def images_per_text(m: Projected, x: Tensor, images: Tensor) -> Tensor:
    """Attend to all images of a text, `[images, patches, E]`."""
    media = images.view(x.shape[0], -1, E)
    return m.output(attend(*m.project(x, media)))


class Beams(nn.Module):
    """Each of the beams attends to what its batch element was encoded to."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, hidden: Tensor, encoded: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        count = scores.shape[1]
        encoded = encoded[:, None].expand(-1, count, -1, -1).flatten(0, 1)
        found = self.cross(hidden, encoded, encoded, need_weights=False)[0]
        return found, scores + found[:, -1].mean(-1).view(-1, count)


def halved_mask(m: Projected, x: Tensor, seen: Tensor) -> Tensor:
    """Attend to pairs of tokens, of which a mask `[B, L / 2]` says which are seen."""
    q, k, v = m.project(x, x.unflatten(1, (-1, 2)).mean(2))
    return m.output(attend(q, k, v, attn_mask=seen[:, None, None]))


def interleaved(m: Projected, x: Tensor, others: tuple[Tensor, Tensor]) -> Tensor:
    """Attend among states and actions in turn, `[B, 2 * L, E]`; return the actions."""
    actions, seen = others
    both = torch.stack([x, actions], 2).flatten(1, 2)
    n = both.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril() & (seen[:, None] | torch.eye(n).bool())
    found = m.output(attend(*m.project(both), attn_mask=mask[:, None]))
    return found.unflatten(1, (-1, 2))[:, :, 1]


def joint(m: Projected, x: Tensor, others: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attend among the tokens of a text and of an image, with angles for all of them."""
    image, angles = others
    n = x.shape[1]
    q, k, v = m.project(torch.cat([x, image], 1))
    cos, sin = angles.cos(), angles.sin()

    def turn(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    found = m.output(attend(turn(q), turn(k), v))
    return found[:, :n], found[:, n:]


def frames(m: Projected, x: Tensor, others: tuple[Tensor, Tensor]) -> Tensor:
    """Attend to all patches of all frames `[B, frames, patches, E]`."""
    video, bias = others
    q, k, v = m.project(x, video.flatten(1, 2))
    return m.output(attend(q, k, v, attn_mask=bias[:, None, None]))


def retrieved(m: Projected, x: Tensor, neighbours: Tensor) -> Tensor:
    """Let each chunk of 4 tokens attend to its own neighbours `[B, chunks, R, E]`."""
    b, chunks = neighbours.shape[:2]
    parts = x.view(b * chunks, -1, E)
    found = m.output(attend(*m.project(parts, neighbours.flatten(0, 1))))
    return found.view(b, -1, E)


def class_token(m: Projected, x: Tensor, table: Tensor) -> Tensor:
    """Put a class token first, which has a position, too."""
    x = torch.cat([m.u.view(1, 1, E).expand(x.shape[0], -1, -1), x], 1) + table
    return m.output(attend(*m.project(x)))


def added(m: Projected, x: Tensor, mask: Tensor) -> Tensor:
    return m.output(attend(*m.project(x), attn_mask=mask))


def same_document(m: Projected, x: Tensor, document: Tensor) -> Tensor:
    return m.output(
        attend(*m.project(x), attn_mask=(document[:, :, None] == document[:, None])[:, None])
    )


def memory_hidden(m: Projected, x: Tensor, others: tuple[Tensor, Tensor]) -> Tensor:
    memory, hidden = others
    q, k, v = m.project(x, memory)
    scores = (q @ k.mT * D**-0.5).masked_fill(hidden[:, None, None], -torch.inf)
    return m.output(scores.softmax(-1) @ v)


def sliced_tables(m: Projected, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Take the first rows of tables of cosines and sines that are longer than the tokens."""
    cos, sin = (t[: x.shape[1]] for t in tables)
    q, k, v = m.project(x)
    q, k = (t * cos + torch.cat([-t[..., D // 2 :], t[..., : D // 2]], -1) * sin for t in (q, k))
    return m.output(attend(q, k, v, is_causal=True))


def stacked() -> Subject:
    inputs = {"query": r(8, 5, D), "key": r(8, 6, D), "value": r(8, 6, D), "mask": r(8, 5, 6)}
    keys = {0: "rows", 1: "key_len"}
    axes = {
        "query": {0: "rows", 1: "query_len"}, "key": keys, "value": keys,
        "mask": {0: "rows", 1: "query_len", 2: "key_len"},
    }  # fmt: skip
    return Subject(Stacked().eval(), inputs, axes, ["output"])


def stacked_heads() -> Subject:
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, 4:] = True
    inputs = {"query": r(8, 5, D), "key": r(8, 6, D), "value": r(8, 6, D), "hidden": hidden}
    keys = {0: "rows", 1: "key_len"}
    axes = {
        "query": {0: "rows", 1: "query_len"}, "key": keys, "value": keys,
        "hidden": {0: "batch", 1: "key_len"},
    }  # fmt: skip
    return Subject(StackedHeads().eval(), inputs, axes, ["output"], relations={"rows": "4*batch"})


def beams() -> Subject:
    inputs = {"hidden": r(6, 4, E), "encoded": r(2, 5, E), "scores": r(2, 3)}
    axes = {
        "hidden": {0: "rows", 1: "query_len"}, "encoded": {0: "batch", 1: "key_len"},
        "scores": {0: "batch", 1: "beams"},
    }  # fmt: skip
    relations = {"rows": "batch*beams"}
    return Subject(Beams().eval(), inputs, axes, ["output", "total"], relations=relations)


def hidden_last(length: int) -> Tensor:
    """Return which of the keys are hidden: bool `[2, length]`."""
    hidden = torch.zeros(2, length, dtype=torch.bool)
    hidden[1, length - 1 :] = True
    return hidden


DISTANCES, ROWS = "distances = 2*query_len - 1", "rows = 4*batch"
VIDEO = {"other.0": {0: "batch", 1: "frames", 2: "patches"}, "other.1": {0: "batch", 1: "key_len"}}
MODULES: Table = {
    "distances": lambda: beside(distances, r(H, 9), {"other": {1: "distances"}}, DISTANCES),
    "conformer": lambda: beside(conformer, r(1, 9, E), {"other": {1: "distances"}}, DISTANCES),
    "heads in the batch": stacked,
    "heads in the batch, hidden keys": stacked_heads,
    "rows of masks": lambda: beside(
        masked_rows, r(8, 5, 5), {"other": {0: "rows", 1: "query_len", 2: "query_len"}}, ROWS,
        inner=nn.MultiheadAttention(E, H, batch_first=True),
    ),
    "images per text": lambda: beside(
        images_per_text, r(6, 7, E), {"other": {0: "images", 1: "patches"}}, "images = 3*batch"
    ),
    "beams": beams,
    "pairs seen": lambda: beside(
        halved_mask, ~hidden_last(3), {"other": {0: "batch", 1: "pairs"}},
        "query_len = 2*pairs", length=6,
    ),
    "states and actions": lambda: beside(
        interleaved, (r(2, 5, E), ~hidden_last(10)),
        {"other.0": TOKENS, "other.1": {0: "batch", 1: "both"}}, "both = 2*query_len",
    ),
    "text and image": lambda: beside(
        joint, (r(2, 6, E), r(11, D // 2)),
        {"other.0": {0: "batch", 1: "image_len"}, "other.1": {0: "joint_len"}},
        "joint_len = query_len + image_len", outputs=("text", "image"),
    ),
    "frames of patches": lambda: beside(
        frames, (r(2, 3, 4, E), r(2, 12)), VIDEO, "key_len = frames*patches"
    ),
    "retrieved chunks": lambda: beside(
        retrieved, r(2, 2, 3, E), {"other": {0: "batch", 1: "chunks", 2: "neighbours"}},
        "query_len = 4*chunks", length=8,
    ),
    "a class token": lambda: beside(class_token, r(6, E), {"other": {0: "all_len"}},
                                    "all_len = query_len + 1"),
    "a mask of all": lambda: beside(
        added, r(1, 1, 5, 5), {"other": {2: "query_len", 3: "query_len"}}
    ),
    "tables that are longer": lambda: beside(
        sliced_tables, (r(16, D), r(16, D)), {"other": {0: "max_len"}}, "max_len = >= query_len"
    ),
    "a mask of all, unnamed": lambda: beside(added, r(1, 1, 5, 5), {}),
    "conformer, unnamed": lambda: beside(conformer, r(1, 9, E), {}),
    "documents": lambda: beside(
        same_document, torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]), {"other": TOKENS}
    ),
    "a memory's mask": lambda: beside(
        memory_hidden, (r(2, 7, E), hidden_last(7)), {"other": {0: "batch", 1: "key_len"}}
    ),
}  # fmt: skip
