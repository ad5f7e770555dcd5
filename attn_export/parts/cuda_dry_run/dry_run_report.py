"""Dry runs in the terminal and as JSON. They are apart from verdicts, of which they have none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from rich.console import Console

from attn_export.parts.cuda_dry_run.dry_run_results import (
    ARCHITECTURES,
    NodeElsewhere,
    Observation,
    Step,
    best_graphs,
)
from attn_export.report.tables import Column, Table, graph_label, in_mib
from attn_export.report.terminal import as_text, print_table, say

FORMAT = "attn-export-dry-run/1"
MEANING = "a dry run: CUDA's libraries are stand-ins, no GPU ran and nothing was computed"
COLOUR = "magenta"
_UNNAMED = "none seen"
NUMBERS = ("launches", "copies", "waits")
COLUMNS = ("graph", "step", "on", "attention", *NUMBERS)


def dry_run_to_json(observations: Sequence[Observation]) -> str:
    """Return dry runs as JSON text, with a newline at the end."""
    content = {
        "format": FORMAT,
        "meaning": MEANING,
        "graphs": [dataclasses.asdict(observation) for observation in observations],
        "best_graphs": [dataclasses.asdict(best) for best in best_graphs(observations)],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def print_dry_run(observations: Sequence[Observation], console: Console) -> None:
    """Print dry runs. What is the same on several architectures is printed once."""
    say(f"[{COLOUR}]{MEANING}[/]", console)
    lines: dict[str, list[str]] = {}
    for observation in observations:
        for line in dict.fromkeys(_lines(observation)):
            lines.setdefault(line, []).append(_card_of(observation))
    for text in sizes(observations):
        say(text, console)
    total = len({observation.architecture for observation in observations})
    columns = tuple(Column(name, right=name in NUMBERS) for name in COLUMNS)
    rows = tuple(_table_rows(observations))
    if rows:
        say(", ".join(dict.fromkeys(map(_card_of, observations))), console)
        print_table(Table(columns, rows), console, header=COLOUR)
    for text in best_lines(observations):
        say(as_text(text), console)
    for line, cards in lines.items():
        alike = len(set(cards)) == total
        say(line if alike else f"{line} [{COLOUR}]({as_text(', '.join(cards))})[/]", console)


def sizes(observations: Sequence[Observation]) -> list[str]:
    """Return the sizes of all steps as text, without duplicates."""
    steps = (step for observation in observations for step in observation.steps)
    return list(dict.fromkeys(map(_sizes_of, steps)))


def _table_rows(observations: Sequence[Observation]) -> list[tuple[str, ...]]:
    """Return the rows under `COLUMNS`. Several architectures share a row if it is the same."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for observation in observations:
        for step in observation.steps:
            numbers = step.launches, step.copied, len(step.waits)
            row = observation.graph, step.name, attention_of(observation, step), *map(str, numbers)
            rows.setdefault(row, []).append(observation.architecture)
    total = len({observation.architecture for observation in observations})
    return [
        (graph_label(graph), step, "all" if len(archs) == total > 1 else " ".join(archs), *facts)
        for (graph, step, *facts), archs in rows.items()
    ]


def best_lines(observations: Sequence[Observation]) -> list[str]:
    """Return the best graphs by launches and copied bytes, a line per architecture and step."""
    cards = {observation.architecture: _card_of(observation) for observation in observations}
    graphs: dict[str, list[str]] = {}
    for best in best_graphs(observations):
        graphs.setdefault(f"{cards[best.architecture]}, {best.step}", []).append(
            f"{best.graph}, {best.launches} launches, {best.cache_bytes / 2**20:.3g} MiB of keys "
            "and values copied"
        )
    return [f"best by count on {key}: {'; or '.join(texts)}" for key, texts in graphs.items()]


def _sizes_of(step: Step) -> str:
    """Return the sizes of a step as text: ``decode: B 1, L 1, P 1023``."""
    letters = {"batch": "B", "query_len": "L", "past_len": "P"}
    sizes = (f"{letters.get(axis, axis)} {size}" for axis, size in step.sizes.items())
    return f"{step.name}: {', '.join(sizes)}"


def _card_of(observation: Observation) -> str:
    """Return the architecture with the name of a card: ``sm_80 A100``."""
    (card,) = (arch.card for arch in ARCHITECTURES if arch.name == observation.architecture)
    return f"{observation.architecture} {card}"


def attention_of(observation: Observation, step: Step) -> str:
    """Return the names of the kernels that compute attention, as text."""
    on_cpu = sorted({node.operator for node in observation.elsewhere if node.is_attention})
    kernels = [*step.attention, *([f"on the CPU: {', '.join(on_cpu)}"] if on_cpu else [])]
    if step.stopped:
        kernels.append("stopped, see below")
    return "; ".join(kernels) or _UNNAMED


def _lines(observation: Observation) -> Iterator[str]:
    where = as_text(observation.graph)
    if observation.refused:
        yield f"{where}: [red]refused[/]: {as_text(observation.refused)}"
    yield from (f"{where}: {line}" for line in _placements(observation.elsewhere))
    for step in observation.steps:
        if step.stopped:
            yield f"{where}, {step.name}: stopped: {as_text(step.finding)}"
            yield f"{where}, {step.name}: in the provider's words: {as_text(step.stopped)}"
        if step.cache_copies:
            copies = ", ".join(f"{count} {name}" for name, count in step.cache_copies.items())
            size = f"{step.cache_bytes / 2**20:.3g} MiB"
            yield f"{where}, {step.name}: copies keys and values: {as_text(copies)}, {size}"
        if step.waits:
            yield (
                f"{where}, {step.name}: waits for the device in {as_text(', '.join(step.waits))}; "
                "a dry run lacks the numbers that the host gets there, and may go on otherwise"
            )
    if observation.peak_bytes:
        steps = ", ".join(f"{step.name} {in_mib(step.peak_bytes)}" for step in observation.steps)
        by_step = f" ({steps})" if len(observation.steps) > 1 else ""
        yield f"{where}: device memory {in_mib(observation.peak_bytes)} MiB at most{by_step}"
    if observation.libraries:
        yield f"{where}: needs {', '.join(observation.libraries)}"
    for note in observation.notes:
        yield f"note: {as_text(note)}"


def _placements(nodes: Sequence[NodeElsewhere]) -> Iterator[str]:
    """Yield a line for each attention node on the CPU, and one for each reason of other nodes."""
    others: dict[str, list[str]] = {}
    for node in nodes:
        if node.is_attention:
            reason = as_text(f"{node.operator} {node.name}: {node.reason}")
            yield f"[red]on the CPU[/]: {reason}"
        else:
            others.setdefault(node.reason, []).append(node.operator)
    for reason, operators in others.items():
        counts = ", ".join(f"{operators.count(name)} {name}" for name in dict.fromkeys(operators))
        yield f"on the CPU: {as_text(counts)}: {as_text(reason)}"
