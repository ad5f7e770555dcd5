"""A fingerprint as JSON."""

from __future__ import annotations

import json
from typing import Any

from attn_export.fingerprint.findings import Finding, Fingerprint, Row

FORMAT = "attn-export-fingerprint/1"


def probe_to_json(found: Fingerprint) -> str:
    """Return the fingerprint as JSON text, with a newline at the end."""
    content = {
        "format": FORMAT,
        "runtime": found.runtime,
        "version": found.version,
        "environment": found.environment,
        "probes": [_row(row) for row in found.rows],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.probe,
        "about": row.about,
        "reading": row.effective.reading,
        "differs_from": list(row.differs),
        "runtime": [_finding(each) for each in row.here],
        "onnx": {
            "says": row.says or None,
            "evaluator": None if row.evaluator is None else _finding(row.evaluator),
        },
        "pytorch": _finding(row.pytorch),
    }


def _finding(each: Finding) -> dict[str, str | None]:
    return {
        "form": each.form or None,
        "outcome": each.outcome,
        "reading": each.reading,
        "detail": each.detail or None,
    }
