"""Operator counts of each variant's graphs, which reveal slower graphs without a benchmark."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import pytest

from attn_export.dialect_names import CUDA, DIALECTS
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph.lower import lower
from attn_export.spec import AttentionSpec

COUNTS = {
    ("mha mqa gqa", "none", "standard"): """
        Add 4, Attention 1, Concat 1, Expand 1, MatMul 4, Reshape 4, Shape 1, Transpose 4
    """,
    ("mha", "none", "portable"): """
        Add 4, And 1, LessOrEqual 1, MatMul 6, Mul 1, Range 1, Reshape 4, Shape 1,
        Softmax 1, Squeeze 1, Transpose 5, Unsqueeze 1, Where 2
    """,
    ("mqa", "none", "portable"): """
        Add 4, And 1, LessOrEqual 1, MatMul 6, Mul 1, Range 1, Reshape 6, Shape 1,
        Softmax 1, Squeeze 1, Transpose 3, Unsqueeze 4, Where 2
    """,
    ("gqa", "none", "portable"): """
        Add 4, And 1, LessOrEqual 1, MatMul 6, Mul 1, Range 1, Reshape 6, Shape 1,
        Softmax 1, Squeeze 1, Transpose 5, Unsqueeze 4, Where 2
    """,
    ("mha mqa gqa", "none", "ort"): """
        Add 4, And 1, Cast 2, Expand 1, Greater 1, GroupQueryAttention 1, LessOrEqual 1,
        MatMul 4, Range 1, ReduceMax 1, Shape 2, Squeeze 2, Sub 1, Unsqueeze 1, Where 2
    """,
    ("mha mqa gqa", "append", "standard"): """
        Add 4, Attention 1, Concat 1, Expand 1, MatMul 4, Reshape 4, Shape 1, Transpose 4
    """,
    ("mha", "append", "portable"): """
        Add 5, And 1, Concat 2, LessOrEqual 1, MatMul 6, Mul 1, Range 2, Reshape 4, Shape 3,
        Softmax 1, Squeeze 2, Transpose 5, Unsqueeze 1, Where 2
    """,
    ("mqa", "append", "portable"): """
        Add 5, And 1, Concat 2, LessOrEqual 1, MatMul 6, Mul 1, Range 2, Reshape 6, Shape 3,
        Softmax 1, Squeeze 2, Transpose 3, Unsqueeze 4, Where 2
    """,
    ("gqa", "append", "portable"): """
        Add 5, And 1, Concat 2, LessOrEqual 1, MatMul 6, Mul 1, Range 2, Reshape 6, Shape 3,
        Softmax 1, Squeeze 2, Transpose 5, Unsqueeze 4, Where 2
    """,
    ("mha gqa", "append", "ort"): """
        Add 4, Equal 2, If 1, MatMul 4, Or 1, Shape 3, Squeeze 1
        then: [Add 2, And 1, Cast 2, Expand 1, Greater 1, GroupQueryAttention 1,
        LessOrEqual 1, Range 2, ReduceMax 1, Squeeze 3, Sub 1, Unsqueeze 1, Where 2]
        else: [Attention 1, Concat 1, Expand 1, Reshape 4, Transpose 4]
    """,
    ("mqa", "append", "ort"): """
        Add 4, Equal 2, If 1, MatMul 4, Or 1, Shape 3, Squeeze 1
        then: [Add 2, And 1, Cast 2, Expand 1, Greater 1, GroupQueryAttention 1,
        LessOrEqual 1, Range 2, ReduceMax 1, Squeeze 3, Sub 1, Unsqueeze 1, Where 2]
        else: [Attention 1, Concat 1, Expand 1, Reshape 4, Transpose 2]
    """,
    ("mha", "append", "ort.decode"): """
        Add 4, Equal 2, If 1, MatMul 4, Or 1, Shape 2, Squeeze 1
        then: [Add 1, Cast 2, Expand 1, Greater 1, GroupQueryAttention 1, ReduceMax 1,
        Squeeze 2, Sub 1, Where 2]
        else: [Attention 1, Concat 1, Expand 1, Reshape 4]
    """,
    ("mqa gqa", "append", "ort.decode"): """
        Add 5, Concat 2, Greater 1, MatMul 6, Mul 1, ReduceMax 1, Reshape 6, Softmax 1,
        Transpose 2, Where 2
    """,
    ("mha mqa gqa", "in-place", "standard"): """
        Add 5, Attention 1, Concat 1, Expand 1, MatMul 4, Reshape 4, Shape 1, Squeeze 1,
        TensorScatter 2, Transpose 4
    """,
    ("mha", "in-place", "portable"): """
        Add 12, And 1, Concat 1, LessOrEqual 1, MatMul 6, Mul 2, Range 3, Reshape 4,
        ScatterND 2, Shape 3, Softmax 1, Squeeze 3, Sub 1, Transpose 5, Unsqueeze 8, Where 2
    """,
    ("mqa", "in-place", "portable"): """
        Add 12, And 1, Concat 1, LessOrEqual 1, MatMul 6, Mul 2, Range 3, Reshape 6,
        ScatterND 2, Shape 3, Softmax 1, Squeeze 3, Sub 1, Transpose 3, Unsqueeze 11,
        Where 2
    """,
    ("gqa", "in-place", "portable"): """
        Add 12, And 1, Concat 1, LessOrEqual 1, MatMul 6, Mul 2, Range 3, Reshape 6,
        ScatterND 2, Shape 3, Softmax 1, Squeeze 3, Sub 1, Transpose 5, Unsqueeze 11,
        Where 2
    """,
    ("mha", "in-place", "ort"): """
        Add 4, Equal 1, If 1, MatMul 4, ReduceMax 1, Reshape 2, Shape 1, Squeeze 1,
        TensorScatter 2, Transpose 2
        then: [And 1, Cast 2, Expand 1, Greater 1, GroupQueryAttention 1, LessOrEqual 1,
        Range 1, ReduceMax 1, Shape 1, Slice 1, Squeeze 1, Sub 1, Unsqueeze 1, Where 2]
        else: [Add 1, Attention 1, Concat 1, Expand 1, Reshape 2, Transpose 2]
    """,
    ("mqa", "in-place", "ort"): """
        Add 4, Equal 1, If 1, MatMul 4, ReduceMax 1, Reshape 2, Shape 1, Squeeze 1,
        TensorScatter 2, Transpose 1
        then: [And 1, Cast 2, Expand 1, Greater 1, GroupQueryAttention 1, LessOrEqual 1,
        Range 1, ReduceMax 1, Shape 1, Slice 1, Squeeze 1, Sub 1, Unsqueeze 1, Where 2]
        else: [Add 2, And 1, LessOrEqual 1, MatMul 2, Mul 1, Range 2, Reshape 4, Shape 1,
        Softmax 1, Squeeze 1, Sub 1, Transpose 4, Unsqueeze 5, Where 2]
    """,
    ("gqa", "in-place", "ort"): """
        Add 4, Equal 1, If 1, MatMul 4, ReduceMax 1, Reshape 2, Shape 1, Squeeze 1,
        TensorScatter 2, Transpose 3
        then: [And 1, Cast 2, Expand 1, Greater 1, GroupQueryAttention 1, LessOrEqual 1,
        Range 1, ReduceMax 1, Shape 1, Slice 1, Squeeze 1, Sub 1, Unsqueeze 1, Where 2]
        else: [Add 2, And 1, LessOrEqual 1, MatMul 2, Mul 1, Range 2, Reshape 4, Shape 1,
        Softmax 1, Squeeze 1, Sub 1, Transpose 4, Unsqueeze 5, Where 2]
    """,
    ("mha", "in-place", "ort.decode"): """
        Add 6, And 1, Greater 1, Less 1, MatMul 6, Mul 1, Range 1, ReduceMax 1, Reshape 6,
        Shape 1, Softmax 1, Squeeze 1, TensorScatter 2, Transpose 1, Unsqueeze 1, Where 2
    """,
    ("mqa gqa", "in-place", "ort.decode"): """
        Add 6, And 1, Greater 1, Less 1, MatMul 6, Mul 1, Range 1, ReduceMax 1, Reshape 6,
        Shape 1, Softmax 1, Squeeze 1, TensorScatter 2, Transpose 4, Unsqueeze 1, Where 2
    """,
}
"""By variants, cache and file."""


def canonical(variant: str, cache: str) -> ir.Model:
    spec = AttentionSpec.variant(variant, embed_dim=64, cache=cache)
    return export(Subject.from_spec(spec)).model


def counted(graph: ir.Graph) -> str:
    """Return operators with their counts; those of branches in brackets."""
    found = Counter(node.op_type for node in graph)
    text = ", ".join(f"{name} {count}" for name, count in sorted(found.items()))
    branches = [
        f"{name[:4]}: [{counted(held.as_graph())}]"
        for node in graph
        for name, held in sorted(node.attributes.items(), reverse=True)
        if held.type == ir.AttributeType.GRAPH
    ]
    return " ".join([text, *branches])


@pytest.mark.parametrize("variant", ["mha", "mqa", "gqa"])
@pytest.mark.parametrize("cache", ["none", "append", "in-place"])
@pytest.mark.every(3)
def test_the_operators_of_every_file_are_pinned(variant: str, cache: str):
    model = canonical(variant, cache)
    found = {
        ".".join(filter(None, (dialect, phase))): counted(form.model.graph)
        for dialect in DIALECTS
        if dialect != CUDA
        for phase, form in lower(model, dialect).items()
    }
    wanted = {
        file: " ".join(text.split())
        for (variants, kind, file), text in COUNTS.items()
        if kind == cache and variant in variants.split()
    }
    assert found == wanted
