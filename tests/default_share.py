"""Selection of the tests that run without --all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from attn_export import AttentionSpec, Subject
from attn_export.export.export import export
from attn_export.system_info import reuse_memory

Items = list[pytest.Item]

_QUICK = """
attention/features attention/forbidden_keys attention/from_torch attention/in_place attention/latent
attention/module_contract attention/pooling attention/positions attention/training
bundle/golden bundle/tensorfile cases/input_patterns cases/draw code_templates
commands/cli commands/old_bundles explain/patterns
float64/bounded float64/exporters_operators float64/loops
graph/canonical graph/checks graph/computed_masks graph/lower_ort graph/lower_portable
graph/opset18_table judge/judge judge/measures parts/probe/readings report/terminal source_files
spec/any_spec spec/spec_files spec/spec_refusals spec/spec_values reference/rounding reference/ties
weights/weight_config weights/weight_config_errors weights/weight_sources
"""
QUICK = frozenset(_QUICK.split())
"""The files of tests that run with --quick, without `test_` and the suffix: thousands of tests that
take milliseconds each. They start few processes, and need no other runtimes and no Chromium."""


def is_quick(test: str) -> bool:
    """Return whether a file below `tests` runs with --quick."""
    return test.replace("test_", "").removesuffix(".py") in QUICK


def warm_up() -> None:
    """Prepare the server that forks commands: what an export imports takes seconds."""
    torch.set_num_threads(1)  # forked processes would lack the threads of a pool
    reuse_memory()
    with torch.random.fork_rng():
        export(Subject.from_spec(AttentionSpec(embed_dim=8, num_heads=1)))


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
