"""Messages that docs/troubleshooting.md quotes."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.M)


@functools.cache
def texts() -> str:
    """Return every text of the package, one a line; what is put into it at run time is `…`."""
    found = []
    for path in sorted((ROOT / "attn_export").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                ))  # fmt: skip
    return "\n".join(text.replace("\n", " ") for text in found)


def test_the_page_quotes_messages_of_every_kind():
    assert len(QUOTED) >= 20
    codes = set(re.findall(r"^Exit code (\d)", PAGE, flags=re.M))
    assert codes == set("234567")


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_code(message: str):
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    assert re.search(pattern, texts()), message
