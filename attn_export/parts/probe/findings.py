"""Probes of how a runtime interprets attention, their findings, and the known interpretations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from attn_export.float64.attention_steps import StepChange, attention
from attn_export.measures import element_errors, measure_strictly
from attn_export.parts.probe.probe_graphs import ATTENTION_INPUTS, ProbeGraph
from attn_export.results import Outcome
from attn_export.tensorfile import Array, ArrayDict, to_float64

# -- probe of a runtime -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Probe:
    """A case with several expected outputs: one test of how a runtime interprets attention.

    Attributes:
        name: A short unique name: the first column of the table.
        inputs: The inputs by name, in the order of the graph's inputs.
        outputs: The output that each reading leads to, `[.., L, Dv]`.
        specified: The reading that the ONNX specification requires; "" if it does not state one.
        not_in_pytorch: The reason not to run `scaled_dot_product_attention`; "" to run it.
        reader: Reads the output of a probe that has no expected outputs.
    """

    name: str
    about: str
    graph: ProbeGraph
    inputs: ArrayDict
    outputs: Mapping[str, np.ndarray]
    specified: str = ""
    not_in_pytorch: str = ""
    reader: Callable[[np.ndarray], ProbeFinding] | None = None

    def read(self, output: np.ndarray) -> ProbeFinding:
        """Return the reading whose expected output is nearest to an output, if it is close."""
        return self.reader(output) if self.reader else _nearest(output, self.outputs)


# -- findings of probes -------------------------------------------------------------------------


NO_OPERATOR = "no such operator"
"""The reading where no dialect of the runtime can express the probe."""

SOMETHING_ELSE = "something else"
"""The reading of an output that is close to no known reading of its probe."""

RAN: Outcome = "ran"


@dataclasses.dataclass(frozen=True)
class ProbeFinding:
    """Result of one probe in one runtime and dialect.

    Attributes:
        reading: The reading that the output matches, or `SOMETHING_ELSE`; without an output, the
            outcome: ``"refused"``, ``"crashed"``, ``"hung"`` …
        detail: An error message or numbers; "" if the reading needs none.
        dialect: The dialect of the graph that ran; "" if none did.
    """

    reading: str
    detail: str = ""
    dialect: str = ""
    outcome: Outcome = RAN


@dataclasses.dataclass(frozen=True)
class ProbeRow:
    """Row of the table of probes: one probe with the findings of all sides.

    Attributes:
        here: The findings of the runtime, one for each dialect, in the order of the runs.
        evaluator: The finding of the ONNX reference evaluator; None if it lacks the operator.
        pytorch: The finding of PyTorch; if it did not run, the reading is the reason.
    """

    probe: Probe
    here: tuple[ProbeFinding, ...]
    evaluator: ProbeFinding | None
    pytorch: ProbeFinding

    @property
    def effective(self) -> ProbeFinding:
        """The finding of the first dialect that ran, or of the first that was tried if none did."""
        return next((finding for finding in self.here if finding.outcome == RAN), self.here[0])

    @property
    def onnx(self) -> str:
        """The reading of the ONNX specification, or else of its evaluator; "" without either."""
        if self.probe.specified:
            return self.probe.specified
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
    """Results of all probes in one runtime."""

    runtime: str
    version: str
    rows: tuple[ProbeRow, ...]
    environment: Mapping[str, object]

    @property
    def ran(self) -> bool:
        """True if any probe gave an output."""
        return any(row.effective.outcome == RAN for row in self.rows)


# -- match of an output with a reading of its probe ---------------------------------------------

CLOSE = 0.1
"""The largest relative error of a last-axis row at which an output matches a reading. It is larger
than the error of rounding to 8 bits, and smaller than the effect of one key."""

APART = 3 * CLOSE
"""The least difference that any two readings of a probe must have in some row."""


def attend(
    inputs: Mapping[str, Array],
    changes: Mapping[str, StepChange] | None = None,
    **attributes: float,
) -> Array:
    """Return the output of attention, computed in float64, `[B, H, L, Dv]`.

    `inputs`: The inputs of a probe: query `[B, H, L, D]`, key `[B, Hkv, S, D]` …
    """
    operands = [to_float64(inputs[n]) if n in inputs else None for n in ATTENTION_INPUTS]
    return attention(operands, attributes, changes)[0]


def _nearest(output: np.ndarray, outputs: Mapping[str, np.ndarray]) -> ProbeFinding:
    errors = {name: measure_strictly(output, expected).row for name, expected in outputs.items()}
    nearest = min(errors, key=lambda name: errors[name])
    if errors[nearest] <= CLOSE:
        return ProbeFinding(nearest)
    return ProbeFinding(SOMETHING_ELSE, _difference(output, nearest, outputs[nearest]))


def _difference(output: np.ndarray, nearest: str, wanted: np.ndarray) -> str:
    if output.shape != wanted.shape:
        return f"its shape is {list(output.shape)}, not {list(wanted.shape)}"
    got, expected = output.astype(np.float64), wanted.astype(np.float64)
    errors = element_errors(got, expected)
    index = np.unravel_index(int(np.argmax(errors)), output.shape)
    indices = ", ".join(str(int(i)) for i in index)
    return f"at [{indices}] {got[index]:.4g}; if {nearest!r}, {expected[index]:.4g}"
