"""Exports of the layer of a spec, each of which runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attn_export.attention import Attention
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph.lower import lower
from attn_export.graph.save import save_graph
from attn_export.parts.benchmarks.torch_layers import example_of, export_bare, suppress_warnings
from attn_export.spec import AttentionSpec
from measuring.timing import interleaved


def canonical(spec: Mapping[str, Any], file: str) -> None:
    """Export a spec to its canonical graph, as `attn-export build` does.

    Args:
        spec: The fields of the spec.
        file: The file to write.
    """
    subject = Subject.from_spec(AttentionSpec.from_dict(spec))
    save_graph(export(subject).model, Path(file))


def dialect_times(spec: Mapping[str, Any], dialect: str, rounds: int) -> dict[str, list[float]]:
    """Measure the lowering to a dialect and, for comparison, a `torch.onnx.export`.

    Args:
        spec: The fields of the spec.
        dialect: The dialect to lower to.
        rounds: The number of measurements of each.

    Returns:
        The seconds of every run, by ``"lower"`` and ``"torch.onnx.export"``.
    """
    layer = AttentionSpec.from_dict(spec)
    model = export(Subject.from_spec(layer)).model
    module, (inputs, axes) = Attention(layer).eval(), example_of(layer)
    names = list(layer.output_shapes())
    calls: dict[str, Callable[[], object]] = {
        "lower": lambda: lower(model, dialect),
        "torch.onnx.export": lambda: export_bare(module, inputs, axes, names),
    }
    with suppress_warnings():
        return interleaved(calls, rounds)
