"""The call of the part that judges graphs of whole models, if it is there."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from attn_export.errors import UsageError
from attn_export.parts import parts
from attn_export.results import Report
from attn_export.runtimes.run_options import RunOptions
from attn_export.system_info import check_installed


def is_whole_model(of: Any) -> bool:
    """Return whether a value is a model of transformers, or the folder of a checkpoint."""
    if isinstance(of, str | Path):
        return (Path(of) / "config.json").is_file()
    return any(base.__name__ == "PreTrainedModel" for base in type(of).__mro__)


def compare_models(model: Any, graphs: Path | str, run: RunOptions, **options: Any) -> Report:
    """Judge graphs of a whole model: see the part that does it."""
    name = next((part.compares for part in parts() if part.compares), None)
    if name is None:
        raise UsageError(
            "graphs of whole models need the part whole_models, which is missing; install "
            "attn-export whole"
        )
    check_installed("torch")
    check_installed("transformers")
    report: Report = import_module(name).compare_models(model, graphs, run, **options)
    return report
