"""Conversion of `torch.nn.MultiheadAttention`: its spec, and its weights by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from attn_export.errors import SpecError
from attn_export.spec import DTYPES, AttentionSpec


def spec_of(module: nn.MultiheadAttention, fields: Mapping[str, Any]) -> AttentionSpec:
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


def weights_of(module: nn.MultiheadAttention) -> dict[str, Tensor]:
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
