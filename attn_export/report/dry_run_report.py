"""Dry runs in the terminal and as JSON: a section of its own, with no verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from attn_export.report.tables import Column, Table, form_name, in_mib
from attn_export.report.terminal import as_text, print_table, say
from attn_export.runtimes.dry_run_results import (
    ARCHITECTURES,
    NodeElsewhere,
    Observation,
    Step,
    best_graphs,
)

FORMAT = "attn-export-dry-run/1"
MEANING = "a dry run: CUDA's libraries are stand-ins, no GPU ran and nothing was computed"
COLOUR = "magenta"
UNNAMED = "none seen"
NUMBERS = ("launches", "copies", "waits")
COLUMNS = ("graph", "step", "on", "attention", *NUMBERS)


def dry_run_to_json(observations: Sequence[Observation]) -> str:
    """Return dry runs as JSON text, with a newline at the end."""
    content = {
        "format": FORMAT,
        "meaning": MEANING,
        "graphs": [dataclasses.asdict(one) for one in observations],
        "best_graphs": [dataclasses.asdict(best) for best in best_graphs(observations)],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def print_dry_run(observations: Sequence[Observation], console: Console) -> None:
    """Print what was seen; what is alike on several architectures once.

    Args:
        observations: The dry runs.
        console: The console to print on.
    """
    say(f"[{COLOUR}]{MEANING}[/]", console)
    lines: dict[str, list[str]] = {}
    for one in observations:
        for line in dict.fromkeys(_lines(one)):
            lines.setdefault(line, []).append(card_of(one))
    for text in sizes(observations):
        say(text, console)
    everywhere = len({one.architecture for one in observations})
    columns = tuple(Column(name, right=name in NUMBERS) for name in COLUMNS)
    rows = tuple(table_rows(observations))
    if rows:
        say(", ".join(dict.fromkeys(map(card_of, observations))), console)
        print_table(Table(columns, rows), console, header=COLOUR)
    for text in best_lines(observations):
        say(as_text(text), console)
    for line, cards in lines.items():
        alike = len(set(cards)) == everywhere
        say(line if alike else f"{line} [{COLOUR}]({as_text(', '.join(cards))})[/]", console)


def sizes(observations: Sequence[Observation]) -> list[str]:
    """Return the sizes of all steps as text, each once."""
    return list(dict.fromkeys(sizes_of(step) for one in observations for step in one.steps))


def table_rows(observations: Sequence[Observation]) -> list[tuple[str, ...]]:
    """Return the rows under `COLUMNS`; what is alike on several architectures is one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for one in observations:
        for step in one.steps:
            rows.setdefault(_row(one, step), []).append(one.architecture)
    everywhere = len({one.architecture for one in observations})
    return [
        (form_name(graph), step, "all" if len(on) == everywhere > 1 else " ".join(on), *facts)
        for (graph, step, *facts), on in rows.items()
    ]


def best_lines(observations: Sequence[Observation]) -> list[str]:
    """Return a line for each architecture and step: the graphs that serve it best by count."""
    cards = {one.architecture: card_of(one) for one in observations}
    graphs: dict[str, list[str]] = {}
    for best in best_graphs(observations):
        graphs.setdefault(f"{cards[best.architecture]}, {best.step}", []).append(
            f"{best.graph}, {best.launches} launches, {best.cache_bytes / 2**20:.3g} MiB of keys "
            "and values copied"
        )
    return [f"best by count on {place}: {'; or '.join(named)}" for place, named in graphs.items()]


def findings(observations: Sequence[Observation]) -> list[str]:
    """Return what is worth a sentence, in plain text: refusals, placements, copies and waits."""
    lines = (line for one in observations for line in _lines(one))
    return list(dict.fromkeys(Text.from_markup(line).plain for line in lines))


def _row(one: Observation, step: Step) -> tuple[str, ...]:
    return (
        one.graph, step.name, attention_of(one, step),
        str(step.launches), str(step.copied(by_nodes=True)), str(len(step.waits)),
    )  # fmt: skip


def sizes_of(step: Step) -> str:
    """Return the sizes of a step as text: ``decode: B 1, L 1, P 1023``."""
    letters = {"batch": "B", "query_len": "L", "past_len": "P"}
    sizes = (f"{letters.get(axis, axis)} {size}" for axis, size in step.sizes.items())
    return f"{step.name}: {', '.join(sizes)}"


def card_of(one: Observation) -> str:
    """Return the architecture with its card: ``sm_80 A100``."""
    (card,) = (known.card for known in ARCHITECTURES if known.name == one.architecture)
    return f"{one.architecture} {card}"


def attention_of(one: Observation, step: Step) -> str:
    """Return the kernels that compute attention, in words.

    Args:
        one: The graph.
        step: One of its steps.
    """
    off = sorted({node.operator for node in one.elsewhere if node.is_attention})
    kinds = [*step.attention, *([f"on the CPU: {', '.join(off)}"] if off else [])]
    if step.stopped:
        kinds.append("stopped, see below")
    return "; ".join(kinds) or UNNAMED


def _lines(one: Observation) -> Iterator[str]:
    where = as_text(one.graph)
    if one.refused:
        yield f"{where}: [red]refused[/]: {as_text(one.refused)}"
    yield from (f"{where}: {line}" for line in _placements(one.elsewhere))
    for step in one.steps:
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
    if one.peak_bytes:
        steps = ", ".join(f"{step.name} {in_mib(step.peak_bytes)}" for step in one.steps)
        by_step = f" ({steps})" if len(one.steps) > 1 else ""
        yield f"{where}: device memory {in_mib(one.peak_bytes)} MiB at most{by_step}"
    if one.libraries:
        yield f"{where}: needs {', '.join(one.libraries)}"
    for note in one.notes:
        yield f"note: {as_text(note)}"


def _placements(nodes: Sequence[NodeElsewhere]) -> Iterator[str]:
    """Yield a line for each node that computes attention, and one for all others of a reason."""
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
