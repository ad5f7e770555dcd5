"""The call of the part that judges graphs of whole models, if it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_export.parts import models_module
from attn_export.results import Report
from attn_export.runtimes.run_options import RunOptions


def is_whole_model(of: Any) -> bool:
    """Return whether a value is a model of transformers, or the folder of a checkpoint."""
    if isinstance(of, str | Path):
        return (Path(of) / "config.json").is_file()
    return any(base.__name__ == "PreTrainedModel" for base in type(of).__mro__)


def compare_quantised(load: Any, graph: Path, run: RunOptions, **options: Any) -> Report:
    """Judge a quantised graph of a module by budgets: see the part that does it."""
    part = models_module("compares", ("torch",))
    report: Report = part.compare_quantised(load, graph, run, **options)
    return report


def compare_models(model: Any, graphs: Path | str, run: RunOptions, **options: Any) -> Report:
    """Judge graphs of a whole model: see the part that does it."""
    report: Report = models_module("compares").compare_models(model, graphs, run, **options)
    return report
