"""Templates of programs and documents, into which only escaped values can be written.

Names, paths and numbers may come from untrusted files. Each kind of place, such as a string
of Python, has one filter. Writing a text without one is an error.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Escapes = Mapping[str, Callable[[Any], str]]
"""Filters of templates, by name."""


def render(template: Path, context: Mapping[str, Any], more_escapes: Escapes | None = None) -> str:
    """Return the text of a template with its values."""
    import jinja2
    from markupsafe import Markup

    def require_escape(value: object) -> object:
        # Filters and macros return Markup. Integers are written alike in all languages.
        if isinstance(value, Markup) or type(value) is int:
            return value
        raise TypeError(f"{template.name} writes {value!r:.60} without an escape")

    def marked(escape: Callable[[Any], str]) -> Callable[[Any], Markup]:
        return lambda value: Markup(escape(value))

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
        finalize=require_escape,
    )
    filters = {**_ESCAPES, **(more_escapes or {})}
    environment.filters |= {name: marked(escape) for name, escape in filters.items()}
    return environment.from_string(template.read_text(encoding="utf-8")).render(context)


def python(value: object) -> str:
    """Return a literal of Python, in ASCII."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or type(value) in (str, int, float, bool):
        return ascii(value)
    if isinstance(value, Mapping):
        items = [f"{python(key)}: {python(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(python, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(python, value))},)" if value else "()"
    raise ValueError(f"{value!r:.60} has no literal in Python")


def python_comment(text: str) -> str:
    """Return the text of a comment: one line of ASCII."""
    return ascii(text)[1:-1]


def shell(text: str) -> str:
    """Return a word of a POSIX shell, without characters that cannot be seen."""
    return shlex.quote("".join(filter(str.isprintable, text)))


_ESCAPES: Escapes = {"python": python, "python_comment": python_comment}
"""The filters of all templates."""
