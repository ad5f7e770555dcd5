"""Layers of models in 16 bits with a cache in place: their graphs, and kernels in dry runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.commands.bundle_graphs import lower_all
from attn_export.dialect_names import CUDA, STANDARD, phase_of
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph import IrGraph
from attn_export.graph.save import save_graphs
from attn_export.parts.cuda_dry_run.dry_run_results import Step
from attn_export.spec import AttentionSpec

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "docs" / "results" / "cuda_forms.json"
MODELS = (
    "mha", "gqa", "mqa", "llama-3-8b", "qwen3-0.6b", "mistral-7b", "falcon-7b", "gemma-3-1b",
)  # fmt: skip
IN_BFLOAT16 = ("gqa bfloat16", "llama-3-8b bfloat16")
"""Models in bfloat16. Those in `MODELS` are in float16."""

STEP = 1, 1, 1023
"""B, L and P of the decode step."""
PREFILL = 1, 512, 0
PREFILL_OF_ROWS = 2, 512, 0


def spec_of(name: str) -> AttentionSpec:
    """Return the spec of a model with a cache in place and no mask.

    Args:
        name: The name of the model, with its dtype if that is not float16.
    """
    model, _, dtype = name.partition(" ")
    path, dtype = ROOT / "models" / f"{model}.toml", dtype or "float16"
    return AttentionSpec.from_toml(path, attn_mask="none", cache="in-place", dtype=dtype)


def graphs_of(subject: Subject, folder: Path) -> dict[str, IrGraph]:
    """Write the graphs of a layer; return that of `STANDARD`, and those of `CUDA` by phase.

    Args:
        subject: The layer.
        folder: The folder to write to.
    """
    graphs, _ = lower_all(export(subject), (STANDARD, CUDA))
    save_graphs({graph.file.name: graph.model for graph in graphs}, folder)
    return {
        STANDARD if graph.file.dialect == STANDARD else phase_of(graph.file.name): graph
        for graph in graphs
    }


def kernels_of(step: Step) -> list[str]:
    """Return the kernels of ONNX Runtime that a step launches, in order.

    Calls of cuBLAS are omitted, because a dry run does not see the kernels that they launch.
    """
    return [event.name for event in step.events if event.kind == "launch"]


def read_kernels(path: Path = KERNELS) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return the kernels by model and architecture, then by ``"decode"`` and ``"prefill"``."""
    kernels: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    return kernels


def write_kernels(kernels: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Write the kernels.

    Args:
        kernels: As `read_kernels` returns them.
        versions: Versions of the packages.
    """
    text = json.dumps({"versions": dict(versions), "kernels": kernels}, indent=1)
    KERNELS.write_text(text + "\n", encoding="utf-8")


def key_of(name: str, architecture: str) -> str:
    """Return the key of a model on an architecture in `read_kernels`."""
    return f"{name} {architecture}"
