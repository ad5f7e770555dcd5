"""A graph run once, on arrays, in a runtime's own process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.results import GraphFile, Outcome
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Facts, Limits, Options, Runtime
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    import numpy as np

    from attn_export.results import Arrays


@dataclasses.dataclass(frozen=True)
class Ran:
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
) -> Ran:
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
        worker.start(graph.absolute(), names, files, form, options=options)
        places = {name: target for name, _, target in files}
        outputs, errors = {}, {}
        for served in worker.served():
            if served.error:
                errors[served.case] = served.error
            else:
                outputs[served.case] = read_outputs(places[served.case], served.outputs)
        return Ran(worker.outcome, worker.reason, outputs, errors, worker.facts)
