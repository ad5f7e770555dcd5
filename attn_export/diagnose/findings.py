"""Findings of probes: frozen values without behaviour of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attn_export.results import Outcome

if TYPE_CHECKING:
    import numpy as np

    from attn_export.diagnose.probe_graphs import ProbeGraph
    from attn_export.tensorfile import ArrayDict

# -- probe of a runtime -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Probe:
    """One question to a runtime.

    Attributes:
        name: Unique, short: the first column of a table.
        about: Its purpose.
        graph: The graph that runs the inputs.
        inputs: By the names of the graph's inputs, in their order.
        read: Returns the finding of an output.
        says: The reading of the text of the ONNX specification; "" if it says nothing.
        not_in_pytorch: The reason not to run `scaled_dot_product_attention`, or "".
    """

    name: str
    about: str
    graph: ProbeGraph
    inputs: ArrayDict
    read: Callable[[np.ndarray], ProbeFinding]
    says: str = ""
    not_in_pytorch: str = ""


# -- findings of probes: frozen values without behaviour of their own ---------------------------


NO_OPERATOR = "no such operator"
"""Reading of a runtime whose dialects cannot express a probe."""

SOMETHING_ELSE = "something else"
"""Reading of an output that matches no reading of its probe."""

RAN: Outcome = "ran"


@dataclasses.dataclass(frozen=True)
class ProbeFinding:
    """Result of one probe on one side.

    Attributes:
        reading: The reading of the probe that its output matches, `SOMETHING_ELSE`, or, where it
            gave no output, the outcome: ``"refused"``, ``"crashed"``, ``"hung"`` …
        detail: Its message, or numbers; empty if the reading is complete.
        form: The dialect of the graph that it was given; empty where there was none.
        outcome: The way in which it ended.
    """

    reading: str
    detail: str = ""
    form: str = ""
    outcome: Outcome = RAN


@dataclasses.dataclass(frozen=True)
class Row:
    """One probe with the result of each side.

    Attributes:
        probe: Its name.
        about: Its purpose, in a few words.
        here: The runtime's results by dialect, in the order of the trials.
        says: The reading of the text of the ONNX specification; "" if it says
            nothing.
        evaluator: The result of the ONNX reference evaluator; None if it lacks the operator.
        pytorch: The result of PyTorch; if it did not run, the reading is the reason.
    """

    probe: str
    about: str
    here: tuple[ProbeFinding, ...]
    says: str
    evaluator: ProbeFinding | None
    pytorch: ProbeFinding

    @property
    def effective(self) -> ProbeFinding:
        """The first form that ran, or else the result of the first that was tried."""
        return next((each for each in self.here if each.outcome == RAN), self.here[0])

    @property
    def onnx(self) -> str:
        """The reading of the ONNX specification, else that of its evaluator, else ""."""
        if self.says:
            return self.says
        ran = self.evaluator is not None and self.evaluator.outcome == RAN
        return self.evaluator.reading if ran and self.evaluator else ""

    @property
    def differs(self) -> tuple[str, ...]:
        """The sides from which the runtime differs: ``"onnx"``, ``"pytorch"``, if they ran."""
        if self.effective.outcome != RAN:
            return ()
        pytorch = self.pytorch.reading if self.pytorch.outcome == RAN else ""
        others, here = {"onnx": self.onnx, "pytorch": pytorch}, self.effective.reading
        return tuple(name for name, reading in others.items() if reading not in ("", here))


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Meaning of attention in one runtime.

    Attributes:
        runtime: Its name.
        version: As installed.
        rows: One for each probe.
        environment: Versions and machine.
    """

    runtime: str
    version: str
    rows: tuple[Row, ...]
    environment: Mapping[str, object]

    @property
    def ran(self) -> bool:
        """Return whether any probe gave an output."""
        return any(row.effective.outcome == RAN for row in self.rows)
