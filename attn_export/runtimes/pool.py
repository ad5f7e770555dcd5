"""The processes of one job: every runtime with every graph, started before anything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from attn_export.runtimes.catalogue import DEFAULT, runtime
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Limits, Runtime

ALWAYS_REQUIRED = "ort-cpu"


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which runtimes to run, and which of them have to be there.

    Attributes:
        runtimes: In order.
        required: Names of those whose absence is a failure.
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
        runtimes = tuple(runtime(name) for name in chosen)
        # Of the default ones, ort-cuda may be missing: most machines have no GPU.
        return cls(runtimes, frozenset([*named, *require, ALWAYS_REQUIRED]))


@dataclasses.dataclass(frozen=True)
class Absent:
    """A runtime that cannot run here."""

    runtime: str
    graph: str
    reason: str
    required: bool


class Pool:
    """Processes that import their SDKs while the job imports its own, and then wait for graphs.

    Args:
        selection: Which runtimes.
        graphs: The names of the graphs' files.
        limits: For each process.

    Attributes:
        workers: The processes, by runtime and graph.
        absent: The runtimes that cannot run here.
    """

    def __init__(self, selection: Selection, graphs: Sequence[str], limits: Limits) -> None:
        self.workers: dict[tuple[str, str], Worker] = {}
        self.absent: list[Absent] = []
        self._stack = ExitStack()
        for graph in graphs:
            for kind in selection.runtimes:
                reason = kind.unavailable()
                if reason:
                    required = kind.name in selection.required
                    self.absent.append(Absent(kind.name, graph, reason, required))
                else:
                    worker = self._stack.enter_context(Worker(kind, limits))
                    self.workers[kind.name, graph] = worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self, folder: Path, inputs: Sequence[str], cases: Iterable[tuple[str, Path]], out: Path
    ) -> None:
        """Hand over graphs and cases; returns at once.

        Args:
            folder: Where the graphs lie.
            inputs: The names of the inputs, in the order of their files.
            cases: The name of every case and the folder of its inputs.
            out: A folder for the outputs, which `outputs_of` finds there.
        """
        listed = list(cases)
        for (name, graph), worker in self.workers.items():
            files = [
                (case, source, outputs_of(out, name, graph, number))
                for number, (case, source) in enumerate(listed)
            ]
            worker.start(folder / graph, inputs, files)


def outputs_of(out: Path, runtime_name: str, graph: str, number: int) -> Path:
    """The folder for the outputs of one case: by number, since names come from a file."""
    return out / runtime_name / Path(graph).name / str(number)
