"""Selection of the tests that run without --all, and of the cases that their builds have."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch

from attn_export import AttentionSpec, Subject
from attn_export.cases import blocks
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
spec/any_spec spec/spec_files spec/spec_refusals spec/spec_values truth/rounding truth/ties
weights/weight_config weights/weight_config_errors weights/weight_sources
"""
QUICK = frozenset(_QUICK.split())
"""The files of tests that run with --quick, without `test_` and the suffix: thousands of tests that
take milliseconds each. They start few processes, and need no other runtimes and no Chromium."""


def is_quick(test: str) -> bool:
    """Return whether a file below `tests` runs with --quick."""
    return test.replace("test_", "").removesuffix(".py") in QUICK


LONGEST = 32
"""The largest of `blocks.BLOCKS` for which builds in the processes of the tests have cases."""

ALL_BLOCKS, ALL_FAR_CALLS = blocks.BLOCKS, blocks.FAR_CALLS


def shorten_cases() -> None:
    """Leave out the cases at larger blocks, which take half of the time of the tests.

    Command lines that are not forked build with all cases, and so do tests inside `long_cases`.
    """
    blocks.BLOCKS = tuple(block for block in ALL_BLOCKS if block <= LONGEST)
    blocks.FAR_CALLS = ()


def warm_up() -> None:
    """Prepare the server that forks commands: what an export imports takes seconds."""
    torch.set_num_threads(1)  # forked processes would lack the threads of a pool
    reuse_memory()
    shorten_cases()
    with torch.random.fork_rng():
        export(Subject.from_spec(AttentionSpec(embed_dim=8, num_heads=1)))


@contextlib.contextmanager
def long_cases() -> Iterator[None]:
    """Have builds in this block make cases of every length."""
    before = blocks.BLOCKS, blocks.FAR_CALLS
    blocks.BLOCKS, blocks.FAR_CALLS = ALL_BLOCKS, ALL_FAR_CALLS
    try:
        yield
    finally:
        blocks.BLOCKS, blocks.FAR_CALLS = before


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
