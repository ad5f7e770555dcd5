"""Execution of a graph by a runtime in a worker process with limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from attn_export.results import Outcome
from attn_export.runtimes.child import Child, ChildFailedError, child_command
from attn_export.runtimes.protocol import SEPARATE, Facts, Limits, Options, Runtime
from attn_export.schema import GraphFile
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    import numpy as np

    from attn_export.results import Arrays


SERVE = "attn_export.runtimes.worker:serve"
"""The function that a runtime's process calls."""

_CaseFiles = tuple[str, Path, Path]
"""The name of a case, the folder of its inputs, and the folder for its outputs."""


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The result of one case, as the process reports it.

    Attributes:
        separate: The number of output files of the run with separate buffers, if it differs.
    """

    case: str
    folder: Path
    outputs: int
    error: str
    seconds: float | None = None
    separate: int = 0

    def read_outputs(self) -> dict[str, np.ndarray]:
        """Return the outputs by name."""
        from attn_export.tensorfile import read_outputs

        return read_outputs(self.folder, self.outputs)

    def read_separate(self) -> dict[str, np.ndarray]:
        """Return the outputs of the run with separate buffers, if they differ; else nothing."""
        from attn_export.tensorfile import read_outputs

        return read_outputs(self.folder / SEPARATE, self.separate)


class Worker:
    """A process that runs one graph. Started before its graph exists, it imports the SDK meanwhile.

    Attributes:
        outcome: The outcome of the process; `"ran"` only if it answered every case.
        next_worker: The process to launch when the results of this one are read, if any.
    """

    def __init__(self, runtime: Runtime, limits: Limits) -> None:
        self.runtime = runtime
        self.outcome: Outcome = "crashed"
        self.reason = ""
        self.loaded = False
        self.next_worker: Worker | None = None
        _, *arguments = child_command(SERVE, limits, runtime.name, limits.threads)
        self._launch = runtime.launch_command(arguments)
        seconds = limits.seconds * runtime.time_factor
        self.limits = limits = dataclasses.replace(limits, seconds=seconds)
        self.facts: Facts = {
            "threads": limits.threads,
            "seconds_limit": limits.seconds,
            "memory_limit_mib": limits.memory_mib,
        }
        self._child: Child | None = None
        self._job: dict[str, Any] | None = None
        self._folders: dict[str, Path] = {}
        if not runtime.in_turn:
            self.launch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id; starts the process if it is not running."""
        return self.launch().pid

    def launch(self) -> Child:
        """Start the process, unless it was started, and send it the job if there is one."""
        if self._child is not None:
            return self._child
        self._child = child = Child(*self._launch)
        if self.runtime.launcher_mib and self.limits.memory_mib:
            from attn_export.runtimes.child_main import limit_memory

            # The limit that an emulated process sets for itself has no effect on the emulator.
            limit_memory(self.limits.memory_mib + self.runtime.launcher_mib, child.pid)
        if self._job is not None:
            child.send(self._job)
        return child

    def results(self) -> Iterator[CaseResult]:
        """Yield the result of each case as it arrives. After the last, `outcome` is final."""
        child = self.launch()
        if self.next_worker is not None:
            self.next_worker.launch()
        yield from self._results_from(child)
        self.close()  # to free its memory for the next process

    def _results_from(self, child: Child) -> Iterator[CaseResult]:
        while True:
            try:
                event = child.receive(self.limits.seconds)
            except ChildFailedError as error:
                self.outcome, self.reason = error.outcome, str(error)
                return
            match event["event"]:
                case "loaded":
                    self.loaded = True
                    self.facts.update(event["facts"])
                case "case":
                    yield CaseResult(
                        event["name"],
                        self._folders[event["name"]],
                        event.get("outputs", 0),
                        event.get("error", ""),
                        event.get("seconds"),
                        event.get("separate", 0),
                    )
                case "done":
                    self.reason = event["objection"]
                    self.outcome = "refused" if self.reason else "ran"
                    return

    def send_job(
        self,
        graph: Path,
        inputs: Sequence[str],
        cases: Sequence[_CaseFiles],
        graph_file: GraphFile | None = None,
        axes: Mapping[str, Sequence[str | int]] | None = None,
        decodes: Collection[str] = (),
        options: Options | None = None,
        caches: Mapping[str, str] | None = None,
    ) -> None:
        """Send the graph and the cases to the process. The files of inputs must exist.

        `caches`: The input of the next step that takes an output, of caches that grow.
        """
        file = graph_file or GraphFile(graph.name)
        job = {
            "graph": str(graph),
            "graph_file": {n: getattr(file, n) for n in GraphFile.__struct_fields__},
            "options": dict(options or {}),
            "slice_bytes": self.limits.slice_bytes,
            "axes": dict(axes or {}),
            "caches": dict(caches or {}),
            "inputs": list(inputs),
            "cases": [
                {
                    "name": name,
                    "inputs": str(source),
                    "outputs": str(target),
                    "decode": name in decodes,
                }
                for name, source, target in cases
            ],
        }
        self._job = job
        self._folders = {name: target for name, _, target in cases}
        if self._child is not None:
            self._child.send(job)  # If the process has ended, `results` reports it.

    def close(self) -> None:
        """End the process and its children."""
        if self._child is not None:
            self._child.close()


# -- runs on arrays, in a worker process that ends afterwards -----------------------------------


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of `run_once`.

    Attributes:
        separate: The outputs of each case whose run with separate buffers gave others.
    """

    outcome: Outcome
    reason: str
    outputs: Mapping[str, Mapping[str, np.ndarray]]
    errors: Mapping[str, str]
    facts: Facts
    separate: Mapping[str, Mapping[str, np.ndarray]] = dataclasses.field(default_factory=dict)

    @property
    def complaint(self) -> str:
        """The reason of the outcome, or else the first error of a case; "" if there is neither."""
        return self.reason or next(iter(self.errors.values()), "")


def run_once(
    runtime: Runtime,
    graph: Path,
    cases: Mapping[str, Arrays],
    limits: Limits,
    graph_file: GraphFile | None = None,
    options: Options | None = None,
) -> RunResult:
    """Load a graph in a worker process, run cases through it in order, and end the process.

    `cases`: The inputs of each case, by the name of the case; all cases must have the same inputs.

    Returns:
        The outputs of the cases, or the reason that there are none.
    """
    from attn_export.tensorfile import write_tensors

    with scratch() as folder, Worker(runtime, limits) as worker:
        files = []
        for number, (name, inputs) in enumerate(cases.items()):
            source = folder / f"in_{number}"
            source.mkdir()
            write_tensors(source, "input", inputs)
            files.append((name, source, folder / f"out_{number}"))
        names = list(next(iter(cases.values()), {}))
        worker.send_job(graph.absolute(), names, files, graph_file, options=options)
        outputs, errors, separate = {}, {}, {}
        for result in worker.results():
            if result.error:
                errors[result.case] = result.error
                continue
            outputs[result.case] = result.read_outputs()
            if result.separate:
                separate[result.case] = result.read_separate()
        return RunResult(worker.outcome, worker.reason, outputs, errors, worker.facts, separate)
