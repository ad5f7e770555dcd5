"""Execution of a runtime in a process of its own, within limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from attn_export.results import GraphFile
from attn_export.runtimes.child import module_command
from attn_export.runtimes.protocol import Limits, Options, Runtime
from attn_export.runtimes.serving import CaseFiles, Serving


class Worker(Serving):
    """One process for one graph. Started early, it imports its SDK while others work."""

    def __init__(self, runtime: Runtime, limits: Limits) -> None:
        super().__init__(
            worker_command(runtime.name, limits.memory_mib or 0, limits.threads), limits
        )
        self.runtime = runtime

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
        """Send its graph and cases to the process; the inputs must be on disk by now.

        Args:
            graph: The file.
            inputs: The names of the inputs, in the order of their files.
            cases: The cases to run.
            form: In which order of axes it takes inputs and gives outputs, and which of these
                share a buffer. Default: as the cases have them.
            axes: The axes of every input and output, by name, if any case is decoded.
            decodes: The names of cases that are run step by step.
            options: Of the engine; the runtime must be `Tunable`.
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


def worker_command(name: str, memory_mib: int, threads: int) -> list[str]:
    """Return the command that starts a runtime's process.

    Args:
        name: The runtime.
        memory_mib: Its memory limit, in MiB.
        threads: Threads for computing.
    """
    return module_command("attn_export.runtimes.worker", name, memory_mib, threads)
