"""An explanation in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from rich.console import Console

from attn_export.explain.explanation import Experiment, Explanation
from attn_export.report.markup import as_text

MORE_CAUSES = 3


def print_explanation(found: Explanation, console: Console) -> None:
    """Print the sentence first, then its evidence."""
    colour = "green" if found.fault == "none" else "red"
    console.print(f"[{colour}]{as_text(found.sentence)}[/]", highlight=False, soft_wrap=True)
    for line in lines(found):
        console.print(as_text(line), highlight=False, soft_wrap=True)


def lines(found: Explanation) -> Iterator[str]:
    """Yield the evidence of the sentence, line by line."""
    for cause in found.causes[1 : 1 + MORE_CAUSES]:
        yield f"or: {cause.sentence}"
    if found.first is not None:
        line = f" ({found.first.line})" if found.first.line else ""
        says = f"; {found.first.says}" if found.first.says else ""
        size = f", relative error {found.first.error:.1e}" if isfinite(found.first.error) else ""
        yield f"first wrong node: {found.first.operator} {found.first.node}{line}{size}{says}"
    for said in found.pattern:
        yield f"pattern: {said}"
    for experiment in found.experiments:
        yield f"tried: {experiment.name}: {_outcome(experiment)}"
    if found.smallest:
        sizes = ", ".join(f"{axis} {size}" for axis, size in found.smallest.items())
        yield f"smallest case: {sizes}"
    for note in found.notes:
        yield f"note: {note}"
    if found.folder is not None and found.smallest:
        yield f"reproduce: python {found.folder}/reproduce.py"


def _outcome(experiment: Experiment) -> str:
    return (
        f"could not be run: {experiment.result}" if experiment.mended is None else experiment.result
    )
