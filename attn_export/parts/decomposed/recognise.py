"""Replacement of attention in the operators of other exporters by `Attention` nodes."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.dialect_names import PORTABLE, STANDARD
from attn_export.graph.ir_helpers import nodes_of
from attn_export.graph.lower.dialects import Observed, with_shapes
from attn_export.graph.ort_compat import make_ort_compatible
from attn_export.parts.decomposed.decomposed import recognise_attention
from attn_export.parts.decomposed.from_contrib import from_contrib
from attn_export.parts.decomposed.normal_form import normalise


def recognise(model: ir.Model, dialect: str, observed: Observed | None) -> tuple[ir.Model, int]:
    """Return a graph with `Attention` nodes for attention of other forms, and their number."""
    if observed is not None:
        normal = normalise(model.clone(), observed)
        count = _recognise_decomposed(normal)
        count += from_contrib(normal) if dialect in (STANDARD, PORTABLE) else 0
        return (normal, count) if count else (model, 0)
    # Exporters leave out shapes of parts, as of `baddbmm`.
    model = with_shapes(model, [x for node in model.graph for x in node.outputs])
    return model, _recognise_decomposed(model)


def _recognise_decomposed(model: ir.Model) -> int:
    recognised = recognise_attention(model) if nodes_of(model, "Softmax") else 0
    if recognised:
        make_ort_compatible(model)
    return recognised
