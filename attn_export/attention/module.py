"""`Attention` module in plain PyTorch: projections, heads and cache.

Legend: B batch, H query heads, Hkv key/value heads, L query length, S key length (past included),
P past length, E model width, D head width, Dv value head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from attn_export.attention import functional, onnx_attention
from attn_export.attention.functional import Past, scaled_dot_product_attention
from attn_export.attention.positions import Rotary, ScoreBias
from attn_export.errors import SpecError
from attn_export.interface import Shape
from attn_export.spec import DTYPES, AttentionSpec

if TYPE_CHECKING:
    from attn_export.attention.latent import LatentProjections


class Attention(nn.Module):
    """Multi-head, multi-query, grouped-query or latent attention, as its spec defines.

    Query head h attends to key/value head ``h // q_per_kv`` (blocks, as
    `Tensor.repeat_interleave`; Ainslie et al. 2023).
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self._add_projections()
        self.q_norm: nn.Module = _head_norm(spec)
        self.k_norm: nn.Module = _head_norm(spec)
        self.rotary: Rotary | None = Rotary(spec) if spec.has_rotary else None
        self.score_bias: ScoreBias = ScoreBias(spec)
        self.added_keys: functional.AddedKeys | None = (
            functional.AddedKeys(spec) if spec.added_keys else None
        )
        self.sinks: nn.Parameter | None = (
            nn.Parameter(torch.randn(spec.num_heads)) if spec.sinks else None
        )
        if spec.dtype != "float32":
            self.to(getattr(torch, spec.dtype))

    def _add_projections(self) -> None:
        spec = self.spec
        H, Hkv, D, Dv = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
        self.widths: tuple[int, int, int] = (H * D, Hkv * D, Hkv * Dv)
        self.latent: LatentProjections | None = None
        if spec.kv_latent_dim:
            from attn_export.attention.latent import LatentProjections

            self.latent = LatentProjections(spec)
        elif spec.packed_qkv:
            self.qkv_proj: nn.Linear = nn.Linear(
                spec.embed_dim, sum(self.widths), bias=spec.has_bias("q")
            )
        else:
            q, k, v = self.widths
            self.q_proj: nn.Linear = nn.Linear(spec.embed_dim, q, bias=spec.has_bias("q"))
            self.k_proj: nn.Linear = nn.Linear(spec.kdim, k, bias=spec.has_bias("k"))
            self.v_proj: nn.Linear = nn.Linear(spec.vdim, v, bias=spec.has_bias("v"))
        self.out_proj: nn.Linear = nn.Linear(H * Dv, spec.embed_dim, bias=spec.has_bias("out"))

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **fields: Any) -> Self:
        """Return an `Attention` that is equivalent to a `torch.nn.MultiheadAttention`.

        The batch is always the first axis of inputs and outputs. In a bool mask True means that a
        query may attend to a key, the inverse of `nn.MultiheadAttention`: a `key_padding_mask`
        `[B, S]` becomes ``~mask[:, None, None, :]`` with ``attn_mask="bool[B,1,1,S]"``.
        `attn_weights` has weights for each head; `nn.MultiheadAttention` returns their mean over
        heads by default.

        Args:
            module: PyTorch's module. The result has copies of its weights, and its mode, dtype and
                device. The `dtype` of the spec stays float32.
            fields: Fields of the spec that the module does not have: `attn_mask`, `causal`,
                `attn_weights`, `cross` (derived if `kdim` or `vdim` is not E).

        Raises:
            SpecError: If the fields contradict the module.
        """
        attention = cls(_spec_of(module, fields))
        attention.load_state_dict(_weights_of(module), strict=False)
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
            key: `[B, S, kdim]`, for cross-attention only; otherwise the query is the key.
            value: `[B, S, vdim]`, for cross-attention only.
            attn_mask: A mask of the type and shape in the spec. Bool: True = may attend.
                Float: added; -inf = may not attend, other values are clamped to at least -1e30, or
                -6e4 in float16.
            past_key: `[B, Hkv, P, D]`, with a cache; P may be 0. `[B, Hkv, S, D]` if the cache is
                written in place: S is its capacity, and unused elements must be finite. With
                `kv_latent_dim`, the last axis has `rotary_dim` elements.
            past_value: `[B, Hkv, P, Dv]`, or `[B, Hkv, S, Dv]` if the cache is written in place.
                With `kv_latent_dim`, the last axis has as many elements.
            past_length: The number of past keys of each batch element, int64 `[B]`, at most S - L,
                if the cache is written in place.
            position_ids: The position of every query, int64 `[B, L]`, if the spec has them.

        Returns:
            `output [B, L, E]`. If the spec has a cache or `attn_weights`, a tuple: the output, then
            `present_key [B, Hkv, S, D]` and `present_value [B, Hkv, S, Dv]`, then
            `attn_weights [B, H, L, S]`, with added keys in S. Inputs are not changed.

        Raises:
            ValueError: If an input of the spec is missing, if there is an input that the spec does
                not have, if one other than `query` has a wrong rank or width, or if `attn_mask`
                or `past_length` has a wrong type.
            RuntimeError: If a cache lacks capacity for L more keys.
        """
        self._check_inputs(
            key=key, value=value, attn_mask=attn_mask, past_key=past_key, past_value=past_value,
            past_length=past_length, position_ids=position_ids,
        )  # fmt: skip
        q, k, v = self._project(query, key, value)  # [B, H or Hkv, L or S, D or Dv]
        q, k = self.q_norm(q), self.k_norm(k)
        queries, S = _positions(q, k, past_key, past_length)
        if self.rotary is not None:
            turns = self.rotary.turns(queries if position_ids is None else position_ids)
            q, k = self.rotary(q, turns), self.rotary(k, turns)
        attn_mask = self.score_bias(functional.clamp_mask(attn_mask), queries, S, q)
        attend = self._attend_in_graph if onnx_attention.emitting() else self._attend
        attended, *others = attend(q, k, v, attn_mask, (past_key, past_value), past_length)
        if self.latent is not None:
            attended = self.latent.values(attended)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))  # [B, L, E]
        return (output, *others) if others else output

    def _project(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.latent is not None:
            return self.latent.forward(query)
        if self.spec.packed_qkv:
            q, k, v = self.qkv_proj(query).split(self.widths, dim=-1)
        else:
            key, value = (query if x is None else x for x in (key, value))
            q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        H, Hkv = self.spec.num_heads, self.spec.num_kv_heads
        return self._heads(q, H), self._heads(k, Hkv), self._heads(v, Hkv)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, past: Past,
        past_length: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """Compute attention `[B, H, L, Dv]`; the spec's other outputs follow in the list."""
        k, v = _append(past, k, v, past_length)
        present = (k, v) if self.spec.has_cache else ()
        k, v, mask, causal = self._with_mask(k, v, mask, q.shape[2], past_length)
        attended, weights = scaled_dot_product_attention(
            q, k, v, mask, causal=causal, scale=self.spec.softmax_scale, softcap=self.spec.softcap,
            sinks=self.sinks, dropout=self.spec.dropout if self.training else 0.0,
            need_weights=self.spec.attn_weights,
        )  # fmt: skip
        return [attended, *present, *([weights] if weights is not None else [])]

    def _attend_in_graph(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, past: Past,
        past_length: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """Compute the same as `_attend` with one ONNX `Attention` node, behind the cache."""
        options: dict[str, Any] = {"scale": self.spec.softmax_scale, "softcap": self.spec.softcap}
        plain = self.sinks is None and self.added_keys is None and self.latent is None
        cache: tuple[Tensor, ...] = ()
        if past_length is not None or not plain:
            cache = k, v = _append(past, k, v, past_length)
            past = (None, None)
        if plain:
            attended, *joined, weights = onnx_attention.attention_node(
                q, k, v, mask, *past, past_length, causal=self.spec.causal, **options
            )
            cache = cache or tuple(joined)
        else:
            k, v, mask, causal = self._with_mask(k, v, mask, q.shape[2], past_length)
            if self.sinks is not None:
                attended, weights = onnx_attention.sink_attention_nodes(
                    q, k, v, mask, self.sinks, causal=causal, **options
                )
            else:
                attended, _, _, weights = onnx_attention.attention_node(
                    q, k, v, mask, causal=causal, **options
                )
        present = cache if self.spec.has_cache else ()
        return [attended, *present, *([weights] if self.spec.attn_weights else [])]

    def _with_mask(
        self, k: Tensor, v: Tensor, mask: Tensor | None, L: int, past_length: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Return all keys and values, their mask, and whether a causal mask applies in addition."""
        causal = self.spec.causal
        if past_length is not None:
            shown = functional.visible_keys(past_length, L, k.shape[2], causal=causal)
            mask, causal = functional.restrict(mask, shown), False
        if self.added_keys is not None:
            k, v, mask = self.added_keys(k, v, mask, L, causal=causal)
            causal = False
        if self.latent is not None:
            k = torch.cat([k, v], dim=-1)  # [B, 1, S, R + C]
            if causal and onnx_attention.emitting():
                # Without a past, the operator aligns query 0 with key 0.
                mask = functional.restrict(mask, functional.causal_mask(L, k.shape[2], k.device))
                causal = False
        return k, v, mask, causal

    def _check_inputs(self, **inputs: Tensor | None) -> None:
        shapes = self.spec.input_shapes()
        for name, tensor in inputs.items():
            if (tensor is not None) != (name in shapes):
                problem = "is missing" if name in shapes else "is given, but the spec has none"
                raise ValueError(f"{name} {problem}; the inputs of this spec: {', '.join(shapes)}")
            if tensor is not None:
                self._check_shape(name, tensor, shapes[name])

    def _check_shape(self, name: str, tensor: Tensor, expected: Shape) -> None:
        # Sizes of dynamic axes are not checked: they are symbols while exporting.
        matches = len(expected) == tensor.dim() and all(
            axis == size
            for axis, size in zip(expected, tensor.shape, strict=True)
            if isinstance(axis, int)
        )
        if not matches:
            raise ValueError(f"{name} is {list(tensor.shape)}, the spec has {list(expected)}")
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


def _append(
    past: Past, key: Tensor, value: Tensor, past_length: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the cache with new keys and values."""
    key, value = (
        onnx_attention.append(old, new, past_length)
        for old, new in zip(past, (key, value), strict=True)
    )
    return key, value


def _positions(
    q: Tensor, k: Tensor, past_key: Tensor | None, past_length: Tensor | None
) -> tuple[Tensor, int]:
    """Return the positions of the queries, `[L]` or `[B, L]`, and the number of keys S."""
    L, past_len = q.shape[2], 0 if past_key is None else past_key.shape[2]
    if past_length is not None:
        return functional.positions(past_length, L), past_len
    return torch.arange(past_len, past_len + L, device=q.device), past_len + k.shape[2]


def _head_norm(spec: AttentionSpec) -> nn.Module:
    """Return the norm over the D elements of a head that a spec requires."""
    if spec.qk_norm == "rms":
        return nn.RMSNorm(spec.head_dim, eps=spec.norm_eps)
    if spec.qk_norm == "layer":
        return nn.LayerNorm(spec.head_dim, eps=spec.norm_eps)
    return nn.Identity()


# -- conversion of torch.nn.MultiheadAttention --------------------------------------------------


def _spec_of(module: nn.MultiheadAttention, fields: Mapping[str, Any]) -> AttentionSpec:
    """Return the spec of a `torch.nn.MultiheadAttention`."""
    widths = {module.kdim, module.vdim}
    dtype = str(module.out_proj.weight.dtype).removeprefix("torch.")
    if fields.get("dtype", dtype) != dtype:
        raise SpecError(
            f"dtype is {fields['dtype']!r}, and the module is in {dtype}; convert the module first"
        )
    return AttentionSpec.from_dict(
        {
            "embed_dim": module.embed_dim,
            "num_heads": module.num_heads,
            "bias": module.in_proj_bias is not None,
            "add_bias_kv": module.bias_k is not None,
            "add_zero_attn": module.add_zero_attn,
            "dropout": module.dropout,
            "cross": widths != {module.embed_dim},
            "kdim": module.kdim,
            "vdim": module.vdim,
            # The other types, such as float64, cannot be exported: those modules run in eager only.
            **({"dtype": dtype} if dtype in DTYPES else {}),
            **fields,
        }
    )


def _weights_of(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Return copies of a module's weights, by the names that `Attention` gives them."""
    packed: Tensor | None = module.in_proj_weight
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    projections = separate if packed is None else packed.chunk(3)
    weights = {f"{name}_proj.weight": w for name, w in zip("qkv", projections, strict=True)}
    weights["out_proj.weight"] = module.out_proj.weight
    bias: Tensor | None = module.in_proj_bias
    if bias is not None:
        biases = zip("qkv", bias.chunk(3), strict=True)
        weights |= {f"{name}_proj.bias": b for name, b in biases}
        weights["out_proj.bias"] = module.out_proj.bias
    if module.bias_k is not None and module.bias_v is not None:
        for name, added in (("bias_k", module.bias_k), ("bias_v", module.bias_v)):
            weights[f"added_keys.{name}"] = added.reshape(module.num_heads, -1)  # from [1, 1, E]
    return {name: tensor.detach().clone() for name, tensor in weights.items()}
