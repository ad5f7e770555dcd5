"""Foreign text for rich's consoles and tables."""

from __future__ import annotations

from rich.markup import escape

from attn_export.errors import PARAGRAPH, printable


def as_text(foreign: object) -> str:
    """Return markup that shows a foreign text as it is, with escapes for what is not printable."""
    return escape(printable(foreign, PARAGRAPH))
