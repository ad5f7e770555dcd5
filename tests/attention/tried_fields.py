"""Fields of a spec with the values that their rows try, for the tables of tests."""

from __future__ import annotations

from attn_export.spec.fields import FIELDS, TYPES

ELSEWHERE = {
    "kind", "cross", "causal", "cache", "attn_weights", "dtype",
    "weights_dtype",
}  # fmt: skip
"""Fields with tests of their own, which the tables combine with all others."""


def tried(name: str) -> list[dict[str, object]]:
    """Return fields that try one field: each with what it needs to act."""
    field = FIELDS[name]
    values = field.tries or field.choices[1:] or (True,) * (TYPES[name] == "bool")
    needed: dict[str, object] = {}
    for other, allowed in {**field.needs, **field.acts_with}.items() if values else ():
        needed |= tried(other)[0] | ({other: allowed[0]} if allowed else {})
    return [{**needed, name: value} for value in values]


def alone() -> dict[str, dict[str, object]]:
    """Return for each value of each feature of a layer the fields that try it alone."""
    return {
        name if len(tried(name)) == 1 else f"{name} {fields[name]}": fields
        for name, field in FIELDS.items()
        if name not in ELSEWHERE and not field.acts_with
        for fields in tried(name)
    }
