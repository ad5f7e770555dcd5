"""JSON of reports."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

from msgspec.structs import asdict

from attn_export.quality import Quality
from attn_export.results import Report

FORMAT = "attn-export-report/1"
_LIST_OF_PLAIN = re.compile(r'\[\n[^][{}"]*\]')
"""Pattern of a list without strings, lists and objects in indented JSON."""


def to_json(report: Report) -> str:
    """Return the report as JSON text, with a newline at the end. NaN and infinities become null."""
    content = {
        "format": FORMAT,
        "name": report.name,
        "passed": report.passed,
        "exit_code": report.exit_code,
        "environment": report.environment,
        "notes": report.notes,
        "explanations": report.explanations,
        "layers": [_without_nan(dataclasses.asdict(layer)) for layer in report.layers],
        "reproduction": None if report.reproduction is None else str(report.reproduction),
        "dimensions": dict(report.dimensions),
        "error": None if report.error is None else str(report.error),
        "runs": [dataclasses.asdict(run) for run in report.runs],
        "signature": None if report.signature is None else dataclasses.asdict(report.signature),
        "quality": None if report.quality is None else _quality(report.quality),
        "verdicts": [_without_nan(dataclasses.asdict(verdict)) for verdict in report.verdicts],
    }
    text = json.dumps(content, indent=1, allow_nan=False)
    # Put lists of numbers on one line. No string matches, because JSON escapes line breaks.
    return _LIST_OF_PLAIN.sub(lambda match: " ".join(match[0].split()), text) + "\n"


def _quality(quality: Quality) -> dict[str, Any]:
    content: dict[str, Any] = {
        "outputs": [asdict(distance) for distance in quality.outputs],
        "budgets": [str(budget) for budget in quality.budgets],
        "missed": list(quality.missed),
    }
    if quality.logits:
        content["logits"] = dataclasses.asdict(quality.logits)
    if len(quality.of_logits) > 1:
        content["all_logits"] = [dataclasses.asdict(each) for each in quality.of_logits]
    if quality.kept:
        content["kept"] = dict(quality.kept)
    for name in ("causes", "layers", "projections"):
        if losses := getattr(quality, name):
            content[name] = [_without_nan(dataclasses.asdict(loss)) for loss in losses]
    return content


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities by None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def finite(value: float) -> float | None:
    """Return a value with five significant digits, or None for NaN and infinities."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
