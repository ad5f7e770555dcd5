"""Parts of an explanation: frozen values without behaviour of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attn_export.errors import counted

if TYPE_CHECKING:
    pass

OutOfTime = Callable[..., bool]
"""`SearchWork.is_over`, or one like it; nothing further may be started when it returns True."""

ENDED_EARLY = "the search for causes ended early"
"""The begin of the note on a search that has tried as much as it may."""


SECONDS = 20.0
"""The work after which no further experiment is started, so that failed tests end soon."""

LONG = 90.0
"""That work where changes of a reference are searched, which is a whole model."""


class SearchWork:
    """The work of a search, which ends it: unlike the clock, equal on each machine at each load.

    `seconds`: What may be tried, in seconds of an idle core, as estimated from sizes.
    `more`: What goes on with a search that ended early.
    """

    def __init__(self, seconds: float, more: str = "a greater --seconds") -> None:
        self._more = more
        self._left, self.runs, self.ended_early = seconds, 0, False

    def is_over(self, cost: float = 0.2) -> bool:
        """Return whether no work is left; else count another trial run, of this cost."""
        self.ended_early |= self._left <= 0
        if not self.ended_early:
            self._left, self.runs = self._left - cost, self.runs + 1
        return self.ended_early

    def note(self) -> tuple[str, ...]:
        """Return a note if the search ended early, with what goes on."""
        tried = f"{ENDED_EARLY}, after {counted(self.runs, 'trial run')}: {self._more} goes on"
        return (tried,) if self.ended_early else ()


Lines = Mapping[str, str]
"""The source line of the module for each node, by the name of the node."""

Blame = Literal["none", "graph", "runtime", "unknown", "did not run"]
"""The part that is at fault; ``"unknown"`` if the graph can neither be evaluated in float64 nor run
in another runtime."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """Possible cause of wrong outputs.

    Attributes:
        kind: The kind of the cause, in a word or two: ``"scale"``.
        node: The name of the node; "" if the cause is not in one node.
        line: The line of the module that the node came from; "" if not known.
        unexplained: The share of the error that it leaves unexplained; None if not measured.
        is_fit: Whether a number in it was sought, and is no round one.
    """

    kind: str
    sentence: str
    node: str = ""
    line: str = ""
    unexplained: float | None = None
    is_fit: bool = False


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Repeated run with one change, and its result.

    Attributes:
        passed: Whether all cases passed; None if it could not be run.
    """

    name: str
    passed: bool | None
    result: str


@dataclasses.dataclass(frozen=True)
class Deviation:
    """The first node whose output is wrong.

    Attributes:
        line: The line of the module that it came from; "" if not known.
        error: The relative L2 distance of the output; infinite if it is not defined.
        relation: The relation of the wrong value to the right one; "" if none is known.
        in_weights: Whether this is the relation of an initialiser of several elements.
        among: The nodes of which any may be wrong, this one the last, if the right graph computes
            the value by other ones.
    """

    node: str
    operator: str
    value: str
    line: str
    error: float
    says: str
    relation: str = ""
    in_weights: bool = False
    among: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """The node with its type and its line, as text."""
        return f"{self.operator} {self.node}{line_suffix(self.line)}"


def line_suffix(line: str) -> str:
    """Return the line of a module as the end of a text; "" if it is not known."""
    return f" ({line})" if line else ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Explanation of a runtime's numeric differences.

    Attributes:
        failed: Names of the cases that failed; the smallest first.
        first: The first wrong node; None if none was found.
        pattern: Common properties of the failed cases, and the location of the error.
        smallest: The sizes of the smallest case that still fails.
        folder: The folder that reproduces it, if one is written.
        distance: Sentences on the distance of a quantised bundle from the float model.
    """

    runtime: str
    graph: str
    options: Mapping[str, str]
    fault: Blame
    failed: tuple[str, ...] = ()
    cases: int = 0
    causes: tuple[Cause, ...] = ()
    first: Deviation | None = None
    experiments: tuple[Experiment, ...] = ()
    pattern: tuple[str, ...] = ()
    smallest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    folder: Path | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    distance: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The cause in one sentence."""
        subject = f"{self.runtime}, {self.graph}"
        if self.fault == "none":
            return f"{subject}: nothing to explain, {counted(self.cases, 'case')} passed"
        if self.causes:
            return f"{subject}: {self.causes[0].sentence}"
        return f"{subject}: no cause found for {len(self.failed)} of {counted(self.cases, 'case')}"
