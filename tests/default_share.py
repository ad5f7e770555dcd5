"""Selection of the tests that run without --all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

Items = list[pytest.Item]


def default_share(items: Sequence[pytest.Item]) -> tuple[Items, Items]:
    """Split tests into those that run by default and the others.

    Tests marked `extended` do not run by default. Of a test marked `every(n)`, every n-th case
    runs, from the first. If it has several parameters, a case also runs if it is the first with
    some value that other cases have too.
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
    seen_values: set[tuple[str, int]] = set()
    kept = []
    for number, (item, values) in enumerate(zip(group, _repeated_values(group), strict=True)):
        if number % n == 0 or not seen_values >= values:
            seen_values |= values
            kept.append(item)
    return kept


def _repeated_values(group: Sequence[pytest.Item]) -> list[set[tuple[str, int]]]:
    """Return for each case the values of its parameters that another case has too."""
    calls = [getattr(item, "callspec", None) for item in group]
    cases = [
        {(name, id(value)) for name, value in call.params.items()} if call else set()
        for call in calls
    ]
    counts = Counter(value for case in cases for value in case)
    return [{value for value in case if counts[value] > 1} for case in cases]
