"""Jobs of `attn_export.bench.peers_export` for the layers of a spec."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attn_export.attention import Attention
from attn_export.bench.peers_export import example_of, export_bare, suppress_warnings
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph.lower import lower
from attn_export.graph.save import save_graph
from attn_export.spec import AttentionSpec
from measuring.timing import interleaved


def canonical(job: Mapping[str, Any], file: Path) -> None:
    """Export a spec to its canonical graph, as `attn-export build` does.

    Args:
        job: ``spec``, the fields of the spec.
        file: The file to write.
    """
    subject = Subject.from_spec(AttentionSpec.from_dict(job["spec"]))
    save_graph(export(subject).model, file)


def dialect_times(job: Mapping[str, Any], file: Path) -> None:
    """Measure the lowering to a dialect and, for comparison, a `torch.onnx.export`.

    Writes the seconds of every run as JSON, by ``"lower"`` and ``"torch.onnx.export"``.

    Args:
        job: ``spec``, the fields of the spec; ``dialect``, the dialect to lower to; ``rounds``,
            the number of measurements of each.
        file: The file to write.
    """
    spec = AttentionSpec.from_dict(job["spec"])
    model = export(Subject.from_spec(spec)).model
    module, (inputs, axes) = Attention(spec).eval(), example_of(spec)
    names = list(spec.output_shapes())
    calls: dict[str, Callable[[], object]] = {
        "lower": lambda: lower(model, job["dialect"]),
        "torch.onnx.export": lambda: export_bare(module, inputs, axes, names),
    }
    with suppress_warnings():
        seconds = interleaved(calls, job["rounds"])
    file.write_text(json.dumps(seconds))
