"""A report as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

from attn_export.results import Report

FORMAT = "attn-export-report/1"
LIST_OF_PLAIN = re.compile(r'\[\n[^][{}"]*\]')


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
        "runs": [dataclasses.asdict(run) for run in report.runs],
        "verdicts": [_finite(dataclasses.asdict(verdict)) for verdict in report.verdicts],
    }
    text = json.dumps(content, indent=1, allow_nan=False)
    # A row of numbers is a line: no string holds a line break.
    return LIST_OF_PLAIN.sub(lambda found: " ".join(found[0].split()), text) + "\n"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
