"""The worker processes of one job: one for each runtime and graph, started as early as possible."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from attn_export.results import WHOLE_DECODE, RuntimeRun, StoredCase
from attn_export.runtimes.catalogue import DEFAULT, all_names, runtime, runtimes_of
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Limits, Runtime, known_limit
from attn_export.schema import GraphFile

ALWAYS_REQUIRED = "ort-cpu"
ALL = "all"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The runtimes of a job, and those that are required.

    Attributes:
        runtimes: The runtimes to run, in order.
        required: The names of the runtimes that must run at least one graph.
    """

    runtimes: tuple[Runtime, ...]
    required: frozenset[str]

    @classmethod
    def of(cls, named: Sequence[str], require: Sequence[str]) -> Self:
        """Return the selection of the command line's --runtime and --require.

        `named`: The values of --runtime: names of required runtimes; ``"all"`` for every known
        runtime, of which only ort-cpu is required; ``"-NAME"`` to leave one out of ``"all"``.
        Empty: the runtimes of `DEFAULT`.
        """
        # Runtimes that `DEFAULT` or "all" adds may be missing: most machines have no GPU.
        excluded = [runtime(name[1:]).name for name in named if name.startswith("-")]
        known = [name for name in all_names() if name not in excluded] if ALL in named else []
        named = [name for name in named if name != ALL and not name.startswith("-")]
        chosen = [*known, *named] or DEFAULT
        runtimes = _by_name([*chosen, *require])
        required = _by_name([*named, *require, ALWAYS_REQUIRED])
        return cls(tuple(runtimes.values()), frozenset(required))


def _by_name(names: Iterable[str]) -> dict[str, Runtime]:
    return {runtime.name: runtime for name in names for runtime in runtimes_of(name)}


class Pool:
    """Worker processes, which import their SDKs while the job itself still prepares the graphs.

    Attributes:
        workers: The processes, by the names of runtime and graph.
    """

    def __init__(self, selection: Selection, graphs: Iterable[GraphFile], limits: Limits) -> None:
        self.workers: dict[tuple[str, str], Worker] = {}
        self._selection, self._limits = selection, limits
        # Called once for each runtime: some read files.
        self._unavailable = {
            selected.name: selected.unavailable() for selected in selection.runtimes
        }
        self._reasons: dict[tuple[str, str], str] = {}
        self._graph_files: dict[str, GraphFile] = {}
        self._cases: dict[str, list[StoredCase]] = {}
        self._stack = ExitStack()
        self.add(graphs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, graphs: Iterable[GraphFile]) -> None:
        """Start processes for new graphs.

        Update the descriptions of known graphs, and end the processes of runtimes that turn out
        not to support them.
        """
        files = list(graphs)
        self._graph_files |= {file.name: file for file in files}
        for file in files:
            for selected in self._selection.runtimes:
                self._add(selected, file)

    def _add(self, runtime: Runtime, file: GraphFile) -> None:
        key = runtime.name, file.name
        if key in self._reasons:
            return
        others = self._graph_files.values()
        reason = self._unavailable[runtime.name] or known_limit(runtime, file, others)
        if reason:
            self._reasons[key] = reason
            if key in self.workers:  # started before the features of the graph were known
                self.workers.pop(key).close()
        elif key not in self.workers:
            worker = Worker(runtime, self._limits, lazy=runtime.in_turn)
            self.workers[key] = self._stack.enter_context(worker)

    def absent(self) -> list[RuntimeRun]:
        """Return the combinations that do not run, with the reason.

        A required runtime must run at least one graph.
        """
        missed = self._selection.required - {name for name, _ in self.workers}
        return [
            RuntimeRun(name, graph, "not run", reason, name in missed, {})
            for (name, graph), reason in self._reasons.items()
        ]

    def start(
        self,
        folder: Path,
        inputs: Sequence[str],
        axes: Mapping[str, Sequence[str | int]],
        cases: Iterable[StoredCase],
        out: Path,
    ) -> int:
        """Pass graphs and cases to the processes, and return at once.

        Returns:
            The number of cases of all processes together.
        """
        all_cases = list(cases)
        for name, file in self._graph_files.items():
            self._cases[name] = [case for case in all_cases if _accepts(file, case)]
        # Folders are named by numbers, as names of cases come from files of others.
        numbers = {case.name: str(number) for number, case in enumerate(all_cases)}
        for (name, graph), worker in self.workers.items():
            files = [
                (case.name, case.folder, out / name / Path(graph).name / numbers[case.name])
                for case in self._cases[graph]
            ]
            decodes = [case.name for case in self._cases[graph] if case.kind == WHOLE_DECODE]
            worker.send_job(folder / graph, inputs, files, self._graph_files[graph], axes, decodes)
        self._chain_launches()
        return sum(self.cases_of(graph) for _, graph in self.workers)

    def _chain_launches(self) -> None:
        """Let each emulator and other release start the next one: all at once fill the memory."""
        workers = [w for w in self.workers.values() if w.runtime.in_turn]
        for worker, next_worker in itertools.pairwise(workers):
            worker.next_worker = next_worker
        if workers:
            workers[0].launch()

    def cases_of(self, graph: str) -> int:
        """Return the number of cases that each runtime received for a graph."""
        return len(self._cases[graph])


def _accepts(file: GraphFile, case: StoredCase) -> bool:
    # A whole decode is run in steps, whose sizes the worker chooses to fit the graph.
    return case.kind == WHOLE_DECODE or file.takes(case.sizes)
