"""Interface of a runtime, for the calling process and the process that runs it.

To add a runtime that is a Python package, write one file in `engines/`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from attn_export.system_info import memory_here, missing_package

if TYPE_CHECKING:  # a runtime's process starts sooner without the rest of the package
    import numpy as np

    from attn_export.schema import GraphFile


Facts = dict[str, object]
"""Facts about a run for the report, as JSON values: device, version, execution providers."""

Options = Mapping[str, str]
"""Options of an engine, named as in its documentation. They override those of the runtime."""


SLICES = 8
"""The number of slices up to which a graph runs whole. Its weights may take twice as much."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a runtime's process.

    Attributes:
        seconds: The time without a message (a loaded graph, a finished case) after which the
            process counts as hung.
        memory_mib: The memory of the process without mapped files, in MiB; None for no limit.
        runs_whole: Whether a graph never runs in slices, however large its weights are.
        slice_mib: The weights of a slice in MiB; None for 1/64 of the memory. A graph of more than
            8 of them runs in slices, if its runtime can do that.
    """

    threads: int
    seconds: float
    memory_mib: int | None
    runs_whole: bool = False
    slice_mib: float | None = None

    @property
    def slice_bytes(self) -> int | None:
        """The largest size of the weights of a slice in bytes; None if there are no slices."""
        mib = self.slice_mib or (self.memory_mib and self.memory_mib / 64)
        return None if mib is None or self.runs_whole else int(mib * 2**20)

    @classmethod
    def default(cls) -> Limits:
        """Return limits of all cores, 120 s, and three quarters of the memory."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        total = memory_here()
        memory = None if total is None else int(total * 0.75) >> 20
        return cls(threads=cores or 1, seconds=120.0, memory_mib=memory)


def size_beside(graph: Path) -> int:
    """Return the bytes of the files in the folder of a graph: its weights, if they are large."""
    return sum(path.stat().st_size for path in graph.parent.iterdir() if path.is_file())


SEPARATE = "separate"
"""The folder for outputs of a run in which no output shares the buffer of an input, within the
folder for the outputs of the same case with shared buffers."""

SEPARATE_BUFFERS = "with separate buffers for past and present"
"""The start of messages on such a run."""


class EngineDiedError(Exception):
    """The engine's program ended or sent an invalid line, so that it can run no further case."""


Run = Callable[[Mapping[str, "np.ndarray"]], dict[str, "np.ndarray"]]
"""A function of inputs by name that returns the outputs by the graph's own names, in its order."""


class Engine:
    """A loaded graph in the runtime's own process. Engines that do more derive from it.

    Args:
        run: Runs the graph once, in buffers of its own.
        facts: Facts of the run, such as device and execution providers.
    """

    def __init__(self, run: Run, facts: Facts) -> None:
        self._run, self._facts = run, facts

    def run(
        self,
        inputs: Mapping[str, np.ndarray],
        bound: Mapping[str, str],  # noqa: ARG002 (by default no output shares a buffer)
    ) -> dict[str, np.ndarray]:
        """Run the graph once.

        Args:
            inputs: The inputs, by name.
            bound: The outputs to write into the buffer of an input, each with that input.

        Returns:
            The outputs by the graph's own names, in its order.

        Raises:
            Exception: Any error of the engine. It is reported as the error of this case.
        """
        return self._run(inputs)

    def expect(
        self,
        runs: Iterable[tuple[Mapping[str, np.ndarray], Mapping[str, str]]],
        advance: Callable[[], None],
    ) -> None:
        """Prepare for runs of these inputs and shared buffers.

        Args:
            runs: The arguments of `run`.
            advance: Is called from time to time by an engine that makes them here.
        """

    def facts(self) -> Facts:
        """Return the facts of the run."""
        return self._facts

    def objection(self) -> str:
        """Return the reason that results of this engine do not count, or ""."""
        return ""


class Runtime(Protocol):
    """One kind of engine, which makes an `Engine` of each graph that it loads."""

    name: str
    device: str
    """Name of the device that it computes on: ``"cpu"``, ``"cuda"``, ``"browser"``."""
    dialects: frozenset[str]
    """The dialects of the graphs that it can run."""
    measured: str
    """The version that `unsupported` was measured on."""
    keeps_non_finite: bool = False
    """True if NaN and Inf in inputs were measured to reach all outputs that depend on them. Else
    nothing is compared in batch elements that have them."""
    unsupported: Mapping[str, str] = {}
    """The known limits within the dialects that it accepts: what it says, by what it was measured
    not to support, the names of `graph.requirements.features`, sorted and joined by "with"."""
    later: Mapping[str, str] = {}
    """The first version that does what `unsupported` names, by that name."""
    counter_options: Mapping[str, Options] = {}
    """Options that `explain` tries, by a description of their effect. Each removes one possible
    cause of differences. A runtime without them takes no options."""
    float16_sums: str = ""
    """Why its sums of float16 are less exact than those of other processors, or ""."""
    about: str = ""
    """What it is, for the table of the documentation."""
    packages: Sequence[str] = ()
    """The PyPI packages that bring it, as pip takes them, the one that has its version first."""
    npm_package: str = ""
    """The npm package that brings it, or ""."""
    required: bool = False
    """True if the tests require it by default; `scripts/setup_runtimes` then installs it, too."""
    in_turn: bool = False
    """True if a process of it starts when the one before it has ended, as those of emulators, which
    would fill the memory."""
    time_factor: float = 1.0
    """The factor on the time limits."""
    launcher_mib: int = 0
    """The memory that an emulator takes for itself, in MiB; 0 without one."""

    def launch_command(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, str] | None]:
        """Return the command that runs Python with these arguments, and its environment.

        None is the environment of this process.
        """
        return [sys.executable, *arguments], None

    def version(self) -> str | None:
        """Return the installed version, or None, without importing the SDK."""
        ...

    def unavailable(self) -> str:
        """Return the reason that it cannot run and the remedy, or "". Do not import the SDK."""
        ...

    def prepare(self) -> None:
        """Import the SDK. The runtime's own process calls this before its graph is there."""
        ...

    def load(self, graph: Path, threads: int, options: Options | None = None) -> Engine:
        """Load a graph, in the runtime's own process.

        Args:
            graph: The file of the graph.
            threads: The number of threads.
            options: Options of the engine, if the runtime has `counter_options`.

        Returns:
            The loaded graph.

        Raises:
            Exception: Any error of the engine. It means that the engine refuses the graph, or has
                no such option.
        """
        return self._load(graph, threads, options or {})

    def _load(self, graph: Path, threads: int, options: Options) -> Engine: ...

    def load_in_slices(self, _: Path, __: int, ___: int) -> Engine | None:
        """Load a graph whose weights are too large for this process; None if it cannot do that.

        It is given the file, the number of threads, and the bytes of weights in memory at once.
        """
        return None


class PackagedRuntime(Runtime, Protocol):
    """A runtime on the CPU whose SDK is a Python package."""

    device: str = "cpu"
    distributions: Sequence[str] = ()
    """Further distributions that contain it."""
    modules: Sequence[str]
    """The modules of the SDK, which `prepare` imports; without the first it cannot run."""

    def version(self) -> str | None:
        """Return the installed version of the package, or None."""
        return installed_version(*map(distribution, self.packages), *self.distributions)

    def unavailable(self) -> str:
        """Return the reason that it cannot run here, or "" if it can."""
        if find_spec(self.modules[0]):
            return ""
        return missing_package(self.modules[0], *self.packages)

    def prepare(self) -> None:
        """Import the SDK."""
        for module in self.modules:
            importlib.import_module(module)

    def engine(self, graph: Path, threads: int) -> Engine:
        """Return an engine with a graph loaded, that uses a number of threads."""
        ...

    def _load(self, graph: Path, threads: int, options: Options) -> Engine:  # noqa: ARG002
        return self.engine(graph, threads)


def distribution(package: str) -> str:
    """Return the name of a package without its extras and versions."""
    return re.split(r"[^\w.-]", package)[0]


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


def known_limit(runtime: Runtime, graph_file: GraphFile, others: Iterable[GraphFile] = ()) -> str:
    """Return the reason that a runtime cannot run a graph and the dialects that fit, or ""."""
    reason = _reason(runtime, graph_file)
    if not reason:
        return ""
    fitting = dict.fromkeys(
        other.dialect for other in others if other != graph_file and not _reason(runtime, other)
    )
    return reason + (f"; it runs {' and '.join(fitting)}" if fitting else "")


def _does_now(runtime: Runtime, limit: str) -> bool:
    """Return whether the installed version is one that has left a limit behind."""
    if limit not in runtime.later:
        return False
    versions = (runtime.later[limit], runtime.version() or "")
    first, here = ([int(n) for n in re.findall(r"\d+", text)[:3]] for text in versions)
    return first <= here


def _reason(runtime: Runtime, graph_file: GraphFile) -> str:
    if graph_file.dialect not in runtime.dialects:
        return f"it is not for the {graph_file.dialect} dialect"
    has = set(graph_file.features)
    for limit, says in runtime.unsupported.items():
        if has.issuperset(limit.split(" with ")) and not _does_now(runtime, limit):
            return f"{runtime.name} {runtime.measured} does not do {limit}: {says}"
    return ""
