"""Events of the stand-in libraries, and the nodes whose run caused them."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.dry_run.kernel_names import readable
from attn_export.dry_run.observed import Event
from attn_export.errors import printable

KEPT = ("launch", "library", "to device", "to host", "on device", "fill", "wait")
MOST_EVENTS = 20_000
TIMED = "_kernel_time"
DEEPEST = 1000
"""The most nodes of a branch for which the node around it is found."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A line of the stand-in's record.

    Attributes:
        time: In nanoseconds, of the clock that ONNX Runtime's profiler reads.
        kind: The kind of the event.
        bytes: Of memory.
        name: A kernel or a function.
    """

    time: int
    kind: str
    bytes: int
    name: str


def read_record(path: Path, start: int = 0, end: int = -1) -> list[Recorded]:
    """Return the events recorded between two positions in the file.

    Args:
        path: The record.
        start: The first byte.
        end: The byte after the last; -1 for all.
    """
    text = path.read_bytes()[start : end if end >= 0 else None].decode(errors="replace")
    lines = [line.split("\t") for line in text.splitlines()]
    return [Recorded(int(time), kind, int(size), name) for time, kind, size, name in lines]


def peak_bytes(events: Sequence[Recorded]) -> int:
    """Return the most device memory that was allocated at once."""
    used = most = 0
    for event in events:
        used += event.bytes * ((event.kind == "malloc") - (event.kind == "free"))
        most = max(most, used)
    return most


def events_of_step(
    events: Sequence[Recorded], profile: Sequence[Mapping[str, Any]], started: int
) -> tuple[Event, ...]:
    """Return the events of a step, each with the node within whose time it lies.

    Args:
        events: The events of the step.
        profile: The events of ONNX Runtime's profiler.
        started: The time at which the profiler started, in nanoseconds.
    """
    # A node may lie within another, such as a branch of an `If`: the later start is the inner one.
    spans = sorted(_spans(profile, started))
    starts = [span[0] for span in spans]
    found = []
    for event in events:
        if event.kind in KEPT:
            node = _node_at(event.time, starts, spans)
            name = readable(event.name) if event.kind == "launch" else event.name
            found.append(Event(event.kind, printable(name, 120), event.bytes, node))
    return tuple(found[:MOST_EVENTS])


def _spans(profile: Sequence[Mapping[str, Any]], started: int) -> Iterator[tuple[int, int, str]]:
    for event in profile:
        name = str(event.get("name"))
        if event.get("cat") == "Node" and name.endswith(TIMED):
            # The profiler counts whole microseconds.
            end = started + (event["ts"] + event["dur"] + 2) * 1000
            operator = event.get("args", {}).get("op_name", "")
            yield started + event["ts"] * 1000, end, name.removesuffix(TIMED) or operator


def _node_at(time: int, starts: list[int], spans: Sequence[tuple[int, int, str]]) -> str:
    latest = bisect.bisect_right(starts, time) - 1
    # Before it others may have started that last longer: nodes around a branch.
    for _, end, name in reversed(spans[max(latest - DEEPEST, 0) : latest + 1]):
        if time < end:
            return printable(name, 120)
    return ""
