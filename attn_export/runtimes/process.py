"""Execution of a runtime in a process of its own, within limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from attn_export.results import GraphFile, Outcome
from attn_export.runtimes.child import Child, module_command
from attn_export.runtimes.protocol import Facts, Launched, Limits, Options, Runtime
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    import numpy as np

    from attn_export.results import Arrays


CaseFiles = tuple[str, Path, Path]
"""The name of a case, the folder of its inputs, and the folder for its outputs."""


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """A case that a process is done with.

    Attributes:
        outputs: The number of output files.
        error: The error; empty if there was none.
        seconds: The time that it took, if it was measured.
    """

    case: str
    outputs: int
    error: str
    seconds: float | None = None


class Worker:
    """One process for one graph. Started early, it imports its SDK while others work.

    Args:
        runtime: The runtime.
        limits: For the process.
        lazy: Whether `launch` starts the process, and not the constructor.

    Attributes:
        outcome: The way in which it ended; `"ran"` only when every case was served.
        reason: Why it did not run to its end; empty where it did.
        loaded: Whether it came as far as its first case.
        facts: Facts that it reported.
        next_worker: A process to launch once results of this one are awaited, if any.
    """

    def __init__(self, runtime: Runtime, limits: Limits, *, lazy: bool = False) -> None:
        self.runtime = runtime
        self.outcome: Outcome = "crashed"
        self.reason = ""
        self.loaded = False
        self.next_worker: Worker | None = None
        self._command = worker_command(runtime.name, limits.memory_mib or 0, limits.threads)
        self._environment: Mapping[str, str] | None = None
        if isinstance(runtime, Launched):
            self._command, self._environment = runtime.launched(self._command[1:])
            limits = dataclasses.replace(limits, seconds=limits.seconds * runtime.patience)
        self.limits = limits
        self.facts: Facts = {
            "threads": limits.threads,
            "seconds_limit": limits.seconds,
            "memory_limit_mib": limits.memory_mib,
        }
        self._child: Child | None = None
        self._job: dict[str, Any] | None = None
        if not lazy:
            self.launch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self.launch().pid

    def launch(self) -> Child:
        """Start the process and send it its job, if there is one, unless it was started."""
        if self._child is not None:
            return self._child
        self._child = child = Child(self._command, self._environment)
        if isinstance(self.runtime, Launched) and self.limits.memory_mib:
            from attn_export.runtimes.ipc import limit_memory

            # An emulator does not pass on the limit that the process sets itself.
            limit_memory(self.limits.memory_mib + self.runtime.own_mib, child.pid)
        if self._job is not None:
            child.send(self._job)
        return child

    def served(self) -> Iterator[CaseResult]:
        """Yield the cases after they are served. Afterwards `outcome` and `reason` are set."""
        child = self.launch()
        if self.next_worker is not None:
            self.next_worker.launch()
        yield from self._results_from(child)
        self.close()  # its memory is for the next ones

    def _results_from(self, child: Child) -> Iterator[CaseResult]:
        while True:
            try:
                event = child.receive(self.limits.seconds)
            except TimeoutError as error:
                self.outcome, self.reason = "hung", str(error)
                return
            if event is None:
                self.outcome, self.reason = "crashed", child.how_it_died()
                return
            if event["event"] == "case":
                yield CaseResult(
                    event["name"],
                    event.get("outputs", 0),
                    event.get("error", ""),
                    event.get("seconds"),
                )
            elif self._note(event):
                return

    def send_job(
        self,
        graph: Path,
        inputs: Sequence[str],
        cases: Sequence[CaseFiles],
        form: GraphFile | None = None,
        axes: Mapping[str, Sequence[str | int]] | None = None,
        decodes: Collection[str] = (),
        options: Options | None = None,
    ) -> None:
        """Send its graph and cases to the process; the inputs must be on disk by now.

        Args:
            graph: The file.
            inputs: The names of the inputs, in the order of their files.
            cases: The cases to run.
            form: The order of axes and the types in which it takes inputs and gives outputs, and
                which of these share a buffer. Default: as the cases have them.
            axes: The axes of every input and output, by name, if any case is decoded.
            decodes: The names of cases that are run step by step.
            options: Of the engine; the runtime must be `Tunable`.
        """
        form = form or GraphFile(graph.name)
        job = {
            "graph": str(graph),
            "options": dict(options or {}),
            "layouts": {name: list(order) for name, order in form.layouts.items()},
            "dtypes": dict(form.dtypes),
            "bound": dict(form.bound),
            "fixed": dict(form.fixed),
            "axes": {name: list(names) for name, names in (axes or {}).items()},
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
        if self._child is not None:
            self._child.send(job)  # If it has ended by now, `served` reports how.

    def close(self) -> None:
        """End the process and its children."""
        if self._child is not None:
            self._child.close()

    def _note(self, event: dict[str, Any]) -> bool:
        """Keep a reported fact, and return whether it was the last event."""
        match event["event"]:
            case "loaded":
                self.loaded = True
                self.facts.update(event["facts"])
            case "failed":
                self.outcome, self.reason = event["outcome"], event["reason"]
                return True
            case "done":
                self.reason = event["objection"]
                self.outcome = "refused" if self.reason else "ran"
                return True
        return False


def worker_command(name: str, memory_mib: int, threads: int) -> list[str]:
    """Return the command that starts a runtime's process.

    Args:
        name: The runtime.
        memory_mib: Its memory limit, in MiB.
        threads: Threads for computing.
    """
    return module_command("attn_export.runtimes.worker", name, memory_mib, threads)


# -- a graph run once, on arrays, in a process of its own ---------------------------------------


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        outcome: `"ran"` if every case was served.
        reason: Why not; empty where it ran.
        outputs: Of each case that gave some, by name.
        errors: The message with which a case was refused.
        facts: Facts that the runtime reported.
    """

    outcome: Outcome
    reason: str
    outputs: Mapping[str, Mapping[str, np.ndarray]]
    errors: Mapping[str, str]
    facts: Facts

    @property
    def complaint(self) -> str:
        """The reason that it ended, or the refusal of the first case; empty without either."""
        return self.reason or next(iter(self.errors.values()), "")


def run_once(
    runtime: Runtime,
    graph: Path,
    cases: Mapping[str, Arrays],
    limits: Limits,
    form: GraphFile | None = None,
    options: Options | None = None,
) -> RunResult:
    """Run cases in their order through one loaded graph.

    Args:
        runtime: The runtime; it must be `Tunable` if there are `options`.
        graph: The file.
        cases: Inputs by name, under the name of each case; all of the same names.
        limits: For the process.
        form: The differences of the graph from the signature of the cases.
        options: Options of the engine.
    """
    from attn_export.tensorfile import read_outputs, write_tensors

    with scratch() as folder, Worker(runtime, limits) as worker:
        files = []
        for number, (name, inputs) in enumerate(cases.items()):
            source = folder / f"in_{number}"
            source.mkdir()
            write_tensors(source, "input", inputs)
            files.append((name, source, folder / f"out_{number}"))
        names = list(next(iter(cases.values()), {}))
        worker.send_job(graph.absolute(), names, files, form, options=options)
        places = {name: target for name, _, target in files}
        outputs, errors = {}, {}
        for served in worker.served():
            if served.error:
                errors[served.case] = served.error
            else:
                outputs[served.case] = read_outputs(places[served.case], served.outputs)
        return RunResult(worker.outcome, worker.reason, outputs, errors, worker.facts)
