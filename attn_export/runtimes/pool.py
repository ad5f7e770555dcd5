"""The processes of one job: every runtime with every graph, started before anything else."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from attn_export.results import DECODE, GraphFile, StoredCase
from attn_export.runtimes.catalogue import CLASSES, DEFAULT, runtime
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Launched, Limits, Runtime, known_limit

ALWAYS_REQUIRED = "ort-cpu"
ALL = "all"


@dataclasses.dataclass(frozen=True)
class Selection:
    """Selection of the runtimes to run, and of the required ones.

    Attributes:
        runtimes: In order.
        required: Names of those whose absence is a failure.
    """

    runtimes: tuple[Runtime, ...]
    required: frozenset[str]

    @classmethod
    def of(cls, named: Sequence[str], require: Sequence[str]) -> Self:
        """Return the selection of the command line's --runtime and --require.

        Args:
            named: Names, or ``"all"``, of which those that are not here are not missed;
                ``"-NAME"`` leaves one of them out.
            require: Names of those that must run, besides.

        Raises:
            UsageError: If there is no runtime of a name.
        """
        # Of the default ones, ort-cuda may be missing: most machines have no GPU. Of all, any.
        without = [runtime(name[1:]).name for name in named if name.startswith("-")]
        every = [name for name in CLASSES if name not in without]
        every = every if ALL in named else []
        named = [name for name in named if name != ALL and not name.startswith("-")]
        chosen = dict.fromkeys([*every, *(named or (() if every else DEFAULT)), *require])
        runtimes = tuple(runtime(name) for name in chosen)
        return cls(runtimes, frozenset([*named, *require, ALWAYS_REQUIRED]))


@dataclasses.dataclass(frozen=True)
class Absent:
    """A runtime that does not run a graph."""

    runtime: str
    graph: str
    reason: str
    required: bool


class Pool:
    """Processes that import their SDKs while the job imports its own, and then wait for graphs.

    Args:
        selection: The runtimes.
        graphs: The graphs that are known by now.
        limits: For each process.

    Attributes:
        workers: The processes, by runtime and graph.
    """

    def __init__(self, selection: Selection, graphs: Iterable[GraphFile], limits: Limits) -> None:
        self.workers: dict[tuple[str, str], Worker] = {}
        self._selection, self._limits = selection, limits
        # Asked once: some look into files.
        self._unavailable = {kind.name: kind.unavailable() for kind in selection.runtimes}
        self._reasons: dict[tuple[str, str], str] = {}
        self._forms: dict[str, GraphFile] = {}
        self._cases: dict[str, list[StoredCase]] = {}
        self._stack = ExitStack()
        self.add(graphs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, graphs: Iterable[GraphFile]) -> None:
        """Start processes for graphs that turned out later; of those known, note the form."""
        forms = list(graphs)
        self._forms |= {form.name: form for form in forms}
        for form in forms:
            for kind in self._selection.runtimes:
                self._add(kind, form)

    def _add(self, kind: Runtime, form: GraphFile) -> None:
        place = kind.name, form.name
        if place in self._reasons:
            return
        reason = self._unavailable[kind.name] or known_limit(kind, form, self._forms.values())
        if reason:
            self._reasons[place] = reason
            if place in self.workers:  # started before the form was known
                self.workers.pop(place).close()
        elif place not in self.workers:
            worker = Worker(kind, self._limits, lazy=isinstance(kind, Launched))
            self.workers[place] = self._stack.enter_context(worker)

    @property
    def absent(self) -> list[Absent]:
        """The combinations that do not run, with the reason.

        It is a failure if a required runtime runs no graph.
        """
        missed = self._selection.required - {name for name, _ in self.workers}
        return [
            Absent(name, graph, reason, name in missed)
            for (name, graph), reason in self._reasons.items()
        ]

    def start(
        self,
        folder: Path,
        inputs: Sequence[str],
        axes: Mapping[str, Sequence[str | int]],
        cases: Iterable[StoredCase],
        out: Path,
    ) -> None:
        """Pass graphs and cases to the processes, and return at once.

        Args:
            folder: The folder of the graphs.
            inputs: The names of the inputs, in the order of their files.
            axes: The axes of every input and output, by name.
            cases: Of which a graph gets those whose sizes it takes.
            out: A folder for the outputs, which `outputs_of` finds there.
        """
        listed = list(cases)
        for name, form in self._forms.items():
            self._cases[name] = [case for case in listed if _takes(form, case)]
        numbers = {case.name: number for number, case in enumerate(listed)}
        for (name, graph), worker in self.workers.items():
            files = [
                (case.name, case.folder, outputs_of(out, name, graph, numbers[case.name]))
                for case in self._cases[graph]
            ]
            decodes = [case.name for case in self._cases[graph] if case.kind == DECODE]
            worker.send_job(folder / graph, inputs, files, self._forms[graph], axes, decodes)
        self._line_up()

    def _line_up(self) -> None:
        """Let emulated processes run one after the other: dozens at once would fill the memory."""
        waiting = [w for w in self.workers.values() if isinstance(w.runtime, Launched)]
        for worker, next_worker in itertools.pairwise(waiting):
            worker.next_worker = next_worker
        if waiting:
            waiting[0].launch()

    def expected_of(self, graph: str) -> int:
        """Return the number of cases that each runtime received for a graph."""
        return len(self._cases[graph])

    def expected(self) -> int:
        """Return the number of cases of all processes together."""
        return sum(self.expected_of(graph) for _, graph in self.workers)


def _takes(form: GraphFile, case: StoredCase) -> bool:
    # A decode is run in steps of as many tokens as the graph takes.
    return case.kind == DECODE or form.takes(case.sizes)


def outputs_of(out: Path, runtime_name: str, graph: str, number: int) -> Path:
    """Return the folder for the outputs of one case: by number, as names come from a file.

    Args:
        out: The folder of all outputs.
        runtime_name: The runtime.
        graph: The file name of the graph.
        number: The number of the case.
    """
    return out / runtime_name / Path(graph).name / str(number)
