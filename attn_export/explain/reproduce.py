"""A folder with a script that reproduces the smallest failing case."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.code_templates import render
from attn_export.explain.explanation import Explanation
from attn_export.explain.graph_run import GoldenCase, GraphRunner
from attn_export.graph.load import load_graph
from attn_export.graph.save import replace_graph
from attn_export.output_folder import replaceable, replacement_of, write_errors
from attn_export.schema import Tolerance
from attn_export.temp_folders import folder_beside
from attn_export.tensorfile import write_npz

TEMPLATE = Path(__file__).with_name("templates") / "reproduce.py.j2"
EXPLANATION, SCRIPT = "explanation.json", "reproduce.py"
FORMAT = "attn-export-explanation/1"

ENGINES = {
    "ort-cpu": "onnxruntime", "ort-cuda": "onnxruntime", "openvino": "openvino",
    "onnx-reference": "onnx",
}  # fmt: skip
"""Python packages with which the script runs runtimes. attn-export itself runs the others."""


def check_folder(folder: Path) -> None:
    """Check, before the search, that the folder can be written."""
    with write_errors(folder):
        target = replaceable(folder, "explanation")
        if target.parent.exists():
            with folder_beside(target):
                pass


def write_folder(
    folder: Path, explanation: Explanation, runner: GraphRunner, case: GoldenCase,
    dtypes: Mapping[str, str],
) -> None:  # fmt: skip
    """Write the graph, the case, the script and the explanation; replace an older folder."""
    golden = case.golden
    tolerance = {name: limits for name, limits in golden.tolerance.items() if limits is not None}
    right = {n: array.astype(np.float64) for n, array in golden.expected.items() if n in tolerance}
    with replacement_of(folder, "explanation") as staged:
        replace_graph(load_graph(runner.path), staged / runner.path.name, beside=False)
        graph_inputs = runner.to_graph_layout(case.inputs)
        write_npz(staged / "inputs.npz", graph_inputs)
        write_npz(staged / "expected.npz", runner.to_graph_layout(right))
        (staged / SCRIPT).write_text(
            _script(explanation, runner, tolerance, dtypes), encoding="utf-8"
        )
        (staged / EXPLANATION).write_text(to_json(explanation), encoding="utf-8")


def to_json(explanation: Explanation) -> str:
    """Convert an explanation to the text of `explanation.json`."""
    fields = dataclasses.asdict(explanation)
    fields["folder"] = None if explanation.folder is None else str(explanation.folder)
    if fields["first"] is not None and not np.isfinite(fields["first"]["error"]):
        fields["first"]["error"] = None  # JSON has no infinity
    content: dict[str, Any] = {"format": FORMAT, "sentence": explanation.sentence, **fields}
    return json.dumps(content, indent=1) + "\n"


def _options(runner: GraphRunner, engine: str) -> dict[str, Any]:
    """Return the options of the engine, with attn-export's defaults for OpenVINO (no bfloat16)."""
    if engine != "openvino":
        return dict(runner.options)
    from attn_export.runtimes.engines.openvino import default_options

    return {**default_options(runner.limits.threads), **runner.options}


def _script(
    explanation: Explanation, runner: GraphRunner, tolerance: Mapping[str, Tolerance],
    dtypes: Mapping[str, str],
) -> str:  # fmt: skip
    engine = ENGINES.get(runner.runtime.name, runner.runtime.name)
    cuda = runner.runtime.name == "ort-cuda"
    context = {
        "sentence": explanation.sentence,
        "engine": engine,
        "tolerance": {
            name: (float(f"{limits.whole:.3g}"), float(f"{limits.row:.3g}"))
            for name, limits in tolerance.items()
        },
        "threads": runner.limits.threads,
        "options": _options(runner, engine),
        "providers": ["CUDAExecutionProvider"] if cuda else ["CPUExecutionProvider"],
        "graph": runner.path.name,
        "outputs": dict(dtypes),
    }
    return render(TEMPLATE, context)
