"""`Attention`: projections, heads, cache. Plain PyTorch, usable on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from attn_export.attention import functional, onnx_attention
from attn_export.attention.functional import scaled_dot_product_attention
from attn_export.attention.positions import Rotary, ScoreBias
from attn_export.attention.quantised_cache import CacheScales, with_past
from attn_export.spec import AttentionSpec, Shape

if TYPE_CHECKING:
    from attn_export.attention.block_scales import BlockScales
    from attn_export.attention.float16_cache import Float16Cache
    from attn_export.attention.latent import LatentProjections
    from attn_export.quantiser import QuantisedWeight


class Attention(nn.Module):
    """Multi-head, multi-query, grouped-query or latent attention, as its spec defines.

    Query head h attends to key/value head ``h // q_per_kv`` (blocks, as
    `Tensor.repeat_interleave`; Ainslie et al. 2023).

    Args:
        spec: The attention to build.

    Attributes:
        integers: Of quantised weights, by name; the parameters are what these stand for.
        float_weights: The same weights before they were quantised.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.integers: Mapping[str, QuantisedWeight] = {}
        self.float_weights: Mapping[str, Tensor] = {}
        self._add_projections()
        self.q_norm, self.k_norm = _head_norm(spec), _head_norm(spec)
        self.rotary = Rotary(spec) if spec.has_rotary else None
        self.score_bias = ScoreBias(spec)
        self.added_keys = functional.AddedKeys(spec) if spec.added_keys else None
        self.sinks = nn.Parameter(torch.randn(spec.num_heads)) if spec.sinks else None
        self.activations: nn.Module = nn.Identity()
        if spec.activations != "none":
            from attn_export.attention.quantised_activations import rounding_of

            self.activations = rounding_of(spec)
        self.kv_scales: CacheScales | BlockScales | Float16Cache | None = None
        if spec.kv_dtype != "none":
            from attn_export.attention.block_scales import scales_of  # few layers round it

            self.kv_scales = scales_of(spec)
        if spec.dtype != "float32":
            self.to(getattr(torch, spec.dtype))

    def _add_projections(self) -> None:
        spec = self.spec
        H, Hkv, D, Dv = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
        self.widths = (H * D, Hkv * D, Hkv * Dv)
        self.latent: LatentProjections | None = None
        if spec.kv_latent_dim:
            from attn_export.attention.latent import LatentProjections

            self.latent = LatentProjections(spec)
        elif spec.packed_qkv:
            self.qkv_proj = nn.Linear(spec.embed_dim, sum(self.widths), bias=spec.has_bias("q"))
        else:
            q, k, v = self.widths
            self.q_proj = nn.Linear(spec.embed_dim, q, bias=spec.has_bias("q"))
            self.k_proj = nn.Linear(spec.kdim, k, bias=spec.has_bias("k"))
            self.v_proj = nn.Linear(spec.vdim, v, bias=spec.has_bias("v"))
        self.out_proj = nn.Linear(H * Dv, spec.embed_dim, bias=spec.has_bias("out"))

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **fields: Any) -> Self:
        """Return an `Attention` with the weights of a `torch.nn.MultiheadAttention`, equal to it.

        Batches come first in its inputs and outputs. Its mask means True = may attend;
        `nn.MultiheadAttention` means the inverse; a `key_padding_mask` `[B, S]` becomes
        ``~mask[:, None, None, :]`` with ``attn_mask="bool[B,1,1,S]"``. Its `attn_weights` are of
        each head; their mean over heads is what `nn.MultiheadAttention` gives by default.

        Args:
            module: Its mode, dtype and device are taken over.
            fields: Fields of the spec that the module does not have: `attn_mask`, `causal`,
                `attn_weights`, `cross` (derived if `kdim` or `vdim` is not E).

        Raises:
            SpecError: If the fields contradict the module.
        """
        from attn_export.attention.torch_multihead import spec_of, weights_of

        attention = cls(spec_of(module, fields))
        attention.load_state_dict(weights_of(module), strict=False)
        like = module.out_proj.weight
        return attention.to(device=like.device, dtype=like.dtype).train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        past_length: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute attention with projections.

        Args:
            query: `[B, L, E]`.
            key: `[B, S, kdim]`, cross-attention only; otherwise the query is the key.
            value: `[B, S, vdim]`, cross-attention only.
            attn_mask: Of the type and shape that the spec gives. Bool: True = may attend.
                Float: added; -inf = may not attend, other values are clamped to >= -1e30.
            past_key: `[B, Hkv, P, D]`, with a cache; P may be 0. `[B, Hkv, S, D]`, with one that
                is written in place: S is its capacity, and what it does not hold is finite. With a
                latent R elements, not D.
            past_value: `[B, Hkv, P, Dv]` or `[B, Hkv, S, Dv]`, likewise. With a latent C elements.
            past_length: The number of keys of each row of such a cache, int64 `[B]`, at most S - L.
            position_ids: The position of every query, int64 `[B, L]`, where the spec has them.

        Returns:
            `output [B, L, E]`; with a cache or weights a tuple of it, `present_key
            [B, Hkv, S, D]`, `present_value [B, Hkv, S, Dv]` and `attn_weights [B, H, L, S]`,
            as far as the spec has them, in this order. Inputs stay as they are.

        Raises:
            ValueError: If an input that the spec names is missing, one that it does not name is
                given, or one has another rank, width or kind than the spec says.
            RuntimeError: If a cache lacks capacity for L more keys.
        """
        self._check_inputs(
            key=key, value=value, attn_mask=attn_mask, past_key=past_key, past_value=past_value,
            past_length=past_length, position_ids=position_ids,
        )  # fmt: skip
        q, k, v = self._projected(query, key, value)  # [B, H or Hkv, L or S - P, D or Dv]
        q, k = self.q_norm(q), self.k_norm(k)
        queries, S = _places(q, k, past_key, past_length)
        if self.rotary is not None:
            turns = self.rotary.turns(queries if position_ids is None else position_ids)
            q, k = self.rotary(q, turns), self.rotary(k, turns)
        attn_mask = self.score_bias(functional.clamp_mask(attn_mask), queries, S, q)
        q, k = self._mixed(q), self._mixed(k)
        attend = self._attend_in_graph if onnx_attention.emitting() else self._attend
        attended, *rest = attend(q, k, v, attn_mask, past_key, past_value, past_length)
        if self.latent is not None:
            attended = self.latent.values(attended)
        output = self.out_proj(self.activations(attended.transpose(1, 2).flatten(2)))  # [B, L, E]
        return (output, *rest) if rest else output

    def _mixed(self, x: Tensor) -> Tensor:
        return x if self.kv_scales is None else self.kv_scales.mixed(x)

    def _projected(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.latent is not None:
            return self.latent.forward(query)
        query = self.activations(query)
        if self.spec.packed_qkv:
            q, k, v = self.qkv_proj(query).split(self.widths, dim=-1)
        else:
            given = (key, value)
            key, value = (query if x is None else self.activations(x) for x in given)
            q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        H, Hkv = self.spec.num_heads, self.spec.num_kv_heads
        return self._heads(q, H), self._heads(k, Hkv), self._heads(v, Hkv)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        past_key: Tensor | None,
        past_value: Tensor | None,
        past_length: Tensor | None,
    ) -> list[Tensor]:
        """Compute attention `[B, H, L, Dv]`, followed by the other outputs of the spec."""
        kept, (k, v) = with_past(self.kv_scales, (past_key, past_value), (k, v), past_length)
        present = list(kept) if self.spec.has_cache else []
        k, v, attn_mask, causal = self._with_mask(k, v, attn_mask, q.shape[2], past_length)
        attended, weights = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask,
            causal=causal,
            scale=self.spec.softmax_scale,
            softcap=self.spec.softcap,
            sinks=self.sinks,
            dropout=self.spec.dropout if self.training else 0.0,
            need_weights=self.spec.attn_weights,
        )
        return [attended, *present, *([weights] if weights is not None else [])]

    def _attend_in_graph(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        past_key: Tensor | None,
        past_value: Tensor | None,
        past_length: Tensor | None,
    ) -> list[Tensor]:
        """Compute the same as `_attend` with one ONNX node."""
        how: dict[str, Any] = {"scale": self.spec.softmax_scale, "softcap": self.spec.softcap}
        plain = self.sinks is None and self.added_keys is None and self.latent is None
        kept: tuple[Tensor, ...] = ()
        if past_length is not None or not plain:
            kept, (k, v) = with_past(self.kv_scales, (past_key, past_value), (k, v), past_length)
            past_key = past_value = None
        if plain:
            attended, *joined, weights = onnx_attention.attention_node(
                q, k, v, attn_mask, past_key, past_value, past_length,
                causal=self.spec.causal, **how,
            )  # fmt: skip
            kept = kept or tuple(joined)
        else:
            k, v, attn_mask, causal = self._with_mask(k, v, attn_mask, q.shape[2], past_length)
            if self.sinks is not None:
                attended, weights = onnx_attention.sink_attention_nodes(
                    q, k, v, attn_mask, self.sinks, causal=causal, **how
                )
            else:
                attended, _, _, weights = onnx_attention.attention_node(
                    q, k, v, attn_mask, None, None, causal=causal, **how
                )
        present = kept if self.spec.has_cache else ()
        return [attended, *present, *([weights] if self.spec.attn_weights else [])]

    def _with_mask(
        self, k: Tensor, v: Tensor, mask: Tensor | None, L: int, past_length: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Return all keys and values, their mask, and whether a causal mask applies in addition."""
        causal = self.spec.causal
        if past_length is not None:
            shown = functional.visible(past_length, L, k.shape[2], causal=causal)
            mask, causal = functional.restrict(mask, shown), False
        if self.added_keys is not None:
            k, v, mask = self.added_keys(k, v, mask, L, causal=causal, mixed=self._mixed)
            causal = False
        if self.latent is not None:
            k = torch.cat([k, v], dim=-1)  # [B, 1, S, R + C]
            if causal and onnx_attention.emitting():
                # Without a past the operator counts from its first key.
                mask = functional.restrict(mask, functional.causal_mask(L, k.shape[2], k.device))
                causal = False
        return k, v, mask, causal

    def _check_inputs(self, **given: Tensor | None) -> None:
        wanted = self.spec.input_shapes()
        for name, tensor in given.items():
            if (tensor is not None) != (name in wanted):
                problem = "is missing" if name in wanted else "is given, but the spec has none"
                raise ValueError(f"{name} {problem}; the inputs of this spec: {', '.join(wanted)}")
            if tensor is not None:
                self._check_shape(name, tensor, wanted[name])

    def _check_shape(self, name: str, tensor: Tensor, wanted: Shape) -> None:
        # Sizes of dynamic axes are left to the arithmetic: while exporting they are symbols.
        fits = len(wanted) == tensor.dim() and all(
            want == size
            for want, size in zip(wanted, tensor.shape, strict=True)
            if isinstance(want, int)
        )
        if not fits:
            raise ValueError(f"{name} is {list(tensor.shape)}, the spec has {list(wanted)}")
        is_bool = self.spec.mask is not None and self.spec.mask.dtype == "bool"
        if name == "attn_mask" and (tensor.dtype == torch.bool) != is_bool:
            # A mask of zeros and ones would otherwise be added to the scores.
            raise ValueError(f"attn_mask is {tensor.dtype}, the spec has {self.spec.attn_mask}")
        if name == "past_length" and tensor.dtype != torch.int64:
            raise ValueError(f"past_length is {tensor.dtype}, the spec has torch.int64")

    @staticmethod
    def _heads(x: Tensor, heads: int) -> Tensor:
        split: Tensor = x.unflatten(-1, (heads, -1))  # [B, len, heads * D] -> [B, len, heads, D]
        return split.transpose(1, 2)  # [B, heads, len, D]

    def extra_repr(self) -> str:
        """Return the spec for `print(module)`."""
        return ", ".join(f"{key}={value!r}" for key, value in self.spec.to_dict().items())


def _places(
    q: Tensor, k: Tensor, past_key: Tensor | None, past_length: Tensor | None
) -> tuple[Tensor, int]:
    """Return the positions of the queries, `[L]` or `[B, L]`, and the number of keys S."""
    L, past_len = q.shape[2], 0 if past_key is None else past_key.shape[2]
    if past_length is not None:
        return functional.positions(past_length, L), past_len
    return torch.arange(past_len, past_len + L, device=q.device), past_len + k.shape[2]


def _head_norm(spec: AttentionSpec) -> nn.Module:
    """Return the normalisation of one head, over D."""
    if spec.qk_norm == "rms":
        return nn.RMSNorm(spec.head_dim, eps=spec.norm_eps)
    if spec.qk_norm == "layer":
        return nn.LayerNorm(spec.head_dim, eps=spec.norm_eps)
    return nn.Identity()
