"""The share of the tests that runs without --all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

Items = list[pytest.Item]


def default_share(items: Sequence[pytest.Item]) -> tuple[Items, Items]:
    """Return the tests that run by default, and the others.

    Tests marked `extended` do not. Of the cases of a test marked `every(n)`, every n-th does, from
    the first; with several parameters also those in which a value of one of them occurs first.
    """
    groups: dict[str, Items] = {}
    kept: Items = []
    for item in items:
        if item.get_closest_marker("extended") is None:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in groups.values():
        marker = group[0].get_closest_marker("every")
        kept += group if marker is None else _share(group, marker.args[0])
    chosen = {id(item) for item in kept}
    return [i for i in items if id(i) in chosen], [i for i in items if id(i) not in chosen]


def _share(group: Sequence[pytest.Item], n: int) -> Items:
    columns = _columns(group)
    seen: set[tuple[int, int]] = set()
    kept = []
    for number, item in enumerate(group):
        values = {(axis, column[number]) for axis, column in enumerate(columns)}
        if number % n == 0 or (len(columns) > 1 and not seen >= values):
            seen |= values
            kept.append(item)
    return kept


def _columns(group: Sequence[pytest.Item]) -> list[tuple[int, ...]]:
    """Return, for each parameter, the number of its value in each case; equal columns once."""
    cases = [
        dict(call.params) if (call := getattr(item, "callspec", None)) else {} for item in group
    ]
    columns = {}
    for name in cases[0]:
        numbers: dict[int, int] = {}
        columns[tuple(numbers.setdefault(id(case[name]), len(numbers)) for case in cases)] = None
    return list(columns)
