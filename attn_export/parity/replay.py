"""Runs graphs in runtimes, case by case, and judges what comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from attn_export.cases.golden import read_outputs
from attn_export.nouns import Golden, RuntimeRun, Verdict
from attn_export.parity.judge import Gate, judge
from attn_export.runtimes.catalogue import DEFAULT, runtime
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Limits, Runtime

Advance = Callable[[str], None]
"""Called with a few words for every step that is done."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which runtimes to run, and whether it matters that they do.

    Attributes:
        runtimes: In order.
        required: Names of those that must run; others may be reported as not run.
    """

    runtimes: tuple[Runtime, ...]
    required: frozenset[str]

    @classmethod
    def of(cls, named: Sequence[str], require: Sequence[str]) -> Self:
        """From the command line's --runtime and --require.

        Raises:
            UsageError: If there is no runtime of a name.
        """
        chosen = list(dict.fromkeys([*(named or DEFAULT), *require]))
        return cls(
            tuple(runtime(name) for name in chosen),
            # What runs by default has to run as well, except where there is no GPU.
            frozenset([*named, *require, "ort-cpu"]),
        )


class Replay:
    """Every runtime with every graph. Processes start at once, before graphs exist.

    Args:
        selection: Which runtimes.
        graphs: The names of the graphs' files.
        limits: For each process.
    """

    def __init__(self, selection: Selection, graphs: Sequence[str], limits: Limits) -> None:
        self._selection = selection
        self._stack = ExitStack()
        self._workers: dict[tuple[str, str], Worker] = {}
        self._not_run: dict[tuple[str, str], str] = {}
        for graph in graphs:
            for kind in selection.runtimes:
                reason = kind.unavailable()
                if reason:
                    self._not_run[kind.name, graph] = reason
                else:
                    worker = self._stack.enter_context(Worker(kind, limits))
                    self._workers[kind.name, graph] = worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def running(self) -> int:
        """How many processes there are."""
        return len(self._workers)

    def start(
        self, folder: Path, inputs: Sequence[str], cases: Iterable[tuple[str, Path]], out: Path
    ) -> None:
        """Hand over graphs and cases; returns at once.

        Args:
            folder: Where the graphs lie.
            inputs: The names of the inputs, in the order of their files.
            cases: The name of every case and the folder of its inputs.
            out: A folder for the outputs.
        """
        listed = list(cases)
        for (name, graph), worker in self._workers.items():
            place = out / name / graph
            files = [(case, source, place / str(i)) for i, (case, source) in enumerate(listed)]
            worker.start(folder / graph, inputs, files)

    def judge(
        self, goldens: Sequence[Golden], out: Path, gate: Gate, advance: Advance
    ) -> tuple[list[RuntimeRun], list[Verdict]]:
        """Wait for the runtimes, and compare each case as it comes."""
        runs, verdicts = [], []
        for (name, graph), reason in self._not_run.items():
            required = name in self._selection.required
            runs.append(RuntimeRun(name, graph, "not run", reason, required, {}))
        for (name, graph), worker in self._workers.items():
            found = self._judge_worker(worker, graph, goldens, out / name / graph, gate, advance)
            # What can run here has to: only a missing runtime may be forgiven.
            runs.append(RuntimeRun(name, graph, worker.outcome, worker.reason, True, worker.facts))
            verdicts += found
        return runs, verdicts

    def _judge_worker(
        self,
        worker: Worker,
        graph: str,
        goldens: Sequence[Golden],
        place: Path,
        gate: Gate,
        advance: Advance,
    ) -> list[Verdict]:
        name = worker.runtime.name
        number = {golden.case.name: i for i, golden in enumerate(goldens)}
        verdicts: list[Verdict] = []
        for case in worker.served():
            golden = goldens[number[case]]
            if case in worker.errors:
                verdicts.append(Verdict(name, graph, case, "", "error", worker.errors[case]))
            else:
                outputs = read_outputs(place / str(number[case]))
                verdicts += judge(name, graph, golden, outputs, gate)
            advance(f"{name}: {case}")
        if worker.outcome == "refused" and verdicts:
            # It ran, but not where it should have: none of it counts.
            return [dataclasses.replace(v, status="error", message=worker.reason) for v in verdicts]
        return verdicts
