"""Layouts of checkpoints: names and packing of the tensors of an attention layer (`layouts.toml`).

This file also packs and separates projections, and pools K/V heads.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from attn_export.errors import WeightsError
from attn_export.spec import AttentionSpec
from attn_export.spec.rules import divisors

if TYPE_CHECKING:
    from torch import Tensor

# -- packed and separate projections of q, k and v ----------------------------------------------

# Legend: H query heads, Hkv key/value heads, D head width, Dv value head width.


QKV: Final = ("q", "k", "v")


def split_packed(tensor: Tensor, spec: AttentionSpec, packing: str) -> list[Tensor]:
    """Split a packed weight or bias into those of q, k and v.

    Returns:
        `[H * D, ...]`, `[Hkv * D, ...]` and `[Hkv * Dv, ...]`.
    """
    H, Hkv, D, Dv = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    if packing == GROUPS:
        grouped = tensor.unflatten(0, (Hkv, -1))  # [Hkv, q_per_kv * D + D + Dv, ...]
        parts = grouped.split([spec.q_per_kv * D, D, Dv], dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]
    return [part.clone() for part in tensor.split([H * D, Hkv * D, Hkv * Dv])]


def pack_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the weights of an `Attention` without `packed_qkv` to those of one with it."""
    import torch

    packed = dict(weights)
    for suffix in ("weight", "bias"):
        tensors = [packed.pop(f"{side}_proj.{suffix}", None) for side in QKV]
        present = [tensor for tensor in tensors if tensor is not None]
        if present:
            packed[f"qkv_proj.{suffix}"] = torch.cat(present)
    return packed


def _separate_weights(weights: Mapping[str, Tensor], spec: AttentionSpec) -> dict[str, Tensor]:
    """Return weights of an `Attention` with `packed_qkv` as those of one without it."""
    separate = dict(weights)
    for suffix in ("weight", "bias"):
        tensor = separate.pop(f"qkv_proj.{suffix}", None)
        if tensor is not None:
            q, k, v = split_packed(tensor, spec, ROWS)
            separate |= {f"q_proj.{suffix}": q, f"k_proj.{suffix}": k, f"v_proj.{suffix}": v}
    return separate


# -- layouts ------------------------------------------------------------------------------------


ROWS: Final = "rows"
"""Packing in which all rows of q come first, then those of k, then those of v."""
GROUPS: Final = "groups"
"""Packing by K/V heads: for each the rows of its query heads, then of its key, then of its value.

With as many K/V heads as query heads that is ``[H, 3, D]``."""


ADDED_KEYS: Final = "added_keys."
"""The prefix of the key and value of `add_bias_kv` in an `Attention`."""


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names and packing of the tensors of an attention layer: a table of `layouts.toml`.

    Attributes:
        modules: The Linear modules of q, k and v, or the one that packs them.
        conv1d: Whether weights may be stored `[in, out]`, as by GPT-2's Conv1D.
        norm: A LayerNorm with the same prefix that is no part of attention; "" for none.
        added_keys: The prefix of ``bias_k`` and ``bias_v``; "" for PyTorch's, `[1, 1, E]`.
    """

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

    def __post_init__(self) -> None:
        """Derive the names of tensors from those of the modules, unless the table has them."""
        weights = self.weights or tuple(f"{module}.weight" for module in self.modules)
        biases = self.biases or tuple(f"{module}.bias" for module in self.modules)
        msgspec.structs.force_setattr(self, "weights", weights)
        msgspec.structs.force_setattr(self, "biases", biases)

    @property
    def out_names(self) -> tuple[str, str]:
        """The names of the weight and the bias of the output projection."""
        return _weight_and_bias(self.out)

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the weights that a layer of this layout must have."""
        return (*self.weights, self.out_names[0])

    @property
    def others(self) -> tuple[str, ...]:
        """The names of tensors with the same prefix that are no part of attention."""
        parts = ("weight", "bias", "gamma", "beta")  # the last two are TensorFlow's
        return tuple(f"{self.norm}.{part}" for part in parts) if self.norm else ()


def _weight_and_bias(module: str) -> tuple[str, str]:
    return f"{module}.weight", f"{module}.bias"


LAYOUTS: Final = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, tuple[Layout, ...]]
)["layout"]

BUFFERS: Final = (
    "bias", "masked_bias", "mask", "inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)  # fmt: skip
"""Buffers of modules that are no weights: causal masks and rotary tables."""

Q_NORM, K_NORM = _weight_and_bias("q_norm"), _weight_and_bias("k_norm")
SINKS: Final = "sinks"
KV_UP: Final = "latent.key_up and latent.value_up"
"""The two weights, by our names, that DeepSeek stores as one, `[H * (N + Dv), C]`."""
RELATIVE: Final = ("relative_attention_bias.weight", "score_bias.relative_attention_bias.weight")
"""T5's name of the relative bias, and ours."""

_BY_REQUIRED: Final = {
    name: [layout for layout in LAYOUTS if name in layout.required]
    for name in sorted({name for layout in LAYOUTS for name in layout.required})
}
_LONGEST_TAIL: Final = max(name.count(".") for name in _BY_REQUIRED) + 1


def recognise(names: Collection[str]) -> dict[str, Layout]:
    """Return the layout of every attention layer of a checkpoint, by its prefix with the dot.

    A layer is recognised if more than half of its weights of q, k and v exist, so that an error can
    name the tensors that a damaged file lacks. If several layouts match, the one with most existing
    names is chosen.
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
    """Return the first layout with most of its required names among these, or None."""
    matching = [
        layout
        for layout in LAYOUTS
        if 2 * sum(name in tails for name in layout.weights) > len(layout.weights)
    ]
    return max(matching, key=lambda one: sum(n in tails for n in one.required), default=None)


# -- pooling of K/V heads to the mean of neighbours (Ainslie et al. 2023, sec. 2.1) -------------

# Legend: Hkv key/value heads, n of them after pooling.

_OF_KV_HEADS: Final = ("k_proj.", "v_proj.", ADDED_KEYS)
"""Prefixes of the weights whose first axis consists of K/V heads."""


def pool(
    weights: Mapping[str, Tensor], spec: AttentionSpec, kv_heads: int
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """Replace each group of Hkv / n neighbouring key and value heads by their mean.

    A query head uses the mean of the group of its head. Norms do not change, since all heads share
    them. Equal heads do not change bitwise; others are approximated, and the paper trains the
    result further.

    `weights`: The weights by the names of `Attention`; k_proj.weight is `[Hkv * D, kdim]`.

    Returns:
        The spec with n K/V heads, and its weights.
    """
    before = spec.num_kv_heads
    if kv_heads < 1 or before % kv_heads:
        raise WeightsError(
            f"{kv_heads} pooled K/V heads do not divide num_kv_heads {before}; choose one of "
            f"{', '.join(map(str, divisors(before)))}"
        )
    separate = _separate_weights(weights, spec) if spec.packed_qkv else weights
    pooled = {
        name: _mean(tensor, before, kv_heads) if name.startswith(_OF_KV_HEADS) else tensor
        for name, tensor in separate.items()
    }
    pooled_spec = AttentionSpec.from_dict({**spec.to_dict(), "num_kv_heads": kv_heads})
    return pooled_spec, pack_weights(pooled) if spec.packed_qkv else pooled


def _mean(tensor: Tensor, before: int, after: int) -> Tensor:
    """Return the mean over each group of heads: `[Hkv * D, ...]` to `[n * D, ...]`."""
    # In float64 the sum of equal values is exact. Additions one by one keep -0.0, which `sum` would
    # turn into 0.0.
    heads = tensor.double().unflatten(0, (after, before // after, -1))
    total: Tensor = functools.reduce(operator.add, heads.unbind(1))  # [n, D, ...]
    return (total / (before // after)).flatten(0, 1).to(tensor.dtype)
