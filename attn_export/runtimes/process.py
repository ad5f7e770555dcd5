"""Runs a runtime in a process of its own, within limits, and says how that ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from attn_export.nouns import GraphFile, Outcome
from attn_export.runtimes.child import Child, module_command
from attn_export.runtimes.protocol import Facts, Limits, Options, Runtime

CaseFiles = tuple[str, Path, Path]
"""The name of a case, the folder of its inputs, and the folder for its outputs."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A case that a runtime is done with.

    Attributes:
        outputs: How many output files it wrote.
        error: What went wrong; empty where nothing did.
    """

    case: str
    outputs: int
    error: str


class Worker:
    """One process for one graph. Started early, it imports its SDK while others work.

    Attributes:
        outcome: How it ended; `"ran"` only when every case was served.
        reason: Why it did not run to its end; empty where it did.
        facts: What the runtime said of itself.
    """

    def __init__(self, runtime: Runtime, limits: Limits) -> None:
        self.runtime = runtime
        self.limits = limits
        self.outcome: Outcome = "crashed"
        self.reason = ""
        self.facts: Facts = {
            "threads": limits.threads,
            "seconds_limit": limits.seconds,
            "memory_limit_mib": limits.memory_mib,
        }
        memory = limits.memory_mib or 0
        self._child = Child(worker_command(runtime.name, memory, limits.threads))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._child.pid

    def start(
        self,
        graph: Path,
        inputs: Sequence[str],
        cases: Sequence[CaseFiles],
        form: GraphFile | None = None,
        axes: Mapping[str, Sequence[str | int]] | None = None,
        decodes: Collection[str] = (),
        options: Options | None = None,
    ) -> None:
        """Give it its graph and cases; the inputs have to lie on disk by now.

        Args:
            graph: The file.
            inputs: The names of the inputs, in the order of their files.
            cases: What to run.
            form: In which order of axes it takes inputs and gives outputs, and which of these
                share a buffer. Default: as the cases have them.
            axes: Those of every input and output, by name, if any case is decoded.
            decodes: The names of cases that are run step by step.
            options: Of the engine; the runtime has to be `Tunable`.
        """
        form = form or GraphFile(graph.name)
        job = {
            "graph": str(graph),
            "options": dict(options or {}),
            "layouts": {name: list(order) for name, order in form.layouts.items()},
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
        self._child.tell(job)  # Has it ended? `served` finds out how.

    def served(self) -> Iterator[Served]:
        """The cases as they are served. Afterwards `outcome` and `reason` hold."""
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "ready": lambda _: None, "loaded": self._note_facts,
            "failed": self._note_failure, "done": self._note_end,
        }  # fmt: skip
        while True:
            try:
                event = self._child.hear(self.limits.seconds)
            except TimeoutError as error:
                self.outcome, self.reason = "hung", str(error)
                return
            if event is None:
                self.outcome, self.reason = "crashed", self._child.how_it_died()
                return
            if event["event"] == "case":
                yield Served(event["name"], event.get("outputs", 0), event.get("error", ""))
                continue
            handlers[event["event"]](event)
            if event["event"] in ("failed", "done"):
                return

    def close(self) -> None:
        """End the process and what it started."""
        self._child.close()

    # -- what it says ----------------------------------------------------------------

    def _note_facts(self, event: dict[str, Any]) -> None:
        self.facts.update(event["facts"])

    def _note_failure(self, event: dict[str, Any]) -> None:
        self.outcome, self.reason = event["outcome"], event["reason"]

    def _note_end(self, event: dict[str, Any]) -> None:
        self.outcome, self.reason = (
            ("refused", event["objection"]) if event["objection"] else ("ran", "")
        )


def worker_command(name: str, memory_mib: int, threads: int) -> list[str]:
    """The command that starts a runtime's process."""
    return module_command("attn_export.runtimes.worker", name, memory_mib, threads)
