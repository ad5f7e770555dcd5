"""Parts of an explanation: frozen values without behaviour of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attn_export.errors import counted

if TYPE_CHECKING:
    from attn_export.tensorfile import Array

Late = Callable[[], bool]
"""Returns True if time is over, and nothing further is to be begun."""

Lines = Mapping[str, str]
"""Lines of the module that each node came from, by its name."""

Fault = Literal["none", "graph", "runtime", "unknown", "did not run"]
"""Part that is at fault. ``"unknown"``: a graph that cannot be evaluated in float64 gives numbers
that no known mistake gives."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a reference in its float64 run.

    Attributes:
        operation: Its name.
        line: The line of the user's file; "" if there is none.
        value: The result.
        reads: The numbers of the earlier steps that it reads.
    """

    operation: str
    line: str
    value: Array
    reads: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Cause:
    """One thing that may be wrong.

    Attributes:
        kind: Its kind, in a word or two: ``"scale"``.
        sentence: The error and its evidence.
        node: The name of the node; "" if it is not in one place.
        line: The line of the module that the node came from; "" if not known.
        unexplained: The share of the error that it leaves unexplained; None if not measured.
    """

    kind: str
    sentence: str
    node: str = ""
    line: str = ""
    unexplained: float | None = None


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The same thing run in another way.

    Attributes:
        name: The change.
        mended: Whether all cases passed then; None where it could not be run.
        result: The result, in a few words.
    """

    name: str
    mended: bool | None
    result: str


@dataclasses.dataclass(frozen=True)
class Deviation:
    """The first node whose output leaves the float64 run.

    Attributes:
        node: Its name.
        operator: Its type.
        value: The output.
        line: The line of the module that it came from; "" if not known.
        error: Relative L2 distance of the output.
        says: A description of the difference.
    """

    node: str
    operator: str
    value: str
    line: str
    error: float
    says: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Explanation of a runtime's numeric differences.

    Attributes:
        runtime: Its name.
        graph: The file's name.
        options: Options of the engine, as the user set them.
        fault: The part that is at fault.
        failed: Names of the cases that failed; the smallest first.
        cases: The number of cases that ran.
        causes: The most likely first.
        first: The first wrong node, where one was found.
        experiments: The other experiments.
        pattern: Common properties of the failed cases, and the location of the error.
        smallest: The sizes of the smallest case that still shows it.
        folder: The folder that reproduces it, once written.
        seconds: The time that it took to find out.
        notes: Notes on steps that were not possible.
        distance: Of a quantised bundle, the parts of its distance from the float model.
    """

    runtime: str
    graph: str
    options: Mapping[str, str]
    fault: Fault
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
        place = f"{self.runtime}, {self.graph}"
        if self.fault == "none":
            return f"{place}: nothing to explain, {counted(self.cases, 'case')} passed"
        if self.causes:
            return f"{place}: {self.causes[0].sentence}"
        return f"{place}: no cause found for {len(self.failed)} of {counted(self.cases, 'case')}"
