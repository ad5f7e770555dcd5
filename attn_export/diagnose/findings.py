"""Findings of probes, and the readings of an output that they tell apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_export.diagnose.attention_steps import Call, Change, attention
from attn_export.parity.measures import distance
from attn_export.results import Outcome
from attn_export.tensorfile import Array, is_floating

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


# -- match of an output with a reading of its probe ---------------------------------------------

CLOSE = 0.1
"""The largest relative error of a row that is still the same reading: 8 bits pass, a key more or
less does not."""

APART = 3 * CLOSE
"""Least difference of any two readings of a probe in some row."""


SLOTS = {
    "q": "query", "k": "key", "v": "value", "mask": "attn_mask", "past_key": "past_key",
    "past_value": "past_value", "cache_length": "lengths",
}  # fmt: skip
"""The inputs of probes by their names in a `Call`."""


def attend(
    inputs: Mapping[str, Array], changes: Mapping[str, Change] | None = None, **attributes: float
) -> Array:
    """Return attention in float64: `[B, H, L, Dv]`.

    Args:
        inputs: By the names of probes: query `[B, H, L, D]`, key `[B, Hkv, S, D]` …
        changes: The steps to compute otherwise, as in `misreadings`.
        attributes: Those of the node.
    """
    given = {
        name: array.astype(np.float64) if is_floating(array.dtype) else array
        for name, array in inputs.items()
    }
    slots: Any = {slot: given.get(name) for slot, name in SLOTS.items()}
    return attention(Call(**slots, attributes=attributes), changes)[0]


@dataclasses.dataclass(frozen=True)
class Readings:
    """Readings as the outputs that they lead to.

    Attributes:
        outputs: By reading; `[.., L, Dv]`, of equal shapes where the reading leaves the shape.
    """

    outputs: Mapping[str, np.ndarray]

    def __call__(self, output: np.ndarray) -> ProbeFinding:
        """Return the nearest reading, if it is close."""
        found = {name: distance(output, wanted).row for name, wanted in self.outputs.items()}
        nearest = min(found, key=lambda name: found[name])
        if found[nearest] <= CLOSE:
            return ProbeFinding(nearest)
        return ProbeFinding(SOMETHING_ELSE, _difference(output, nearest, self.outputs[nearest]))


def _difference(output: np.ndarray, nearest: str, wanted: np.ndarray) -> str:
    if output.shape != wanted.shape:
        return f"its shape is {list(output.shape)}, not {list(wanted.shape)}"
    got, expected = output.astype(np.float64), wanted.astype(np.float64)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    error = np.where(same, 0.0, np.nan_to_num(np.abs(got - expected), nan=np.inf))
    place = np.unravel_index(int(np.argmax(error)), output.shape)
    where = ", ".join(str(int(i)) for i in place)
    return f"at [{where}] {got[place]:.4g}; if {nearest!r}, {expected[place]:.4g}"
