"""Explanations in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from rich.console import Console

from attn_export.explain.explanation import Explanation
from attn_export.report.tables import reproduce_command
from attn_export.report.terminal import as_text, say

_MORE_CAUSES = 3
"""Largest number of alternative causes that are printed."""


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print the sentence of an explanation, then its evidence."""
    colour = "green" if explanation.fault == "none" else "red"
    say(f"[{colour}]{as_text(explanation.sentence)}[/]", console)
    for line in _evidence(explanation):
        say(as_text(line), console)


def _evidence(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of the evidence of an explanation."""
    for cause in explanation.causes[1 : 1 + _MORE_CAUSES]:
        yield f"or: {cause.sentence}"
    if (first := explanation.first) is not None:
        says = "".join(f"; {text}" for text in (first.relation, first.says) if text)
        size = f", relative error {first.error:.1e}" if isfinite(first.error) else ""
        yield f"first wrong node: {first.location}{size}{says}"
    for pattern in explanation.pattern:
        yield f"pattern: {pattern}"
    for experiment in explanation.experiments:
        failure = "could not be run: " if experiment.passed is None else ""
        yield f"tried: {experiment.name}: {failure}{experiment.result}"
    if explanation.smallest:
        sizes = ", ".join(f"{axis} {size}" for axis, size in explanation.smallest.items())
        yield f"smallest case: {sizes}"
    for part in explanation.distance:
        yield f"distance from the float model: {part}"
    for note in explanation.notes:
        yield f"note: {note}"
    if explanation.folder is not None and explanation.smallest:
        yield f"reproduce: {reproduce_command(explanation.folder)}"
