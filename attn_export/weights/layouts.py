"""Names and packing of the tensors of one attention in checkpoints, read from `layouts.toml`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor

from attn_export.errors import WeightsError
from attn_export.spec import AttentionSpec
from attn_export.spec.rules import divisors

# -- projections of q, k and v that lie in one tensor, and apart --------------------------------

# Legend: H query heads, Hkv key/value heads, D head width, Dv value head width.


PARTS: Final = ("q", "k", "v")


def split_packed(tensor: Tensor, spec: AttentionSpec, packing: str) -> list[Tensor]:
    """Return the rows of q, k and v.

    Args:
        tensor: `[H * D + Hkv * (D + Dv), ...]`.
        spec: H, Hkv, D and Dv.
        packing: `ROWS` or `GROUPS`, as in `layouts`.
    """
    H, Hkv, D, Dv = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    if packing == GROUPS:
        grouped = tensor.unflatten(0, (Hkv, -1))  # [Hkv, q_per_kv * D + D + Dv, ...]
        parts = grouped.split([spec.q_per_kv * D, D, Dv], dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]
    return [part.clone() for part in tensor.split([H * D, Hkv * D, Hkv * Dv])]


def pack_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of an `Attention` without `packed_qkv` to those of one with it."""
    packed = dict(weights)
    for kind in ("weight", "bias"):
        parts = [packed.pop(f"{side}_proj.{kind}", None) for side in PARTS]
        there = [part for part in parts if part is not None]
        if there:
            packed[f"qkv_proj.{kind}"] = torch.cat(there)
    return packed


def separate_weights(weights: Mapping[str, Tensor], spec: AttentionSpec) -> dict[str, Tensor]:
    """Rename the weights of an `Attention` with `packed_qkv` to those of one without it.

    Args:
        weights: The weights of the module, by name.
        spec: Its spec.
    """
    apart = dict(weights)
    for kind in ("weight", "bias"):
        tensor = apart.pop(f"qkv_proj.{kind}", None)
        if tensor is not None:
            parts = split_packed(tensor, spec, ROWS)
            apart |= {f"{side}_proj.{kind}": part for side, part in zip(PARTS, parts, strict=True)}
    return apart


# -- names and packing of the tensors of one attention in checkpoints ---------------------------


ROWS: Final = "rows"
"""All rows of q, then those of k, then those of v."""
GROUPS: Final = "groups"
"""Rows of each K/V head in turn: those of its query heads, its key, its value.

With as many K/V heads as query heads that is ``[H, 3, D]``."""


ADDED_KEYS: Final = "added_keys."
"""Prefix under which `Attention` keeps the key and value of `add_bias_kv`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """One way to store an attention.

    Attributes:
        name: Its name in messages.
        weights: The weights of q, k and v, or the one that packs them.
        biases: The biases of q, k and v, or the one that packs them.
        out: The weight and the bias of the output projection.
        packing: The way one tensor packs three, `ROWS` or `GROUPS`.
        conv1d: Whether weights may be stored `[in, out]`, as GPT-2's Conv1D does.
        others: Tensors under the same prefix that are no part of attention.
        added_keys: The prefix of ``bias_k`` and ``bias_v``; torch keeps them as `[1, 1, E]`.
        latent: Whether it is multi-head latent attention (MLA).
    """

    name: str
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    out: tuple[str, str]
    packing: str
    conv1d: bool
    others: tuple[str, ...]
    added_keys: str
    latent: bool

    @property
    def required(self) -> tuple[str, ...]:
        """The weights without which it is not this layout."""
        return (*self.weights, self.out[0])


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of `layouts.toml`, which explains the fields."""

    name: str
    modules: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    out: str
    packing: Literal["rows", "groups"] = ROWS
    conv1d: bool = False
    norm: str = ""
    added_keys: str = ADDED_KEYS
    latent: bool = False

    def layout(self) -> Layout:
        """Return the layout with the names of its tensors."""
        weights = self.weights or tuple(_weight_and_bias(module)[0] for module in self.modules)
        biases = self.biases or tuple(_weight_and_bias(module)[1] for module in self.modules)
        # gamma and beta are TensorFlow's names.
        others = [f"{self.norm}.{part}" for part in ("weight", "bias", "gamma", "beta")]
        return Layout(
            self.name, weights, biases, _weight_and_bias(self.out), self.packing, self.conv1d,
            tuple(others if self.norm else ()), self.added_keys, self.latent,
        )  # fmt: skip


def _weight_and_bias(module: str) -> tuple[str, str]:
    return f"{module}.weight", f"{module}.bias"


LAYOUTS: Final = tuple(
    table.layout()
    for table in msgspec.toml.decode(
        Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, tuple[_Table, ...]]
    )["layout"]
)

BUFFERS: Final = (
    "bias", "masked_bias", "mask", "inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)  # fmt: skip
"""Buffers beside the weights of a module: causal masks and rotary tables."""

Q_NORM, K_NORM = _weight_and_bias("q_norm"), _weight_and_bias("k_norm")
SINKS: Final = "sinks"
KV_UP: Final = "latent.key_up and latent.value_up"
"""Our two weights that DeepSeek keeps in one, `[H * (N + Dv), C]`."""
RELATIVE: Final = ("relative_attention_bias.weight", "score_bias.relative_attention_bias.weight")
"""T5's name for it, and ours."""

_BY_REQUIRED: Final = {
    name: [layout for layout in LAYOUTS if name in layout.required]
    for name in sorted({name for layout in LAYOUTS for name in layout.required})
}
_LONGEST_TAIL: Final = max(name.count(".") for name in _BY_REQUIRED) + 1


def recognise(names: Collection[str]) -> dict[str, Layout]:
    """Return every attention of a checkpoint: its prefix, with its dot, and its layout.

    More than half of the weights of q, k and v must be there, so that what a damaged file lacks
    is named rather than not seen. Where rows share names, the one with most of its names counts.

    Args:
        names: The tensors of the checkpoint.
    """
    present: dict[str, set[str]] = {}
    for name in names:
        words = name.split(".")
        for length in range(1, min(_LONGEST_TAIL, len(words)) + 1):
            tail = ".".join(words[-length:])
            if tail in _BY_REQUIRED:
                present.setdefault(name.removesuffix(tail), set()).add(tail)
    best = {prefix: _best(tails) for prefix, tails in present.items()}
    return {prefix: layout for prefix, layout in best.items() if layout is not None}


def _best(tails: set[str]) -> Layout | None:
    """Return the row that most of these names belong to, the first of several."""
    fitting = [
        layout
        for layout in LAYOUTS
        if 2 * sum(name in tails for name in layout.weights) > len(layout.weights)
    ]
    return max(fitting, key=lambda row: sum(n in tails for n in row.required), default=None)


# -- fewer K/V heads by the mean of neighbours (Ainslie et al. 2023, sec. 2.1) ------------------

# Legend: Hkv key/value heads, n of them after pooling.

OF_KV_HEADS: Final = ("k_proj.", "v_proj.", ADDED_KEYS)
"""The weights whose rows are those of K/V heads, one head after the other."""


def pool(
    weights: Mapping[str, Tensor], spec: AttentionSpec, kv_heads: int
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """Replace every Hkv / n neighbouring key and value heads by their mean.

    Query head h goes on to use the group that its head is in. Norms of heads are shared by all
    heads, so they stay. Equal heads pool to themselves, to the bit; others give an approximation
    that the paper trains further.

    Args:
        weights: By the names of `Attention`; k_proj.weight is `[Hkv * D, kdim]`.
        spec: Their spec.
        kv_heads: n, which divides Hkv.

    Returns:
        The spec with n K/V heads, and its weights.

    Raises:
        WeightsError: If n does not divide Hkv.
    """
    before = spec.num_kv_heads
    if kv_heads < 1 or before % kv_heads:
        raise WeightsError(
            f"{kv_heads} pooled K/V heads do not divide num_kv_heads {before}; choose one of "
            f"{', '.join(map(str, divisors(before)))}"
        )
    apart = separate_weights(weights, spec) if spec.packed_qkv else weights
    pooled = {
        name: _mean(tensor, before, kv_heads) if name.startswith(OF_KV_HEADS) else tensor
        for name, tensor in apart.items()
    }
    pooled_spec = AttentionSpec.from_dict({**spec.to_dict(), "num_kv_heads": kv_heads})
    return pooled_spec, pack_weights(pooled) if spec.packed_qkv else pooled


def _mean(tensor: Tensor, before: int, after: int) -> Tensor:
    """Return the mean over each group of heads: rows [Hkv * D, ...] -> [n * D, ...]."""
    # In float64 the sum of equal values is exact. Adding them one to the next keeps a -0.0, which
    # `sum` would add to 0.0.
    heads = tensor.to(torch.float64).unflatten(0, (after, before // after, -1))
    total: Tensor = functools.reduce(torch.add, heads.unbind(1))  # [n, D, ...]
    return (total / (before // after)).flatten(0, 1).to(tensor.dtype)
