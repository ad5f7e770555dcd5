"""A process that serves cases, one after another, and how that ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from attn_export.results import Outcome
from attn_export.runtimes.child import Child
from attn_export.runtimes.protocol import Facts, Limits

CaseFiles = tuple[str, Path, Path]
"""The name of a case, the folder of its inputs, and the folder for its outputs."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A case that a process is done with.

    Attributes:
        outputs: The number of output files.
        error: The error; empty if there was none.
    """

    case: str
    outputs: int
    error: str


class Serving:
    """A process that runs cases and reports its progress.

    Args:
        command: The command line.
        limits: For it.

    Attributes:
        outcome: How it ended; `"ran"` only when every case was served.
        reason: Why it did not run to its end; empty where it did.
        loaded: Whether it came as far as its first case.
        facts: Facts that it reported.
    """

    def __init__(self, command: Sequence[str], limits: Limits) -> None:
        self.limits = limits
        self.outcome: Outcome = "crashed"
        self.reason = ""
        self.loaded = False
        self.facts: Facts = {
            "threads": limits.threads,
            "seconds_limit": limits.seconds,
            "memory_limit_mib": limits.memory_mib,
        }
        self._child = Child(command)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._child.pid

    def served(self) -> Iterator[Served]:
        """Yield the cases after they are served. Afterwards `outcome` and `reason` are set."""
        while True:
            try:
                event = self._child.hear(self.limits.seconds)
            except TimeoutError as error:
                self.outcome, self.reason = "hung", str(error)
                return
            if event is None:
                self.outcome, self.reason = "crashed", self._child.how_it_died()
                return
            if event["event"] == "case":
                yield Served(event["name"], event.get("outputs", 0), event.get("error", ""))
            elif self._note(event):
                return

    def close(self) -> None:
        """End the process and its children."""
        self._child.close()

    def _note(self, event: dict[str, Any]) -> bool:
        """Keep a reported fact, and return whether it was the last event."""
        match event["event"]:
            case "loaded":
                self.loaded = True
                self.facts.update(event["facts"])
            case "failed":
                self.outcome, self.reason = event["outcome"], event["reason"]
                return True
            case "done":
                self.reason = event["objection"]
                self.outcome = "refused" if self.reason else "ran"
                return True
        return False
