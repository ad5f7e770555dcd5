"""Notes on emulated processors that are less exact than others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attn_export.parity.baseline import FLOOR
from attn_export.results import Golden, Verdict

TIMES = 3.0
"""Ratio of errors above which a processor is reported as less exact."""


def cpu_notes(verdicts: Iterable[Verdict], goldens: Sequence[Golden]) -> tuple[str, ...]:
    """Return a note on each processor that is much less exact than the most exact one.

    Args:
        verdicts: Those of a report.
        goldens: The cases; their outputs tell whether the graphs compute in float16.
    """
    worst: dict[str, dict[str, float]] = {}
    for verdict in verdicts:
        if verdict.worst is not None and verdict.runtime.partition("@")[0] == "ort-cpu":
            of_graph = worst.setdefault(verdict.graph, {})
            known = of_graph.get(verdict.runtime, 0.0)
            of_graph[verdict.runtime] = max(known, verdict.worst)
    dtypes = {array.dtype.name for golden in goldens for array in golden.expected.values()}
    notes = []
    for name in dict.fromkeys(name for of_graph in worst.values() for name in of_graph):
        times, said = max(_times(of_graph, name) for of_graph in worst.values())
        if "@" in name and times > TIMES:
            notes.append(f"{name} {said}{_cause(name) if 'float16' in dtypes else ''}")
    return tuple(notes)


def _cause(name: str) -> str:
    from attn_export.runtimes.emulated_cpu import cpus

    added = cpus()[name.partition("@")[2]].float16
    if added == "none":
        return ""
    return f"; it adds {added} products of float16 in half precision, where others use float32"


def _times(worst: Mapping[str, float], name: str) -> tuple[float, str]:
    """Return how many times the least error that of a runtime is, and a phrase for it."""
    if name not in worst:
        return 0.0, ""
    best = min(worst, key=worst.__getitem__)
    times = worst[name] / max(worst[best], FLOOR)
    said = (
        f"has {times:.1f} times the error of {best}: "
        f"{worst[name]:.2f} of what is allowed, against {worst[best]:.2f}"
    )
    return times, said
