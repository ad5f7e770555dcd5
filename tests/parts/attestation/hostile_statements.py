"""Hostile statements: values of them, or of the report that they are made of, were changed."""

from __future__ import annotations

import json
from pathlib import Path

from hostile.bundles import Random, copied, maker, replaced
from hostile.values import changed

from attn_export.parts.attestation.statements import BOM, STATEMENT, write_statements


@maker
def statements(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a value of the report, or of a statement made of it."""
    copied(bundle, place)
    write_statements(place)
    names = (STATEMENT, BOM, "report.json")
    wrong = names[random.integers(len(names))]
    for name in names:
        value = json.loads((place / name).read_text())
        value = changed(value, random) if name == wrong else value
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        replaced(place, name, text.encode())
    return ["verify", str(place), "--quiet", "--runtime", "ort-cpu"]
