"""A plain spec with changes, and a check for error messages."""

from __future__ import annotations

import pytest

from attn_export.errors import SpecError
from attn_export.spec import AttentionSpec


def make(**changes: object) -> AttentionSpec:
    """Return a spec of E 32, H 4 and nothing else, with changes."""
    return AttentionSpec.from_dict({"embed_dim": 32, "num_heads": 4} | changes)


def refuses(error: pytest.ExceptionInfo[SpecError], says: list[str]) -> None:
    message = str(error.value)
    assert [part for part in says if part not in message] == [], message
    assert len(message.splitlines()) == 1
    assert error.value.exit_code == 2
