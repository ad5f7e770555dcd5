"""The schema of report.json, and its validator."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

SCHEMA = json.loads(
    (Path(__file__).parents[1] / "attn_export" / "report" / "report.schema.json").read_text()
)


@functools.cache
def validator() -> Any:
    """Return the validator of the schema."""
    from jsonschema import Draft202012Validator  # takes 2 s, in every process that imports tests

    Draft202012Validator.check_schema(SCHEMA)
    return Draft202012Validator(SCHEMA)
