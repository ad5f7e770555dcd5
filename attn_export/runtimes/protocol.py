"""Interface of a runtime, for the calling process and the process that runs it.

To add one, write one file with a class that meets `Runtime`, and name it in `CLASSES`
(`catalogue.py`). Its SDK is imported within its methods only.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attn_export.results import GraphFile
from attn_export.system_info import missing_package

if TYPE_CHECKING:
    import numpy as np


# -- known limits: the rows of the tables in the runtimes' files --------------------------------


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """Something that a runtime was seen not to do.

    Attributes:
        features: A graph that has all of them is concerned; `graph.requirements.features` names
            them.
        says: The runtime's message, or a description of its error.
    """

    features: frozenset[str]
    says: str


def unsupported(*features: str, says: str) -> Unsupported:
    """Return a row of a runtime's table."""
    return Unsupported(frozenset(features), says)


Facts = dict[str, object]
Options = Mapping[str, str]
"""Options of an engine, named as in its documentation; they replace those that the runtime sets."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a runtime's process.

    Attributes:
        threads: Threads for computing.
        seconds: Time without a sign of life (a loaded graph, a finished case) until the process
            counts as hung.
        memory_mib: Memory of the process beside mapped files; None where there is no limit.
    """

    threads: int
    seconds: float
    memory_mib: int | None

    @classmethod
    def default(cls) -> Limits:
        """Return all cores, 120 s, and three quarters of the machine's memory."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        memory = None
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            memory = int(total * 0.75) >> 20
        return cls(threads=cores or 1, seconds=120.0, memory_mib=memory)


class EngineDiedError(Exception):
    """The end of the engine's program, or an invalid line from it: it sends nothing more."""


class Engine(Protocol):
    """A graph, loaded. Lives in the runtime's own process. Engines derive from it."""

    def run(
        self, inputs: Mapping[str, np.ndarray], bound: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        """Run once; the outputs by the graph's own names, in its order.

        Args:
            inputs: By name.
            bound: Outputs to put into the buffer of an input, where the engine can.

        Raises:
            Exception: Any error of the engine; it becomes this case's error.
        """
        ...

    def facts(self) -> Facts:
        """Return the facts of the run: device, execution providers."""
        ...

    def objection(self) -> str:
        """Return the reason that results of this engine do not count, or ""."""
        return ""


class OwnOutputs(Engine, Protocol):
    """An engine that allocates its outputs at every run."""

    def run(
        self,
        inputs: Mapping[str, np.ndarray],
        bound: Mapping[str, str],  # noqa: ARG002 (no output shares a buffer)
    ) -> dict[str, np.ndarray]:
        """Run once; the outputs by the graph's own names, in its order.

        Args:
            inputs: By name.
            bound: Not used: no output shares the buffer of an input.
        """
        return self._run(inputs)

    def _run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...


class Runtime(Protocol):
    """One engine that can run a graph."""

    name: str
    device: str
    """Name of the device that it computes on: ``"cpu"``, ``"cuda"``, ``"browser"``."""
    dialects: frozenset[str]
    """The forms of a graph that it can be given."""
    measured: str
    """The version that `unsupported` was measured on."""
    unsupported: Sequence[Unsupported]
    """Features that it lacks, of the dialects that it accepts."""

    def version(self) -> str | None:
        """Return the installed version, or None, without importing the SDK."""
        ...

    def unavailable(self) -> str:
        """Return the reason that it cannot run and the remedy, or "". Do not import the SDK."""
        ...

    def prepare(self) -> None:
        """Import the SDK: called in the runtime's own process while it waits for its graph."""
        ...

    def load(self, graph: Path, threads: int) -> Engine:
        """Load a graph, in the runtime's own process.

        Args:
            graph: The file of the graph.
            threads: The number of threads.

        Raises:
            Exception: Any error of the engine; it means a refusal of the graph.
        """
        ...


class PackagedRuntime(Runtime, Protocol):
    """A runtime on the CPU whose SDK is a Python package."""

    device: str = "cpu"
    packages: Sequence[str]
    """The packages that may bring it; the first is the one to install."""
    modules: Sequence[str]
    """The modules of the SDK; without the first it cannot run."""

    def version(self) -> str | None:
        """Return the installed version of the package."""
        return installed_version(*self.packages)

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        return "" if find_spec(self.modules[0]) else missing_package(self.packages[0])

    def prepare(self) -> None:
        """Import the SDK."""
        for module in self.modules:
            importlib.import_module(module)


@runtime_checkable
class Tunable(Protocol):
    """A runtime whose results depend on options that a program may set in another way."""

    counter_options: Mapping[str, Options]
    """Options for `explain`, each of which removes a source of differences, by their effect."""

    def load_with(self, graph: Path, threads: int, options: Options) -> Engine:
        """Load a graph with options, in the runtime's own process.

        Args:
            graph: The file of the graph.
            threads: The number of threads.
            options: Options of the engine, by name.

        Raises:
            Exception: As for `Runtime.load`, and where there is no such option.
        """
        ...


@runtime_checkable
class Launched(Protocol):
    """A runtime whose process is started by another program, such as an emulator."""

    patience: float
    """Factor on the time limits."""
    own_mib: int
    """Memory that the other program takes for itself, in MiB."""

    def launched(self, words: Sequence[str]) -> tuple[list[str], dict[str, str] | None]:
        """Return the command that runs Python, and its environment; None for this process's own.

        Args:
            words: The arguments after the path of the interpreter.
        """
        ...


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


# -- known limits, reported before a graph is tried ---------------------------------------------


def known_limit(kind: Runtime, form: GraphFile, others: Iterable[GraphFile] = ()) -> str:
    """Return the reason not to run a graph in a runtime, with the forms that fit; or "".

    Args:
        kind: The runtime.
        form: The graph.
        others: Further forms of the same graph.
    """
    reason = _reason(kind, form)
    if not reason:
        return ""
    fitting = dict.fromkeys(o.dialect for o in others if o != form and not _reason(kind, o))
    return reason + (f"; it runs {' and '.join(fitting)}" if fitting else "")


def _reason(kind: Runtime, form: GraphFile) -> str:
    if form.dialect not in kind.dialects:
        return f"it is not for the {form.dialect} dialect"
    for row in kind.unsupported:
        if row.features <= set(form.features):
            named = " with ".join(sorted(row.features))
            return f"{kind.name} {kind.measured} does not do {named}: {row.says}"
    return ""
