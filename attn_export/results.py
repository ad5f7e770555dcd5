"""Results and cases that all floors share: frozen values without behaviour of their own."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attn_export.dialect_names import STANDARD
from attn_export.errors import AttnExportError, ParityError, RuntimeFailure, counted
from attn_export.quality import Quality

if TYPE_CHECKING:
    import numpy as np

    from attn_export.runtimes.dry_run_results import Observation


@dataclasses.dataclass(frozen=True)
class Signature:
    """Signature of a bundle.

    Attributes:
        state: ``"not checked"``: it covers every file, and nobody said whose key to trust.
        signer: A key or an identity: genuine if the state is ``"verified"``, else a claim.
    """

    state: Literal["unsigned", "not checked", "verified"]
    signer: str = ""

    def __str__(self) -> str:
        """Return one line."""
        if self.state == "not checked":
            return f"signature not checked ({self.signer}); --trust checks it"
        return self.state if self.state == "unsigned" else f"signed by {self.signer}"


Arrays = Mapping[str, "np.ndarray"]

Status = Literal["passed", "failed", "unusable", "error", "not run"]
"""Status of a verdict. ``unusable``: the case is no evidence, as where the error allowed is beyond
the limit, ties decide, or eager is not finite. ``error``: the runtime gave no output for it."""

DECODE, BASE, CHANGED = "decode", "base", "changed_"
"""The kind of a case that is taken step by step, a name, and how names of its changes start."""

Outcome = Literal["ran", "refused", "crashed", "hung", "out of memory", "not run"]
"""Outcome of a runtime with a graph. ``refused``: it said that it cannot run the graph."""
MOST_LINES = 20  # of a report as text
RelativeTo = Literal["row", "whole", "kind"]
"""Norm by which an error is divided: of its row, of the whole output, or none."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One named set of inputs.

    Attributes:
        name: Unique within a bundle.
        kind: ``"shape"`` (plain random inputs of some sizes), ``"probe"`` (inputs made to show a
            fault) or `DECODE`.
        sizes: The size of every dynamic axis.
        inputs: By name, in the order of the graph's inputs.
        about: The purpose of the case, in a few words.
        may_overflow: Whether inputs may have to be scaled down because the module overflows.
        contents: The names of the changes of random inputs.
        ignored_rows: Rows of the batch that are not compared: their inputs are not finite.
    """

    name: str
    kind: str
    sizes: Mapping[str, int]
    inputs: Arrays
    about: str
    may_overflow: bool = False
    contents: tuple[str, ...] = ()
    ignored_rows: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class StoredCase:
    """A case as of `Case` whose inputs lie in a folder."""

    name: str
    folder: Path
    sizes: Mapping[str, int]
    kind: str


@dataclasses.dataclass(frozen=True)
class GraphFile:
    """A graph on disk, and how it differs from the signature that its bundle states.

    Attributes:
        name: The file's name.
        dialect: One of `DIALECTS`.
        fixed: Dynamic axes that have one size in it: ``{"query_len": 1}``.
        layouts: Inputs and outputs with axes in another order: ``{"past_value": (0, 1, 3, 2)}``.
        bound: Outputs that may lie in the buffer of an input: ``{"present_key": "past_key"}``.
        features: Its requirements on a runtime, as `graph.requirements.features` names them.
        dtypes: Integer inputs of another type: ``{"past_length": "int32"}``.
    """

    name: str
    dialect: str = STANDARD
    fixed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    layouts: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    bound: Mapping[str, str] = dataclasses.field(default_factory=dict)
    features: tuple[str, ...] = ()
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def takes(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the graph is made for these sizes of the dynamic axes."""
        return all(sizes.get(axis, size) == size for axis, size in self.fixed.items())


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Allowed error of an output: relative L2 over the whole and over any row."""

    whole: float
    row: float


@dataclasses.dataclass(frozen=True)
class Golden:
    """A case with its truth.

    Attributes:
        case: The inputs.
        expected: The float64 truth, rounded to the outputs' dtypes.
        eager: The outputs of the module itself, unchanged.
        allowed: The error allowed by output; None for integers and bools, which must be equal.
        unusable: The reason for outputs that are no evidence, as infinities or ties.
        tied: Masks of the elements that ties decide, where there are; not stored with the case.
        rows_near_ties: The number of tokens of which activations, keys or values may be rounded
            either way; not stored either.
    """

    case: Case
    expected: Arrays
    eager: Arrays
    allowed: Mapping[str, Allowed | None]
    unusable: Mapping[str, str]
    tied: Arrays = dataclasses.field(default_factory=dict)
    rows_near_ties: int = 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One runtime, graph, case and output: passed or not, with figures.

    Attributes:
        whole: Relative L2 error against the truth; None where it was not measured.
        row: The largest relative L2 error of a row.
        worst: The larger of both, each as a share of what is allowed. NaN where a NaN is wrong,
            infinite where an infinity is or what must be 0 is not.
        max_abs: The largest absolute difference from eager, where that is finite.
        max_rel: The largest difference from eager relative to eager, where eager is not 0.
        message: Why it did not pass; empty where it did.
    """

    runtime: str
    graph: str
    case: str
    output: str
    status: Status
    message: str = ""
    whole: float | None = None
    row: float | None = None
    worst: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None


@dataclasses.dataclass(frozen=True)
class ErrorMapPanel:
    """A picture of errors: each cell is the largest error of its elements.

    Attributes:
        rows: The meaning of the rows: ``"batch x head"``; empty where there is one.
        columns: The meaning of the columns: ``"query_len"``.
        sizes: The number of rows and columns before they were merged into cells.
        worst: The cell of the worst element: row and column.
        values: Rows of cells, in shares of the error allowed; None where it is wrong in kind.
    """

    rows: str
    columns: str
    sizes: tuple[int, int]
    worst: tuple[int, int]
    values: tuple[tuple[float | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class ErrorMap:
    """Location of the error in an output.

    Attributes:
        axes: A name for each axis of the output.
        shape: Its size on each.
        index: The index of the worst element.
        actual: The value there, to nine digits; may be NaN or infinite.
        expected: The right value there.
        relative_to: The norm of errors; ``"kind"`` where a NaN, a zero row or an integer is wrong.
        panels: The rows of the last axis, each by its norm; then the last two axes around the
            worst element. One alone where the other has a single cell.
    """

    case: str
    output: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    index: tuple[int, ...]
    actual: str
    expected: str
    relative_to: RelativeTo
    panels: tuple[ErrorMapPanel, ...]


@dataclasses.dataclass(frozen=True)
class RuntimeRun:
    """Result of one graph in one runtime.

    Attributes:
        outcome: ``"ran"``, or how it failed.
        reason: Why it did not run, or how it failed; empty where it ran.
        required: Whether anything but ``"ran"`` is a failure of the whole.
        facts: Version, device, threads, limits, seconds: facts that the runtime reported.
        worst: The place of the largest error of its worst verdict; None where nothing was measured.
        seconds: The time of each case that ran, with reading its inputs and storing its outputs.
    """

    runtime: str
    graph: str
    outcome: Outcome
    reason: str
    required: bool
    facts: Mapping[str, object]
    worst: ErrorMap | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Report:
    """Every verdict, the environment, one exit code.

    Attributes:
        notes: Notes for the reader.
        model: The graph to draw beside the figures, as long as the file is there.
        explanations: Causes of wrong numbers, a sentence for each explained runtime.
        dimensions: Dtype and shape of each input and output, and the spec where there is one.
        error: The error that ended the job before there was a verdict.
        quality: Distance of a quantised model from the model in float.
        signature: The bundle's signature, of a bundle that was verified.
        dry_runs: What CUDA would do with the graphs. It is no evidence, and decides nothing.
    """

    name: str
    runs: tuple[RuntimeRun, ...]
    verdicts: tuple[Verdict, ...]
    environment: Mapping[str, object]
    notes: tuple[str, ...]
    model: Path | None = None
    explanations: tuple[str, ...] = ()
    dimensions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: AttnExportError | None = None
    quality: Quality | None = None
    signature: Signature | None = None
    dry_runs: tuple[Observation, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 passed, 5 a required runtime did not run to its end, 6 wrong numbers; or `error`'s."""
        if self.error is not None:
            return self.error.exit_code
        found = {verdict.status for verdict in self.verdicts}
        if (self.quality and self.quality.missed) or found & {"failed", "unusable"}:
            return ParityError.exit_code
        missing = any(run.required and run.outcome != "ran" for run in self.runs)
        missing |= "error" in found or "passed" not in found
        return RuntimeFailure.exit_code if missing else 0

    @property
    def passed(self) -> bool:
        """Return whether everything required passed."""
        return self.exit_code == 0

    def raise_if_failed(self) -> None:
        """Raise the error of the exit code unless everything required passed.

        Raises:
            AttnExportError: `error`, a `ParityError`, or else a `RuntimeFailure`.
        """
        if not self.passed:
            kind = ParityError if self.exit_code == ParityError.exit_code else RuntimeFailure
            raise self.error or kind("; ".join(str(self).splitlines()))

    def _repr_html_(self) -> str:
        """Return the text for notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        """Return the verdict, the causes, and a line for each runtime with a graph; 20 at most."""
        state = "passed" if self.passed else f"failed ({self.exit_code})"
        lines = [f"{self.name}: {state}", *(f"why: {said}" for said in self.explanations)]
        lines += [str(self.error)] if self.error is not None else []
        lines += self.quality.missed if self.quality else ()
        for run in [r for r in self.runs if r.required or r.outcome != "not run"] or self.runs:
            own = [v for v in self.verdicts if (v.runtime, v.graph) == (run.runtime, run.graph)]
            wrong = {v.case for v in own if v.status != "passed"}
            said = f"{len(wrong)} of {counted(len({v.case for v in own}), 'case')} failed"
            said = said if run.outcome == "ran" else f"{run.outcome}: {run.reason}"
            lines.append(f"{run.runtime}, {run.graph}: {said}")
        more = len(lines) - MOST_LINES
        return "\n".join(lines if more <= 0 else [*lines[: MOST_LINES - 1], f"… {more + 1} more"])
