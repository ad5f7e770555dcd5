"""What was found: frozen values without behaviour of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attn_export.nouns import Outcome

NO_OPERATOR = "no such operator"
"""Of a runtime whose dialects cannot say what a probe asks."""

SOMETHING_ELSE = "something else"
"""Of an output that matches no reading of its probe."""

RAN: Outcome = "ran"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one side did with one probe.

    Attributes:
        reading: The reading of the probe that its output matches, `SOMETHING_ELSE`, or, where it
            gave no output, the outcome: ``"refused"``, ``"crashed"``, ``"hung"`` …
        detail: Its own words, or numbers; empty where the reading says it all.
        form: The dialect of the graph that it was given; empty where there was none.
        outcome: How it ended.
    """

    reading: str
    detail: str = ""
    form: str = ""
    outcome: Outcome = RAN


@dataclasses.dataclass(frozen=True)
class Row:
    """One probe, and what each side did with it.

    Attributes:
        probe: Its name.
        about: What it shows, in a few words.
        here: What the runtime did, by the dialects that were tried, in this order.
        says: The reading that the text of the ONNX specification asks for; "" where it says
            nothing.
        evaluator: What the ONNX reference evaluator did; None where it has no such operator.
        pytorch: What PyTorch did; where it was not asked, the reading is the reason.
    """

    probe: str
    about: str
    here: tuple[Finding, ...]
    says: str
    evaluator: Finding | None
    pytorch: Finding

    @property
    def effective(self) -> Finding:
        """The first form that ran, or else what came of the first that was tried."""
        return next((each for each in self.here if each.outcome == RAN), self.here[0])

    @property
    def onnx(self) -> str:
        """What ONNX says or, where it says nothing, its evaluator does; "" where neither."""
        if self.says:
            return self.says
        ran = self.evaluator is not None and self.evaluator.outcome == RAN
        return self.evaluator.reading if ran and self.evaluator else ""

    @property
    def differs(self) -> tuple[str, ...]:
        """Of whom the runtime differs: ``"onnx"``, ``"pytorch"``. What did not run does not."""
        if self.effective.outcome != RAN:
            return ()
        asked = self.pytorch.reading if self.pytorch.outcome == RAN else ""
        others, here = {"onnx": self.onnx, "pytorch": asked}, self.effective.reading
        return tuple(name for name, reading in others.items() if reading not in ("", here))


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What one runtime means by attention.

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
        """Whether any probe gave an output."""
        return any(row.effective.outcome == RAN for row in self.rows)
