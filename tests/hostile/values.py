"""Values that files must not hold, and places in JSON to put them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -0.0, float("nan"), float("inf"), 1e308,
    "", " ", "x" * 5000, "\x1b[31mred", "\x1b]0;title\x07", "a\n::error::b", "../../escape",
    "/etc/passwd", "..", ".", "CON", "a\\b", "[bold]x[/]", "[/]", "{{7*7}}", "${HOME}",
    "*/ int planted; /*", "'''", '"""', "'); import os; ('", "<script>alert(1)</script>",
    "\ud800", "\u202egnp", "\x00", "model.onnx", "query", [], [[]], {}, {"a": 1}, [0] * 3000,
    ["query_len"] * 9, {"": ""}, {"../x": "y"},
)  # fmt: skip
"""Wrong types, ranges and lengths; escapes, paths, markup and code."""

Change = Callable[[Any], Any]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within a JSON value."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from places(inner, (*path, number))


def changed(value: Any, random: np.random.Generator) -> Any:
    """Return a JSON value with one change: another value, none, a key too many or another key."""
    found = copy.deepcopy(value)
    # Not all places are alike: most values lie deep in long lists.
    path: tuple[Any, ...] = ()
    here = found
    while isinstance(here, (dict, list)) and len(here) and random.random() < 0.85:
        keys = list(here) if isinstance(here, dict) else range(len(here))
        key = keys[random.integers(len(keys))]
        path, here = (*path, key), here[key]
    if not path:
        return HOSTILE[random.integers(len(HOSTILE))]
    outer = found
    for key in path[:-1]:
        outer = outer[key]
    key, new = path[-1], HOSTILE[random.integers(len(HOSTILE))]
    kind = random.integers(6)
    if kind == 0:
        del outer[key]
    elif kind == 1 and isinstance(outer, dict):
        outer[new if isinstance(new, str) else "more"] = outer.pop(key)
    elif kind == 2 and isinstance(outer, dict):
        outer[new if isinstance(new, str) else "more"] = new
    elif kind == 3 and isinstance(outer, list):
        outer.append(new)
    else:
        outer[key] = new
    return found
