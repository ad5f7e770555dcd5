"""What an explanation is made of: frozen values without behaviour of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

Late = Callable[[], bool]
"""Whether time is over, and nothing further is to be begun."""

Lines = Mapping[str, str]
"""Where in the module each node came from, by its name."""

Fault = Literal["none", "graph", "runtime", "unknown", "did not run"]
"""Where the fault is. ``"unknown"``: a graph that cannot be evaluated in float64 gives numbers
that no known mistake gives."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """One thing that may be wrong.

    Attributes:
        kind: What sort it is, in a word or two: ``"scale"``.
        sentence: What is wrong and how that is known.
        node: Where in the graph; "" if not in one place.
        line: Where in the module the node came from; "" if not known.
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
        name: What was changed.
        mended: Whether all cases passed then; None where it could not be run.
        result: What came out, in a few words.
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
        line: Where in the module it came from; "" if not known.
        error: Relative L2 distance of the output.
        says: What is different there.
    """

    node: str
    operator: str
    value: str
    line: str
    error: float
    says: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a runtime's numbers differ.

    Attributes:
        runtime: Its name.
        graph: The file's name.
        options: Of the engine, as the user set them.
        fault: Where it is.
        failed: Names of the cases that failed; the smallest first.
        cases: How many were run.
        causes: The most likely first.
        first: The first wrong node, where one was found.
        experiments: What else was run.
        pattern: What the cases that failed have in common, and where the error sits.
        smallest: The sizes of the smallest case that still shows it.
        folder: Where it can be reproduced from, once written.
        seconds: How long it took to find out.
        notes: What could not be done.
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

    @property
    def sentence(self) -> str:
        """The cause in one sentence."""
        place = f"{self.runtime}, {self.graph}"
        if self.fault == "none":
            return f"{place}: nothing to explain, {self.cases} cases passed"
        if self.causes:
            return f"{place}: {self.causes[0].sentence}"
        return f"{place}: no cause found for {len(self.failed)} of {self.cases} cases"
