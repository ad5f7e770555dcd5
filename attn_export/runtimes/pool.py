"""The worker processes of one job: one for each runtime and graph, started as early as possible."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from attn_export.results import WHOLE_DECODE, RuntimeRun, StoredCase
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Runtime, known_limit
from attn_export.runtimes.run_options import RunOptions
from attn_export.schema import GraphFile
from attn_export.temp_folders import scratch


class Pool:
    """Worker processes, which import their SDKs while the job itself still prepares the graphs.

    Attributes:
        run: How the graphs are run and judged.
        workers: The processes, by the names of runtime and graph.
    """

    def __init__(self, run: RunOptions, graphs: Iterable[GraphFile]) -> None:
        self.run = run
        self.workers: dict[tuple[str, str], Worker] = {}
        # Called once for each runtime: some read files.
        self._unavailable = {selected.name: selected.unavailable() for selected in run.runtimes}
        self._reasons: dict[tuple[str, str], str] = {}
        self._graph_files: dict[str, GraphFile] = {}
        self._cases: dict[str, list[StoredCase]] = {}
        self._stack = ExitStack()
        self.add(graphs)

    def __enter__(self) -> Self:
        return self

    @functools.cached_property
    def out(self) -> Path:
        """The folder for outputs, which is removed in the end; it is made when it is needed."""
        return self._stack.enter_context(scratch())

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
            for selected in self.run.runtimes:
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
            self.workers[key] = self._stack.enter_context(Worker(runtime, self.run.limits))

    def absent(self) -> list[RuntimeRun]:
        """Return the combinations that do not run, with the reason.

        A required runtime must run at least one graph.
        """
        missed = self.run.required - {name for name, _ in self.workers}
        unsaid = {name for name in self.run.unasked if self._unavailable.get(name)}
        return [
            RuntimeRun(name, graph, "not run", reason, name in missed, {})
            for (name, graph), reason in self._reasons.items()
            if name not in unsaid
        ]

    def left_out(self) -> Iterator[tuple[Runtime, GraphFile]]:
        """Yield the runtimes that are here, and graphs that descriptions keep from them."""
        for selected in self.run.runtimes:
            for file in self._graph_files.values():
                here = not self._unavailable[selected.name]
                if here and (selected.name, file.name) in self._reasons:
                    yield selected, file

    @property
    def files(self) -> Collection[GraphFile]:
        """The descriptions of the graphs."""
        return self._graph_files.values()

    def file_of(self, graph: str) -> GraphFile:
        """Return the description of a graph."""
        return self._graph_files[graph]

    def start(
        self,
        folder: Path,
        inputs: Sequence[str],
        axes: Mapping[str, Sequence[str | int]],
        cases: Iterable[StoredCase],
        caches: Mapping[str, str] | None = None,
    ) -> int:
        """Pass graphs and cases to the processes, and return at once.

        `caches`: The input that takes what an output gave in the step before, by output.

        Returns:
            The number of cases of all processes together.
        """
        all_cases = list(cases)
        for name, file in self._graph_files.items():
            # A whole decode is run in steps, whose sizes the worker chooses to fit the graph.
            self._cases[name] = [
                case for case in all_cases if case.kind == WHOLE_DECODE or file.takes(case.sizes)
            ]
        # Folders are named by numbers, as names of cases come from files of others.
        numbers = {case.name: str(number) for number, case in enumerate(all_cases)}
        for (name, graph), worker in self.workers.items():
            files = [
                (case.name, case.folder, self.out / name / Path(graph).name / numbers[case.name])
                for case in self._cases[graph]
            ]
            decodes = [case.name for case in self._cases[graph] if case.kind == WHOLE_DECODE]
            file = self._graph_files[graph]
            worker.send_job(folder / graph, inputs, files, file, axes, decodes, caches=caches)
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
