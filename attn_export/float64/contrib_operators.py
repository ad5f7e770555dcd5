"""The operators that exporters write for ONNX Runtime, for the reference evaluator of onnx.

An input or attribute that is not implemented raises NotImplementedError, so that no graph is
reported as wrong because of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from attn_export.dialect_names import MICROSOFT
from attn_export.float64 import fused_attention, fused_layers
from attn_export.float64.attention_steps import StepChange, Steps
from attn_export.float64.integer_steps import packed_weight, quantised_table, round_by_block
from attn_export.quantiser import INTEGER_PRODUCTS
from attn_export.tensorfile import Array


class MatMulNBits(OpRun):
    """Product with a weight of 4 or 8 bits, stored as `[out, blocks, bytes]`, lower nibble first.

    At `accuracy_level` 4, inputs are rounded to 8 bits, as ONNX Runtime does on x86.
    """

    op_domain = MICROSOFT

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        x, *constants = inputs
        weight = packed_weight(constants, attributes)
        assert x is not None
        if attributes.get("accuracy_level") == INTEGER_PRODUCTS:
            x = self._round_input(x, attributes["block_size"])
        return (x @ weight,)

    @staticmethod
    def _round_input(x: Array, block: int) -> Array:
        return round_by_block(x, block, Steps({}))


class DequantizeLinear(OpRun):
    """`DequantizeLinear` before opset 19, which the reference evaluator lacks."""

    op_domain = ""

    def _run(
        self, x: Array, scale: Array, zero: Array | None = None, **attributes: Any
    ) -> tuple[Array]:
        axis = attributes.get("axis") or 1
        shape = [-1 if at == axis % x.ndim else 1 for at in range(x.ndim)] if scale.size > 1 else []
        shifted = x.astype(np.float64) - (0 if zero is None else zero.reshape(shape))
        return (np.asarray(shifted * scale.reshape(shape)),)


class GatherBlockQuantized(OpRun):
    """Rows of a table of integers, dequantised."""

    op_domain = MICROSOFT

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        stored, indices, *others = inputs
        table = quantised_table((stored, *others), attributes)
        assert indices is not None
        return (np.take(table, indices, attributes.get("gather_axis", 0)),)


_Function = Callable[..., tuple[Array | None, ...]]

_SEEN_IN_SHAPES = frozenset({"k_quant_type", "stash_type", "v_quant_type"})
"""Attributes that say what types and shapes of operands say too, or the type of rounding."""


def make_operator(domain: str, name: str, function: _Function) -> type[OpRun]:
    """Return an operator that is a function of its inputs, and of its attributes by keyword."""
    parameters = list(inspect.signature(function).parameters.values())
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    most = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    def run(self: Any, *inputs: Array | None, **attributes: Any) -> tuple[Array | list[Array], ...]:
        refused = [f"input {i}" for i, x in enumerate(inputs) if i >= most and x is not None]
        known = keywords | _SEEN_IN_SHAPES
        refused += [name for name, value in attributes.items() if value and name not in known]
        if refused:
            raise NotImplementedError(f"{name} with {', '.join(sorted(refused))}")
        given = {name: value for name, value in attributes.items() if name in keywords}
        if "changes" in keywords:
            given["changes"] = self.changes
        outputs = function(*(*inputs, *[None] * most)[:most], **given)
        # An output that a runtime leaves undefined is a list, as no reader compares it.
        return tuple([] if x is None else x for x in outputs)[: len(self.onnx_node.output)]

    changes: Mapping[str, StepChange] = {}
    members = {"op_domain": domain, "op_schema": None, "_run": run, "changes": changes}
    return type(name, (OpRun,), members)


_FUNCTIONS: Mapping[str, Mapping[str, _Function]] = {
    "": {
        "Gelu": fused_layers.gelu,
        "SimplifiedLayerNormalization": fused_layers.rms_norm,
        "Swish": fused_layers.swish,
    },
    MICROSOFT: {
        "Attention": fused_attention.packed_attention,
        "BiasGelu": fused_layers.bias_gelu,
        "EmbedLayerNormalization": fused_layers.embed_layer_norm,
        "FastGelu": fused_layers.fast_gelu,
        "FusedMatMul": fused_layers.fused_matmul,
        "Gelu": fused_layers.gelu,
        "GroupQueryAttention": fused_attention.group_query_attention,
        "MoE": fused_layers.mixture_of_experts,
        "MultiHeadAttention": fused_attention.multi_head_attention,
        "QuickGelu": fused_layers.quick_gelu,
        "RotaryEmbedding": fused_layers.rotary_embedding,
        "SkipLayerNormalization": fused_layers.skip_layer_norm,
        "SkipSimplifiedLayerNormalization": fused_layers.skip_rms_norm,
    },
}
"""The functions by domain and operator; Gelu and Swish are functions of ONNX whose constants are
float32."""

CONTRIB_OPERATORS: list[type[OpRun]] = [
    GatherBlockQuantized,
    MatMulNBits,
    *(
        make_operator(domain, name, function)
        for domain, functions in _FUNCTIONS.items()
        for name, function in functions.items()
    ),
]
"""The operators that ONNX Runtime adds, and those whose definition in ONNX is not exact."""
