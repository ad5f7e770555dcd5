"""Comparison of a runtime, the ONNX reference evaluator and PyTorch on the same probes."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np

from attn_export.diagnose.findings import (
    NO_OPERATOR,
    RAN,
    SOMETHING_ELSE,
    Probe,
    ProbeFinding,
    Row,
)
from attn_export.diagnose.mask_probes import masks, odd_inputs, seen_keys
from attn_export.diagnose.precision import precision
from attn_export.diagnose.probe_graphs import write_graph
from attn_export.dialect_names import ORT, PORTABLE, STANDARD
from attn_export.results import Outcome
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.process import CaseFiles, Worker
from attn_export.runtimes.protocol import Limits, Runtime
from attn_export.tensorfile import read_outputs, write_tensors

# -- distribution of cases to processes, with a fresh one after each crash ----------------------

AT_ONCE = 2
"""Processes: one computes while another starts."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """Result of one case.

    Attributes:
        outcome: ``"ran"``, or how it ended.
        reason: Why it gave no outputs.
        outputs: By name.
    """

    outcome: Outcome
    reason: str = ""
    outputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Question:
    """Cases for one process after another.

    Attributes:
        start: Starts a process with these cases.
        cases: The cases without an answer.
    """

    start: Callable[[Sequence[CaseFiles]], Worker]
    cases: Sequence[CaseFiles]


def worker_with(
    kind: Runtime, limits: Limits, graph: Path, inputs: Sequence[str], cases: Sequence[CaseFiles]
) -> Worker:
    """Return a runtime's process, started with a graph.

    Args:
        kind: The runtime.
        limits: For it.
        graph: The file.
        inputs: The names of its inputs.
        cases: The cases to run.
    """
    worker = Worker(kind, limits)
    worker.send_job(graph, inputs, cases)
    return worker


def run_questions(
    questions: Iterable[Question], advance: Callable[[str], None] = lambda _: None
) -> dict[Path, Answer]:
    """Return the answers, keyed by the output folders of the cases.

    A process that crashes or hangs within a case is the answer to that case; the next ones get a
    fresh process. One that ends before its first case is the answer to all of them.

    Args:
        questions: At most `AT_ONCE` of them run at a time, in their order.
        advance: Receives the name of each case after its answer.
    """
    found: dict[Path, Answer] = {}
    waiting = deque(questions)
    running: deque[tuple[Question, Worker]] = deque()
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                question = waiting.popleft()
                server = question.start(question.cases)
                stack.callback(server.close)
                running.append((question, server))
            question, server = running.popleft()
            answers = _listen(question, server, advance)
            server.close()
            found |= answers
            left = [case for case in question.cases if case[2] not in answers]
            if left:
                waiting.appendleft(dataclasses.replace(question, cases=left))
    return found


def _listen(
    question: Question, server: Worker, advance: Callable[[str], None]
) -> dict[Path, Answer]:
    """Return the answers to the cases that this process reached."""
    found: dict[Path, Answer] = {}
    cases = iter(question.cases)
    for served in server.results():
        name, _, folder = next(cases)
        assert name == served.case
        found[folder] = (
            Answer("refused", served.error)
            if served.error
            else Answer(RAN, outputs=read_outputs(folder, served.outputs))
        )
        advance(name)
    if server.outcome == RAN:
        return found
    ended = Answer(server.outcome, server.reason)
    rest = list(cases)
    if not rest:  # it refuses in the end what it did, or dies when all is done
        return dict.fromkeys(found, ended) if server.outcome == "refused" else found
    for name, _, folder in rest[:1] if server.loaded else rest:
        found[folder] = ended
        advance(name)
    return found


# -- probes and their rows ----------------------------------------------------------------------

REFERENCE = "onnx-reference"
PYTORCH = "pytorch"


def probes() -> tuple[Probe, ...]:
    """Return all probes, in the order of the report."""
    return (*seen_keys(), *masks(), *precision(), *odd_inputs())


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of the comparison: a runtime in a dialect."""

    name: str
    form: str


class ProgressReceiver(Protocol):
    """Receiver of progress."""

    def expect(self, steps: int) -> None:
        """Expect this number of answers."""
        ...

    def advance(self, text: str) -> None:
        """Count one answer."""
        ...


class Comparison:
    """One run of probes.

    Args:
        kind: The runtime.
        probes: The probes to run.
        folder: An empty one for graphs, inputs and outputs.
        limits: For every process.
        progress: The receiver of progress.
    """

    def __init__(
        self,
        kind: Runtime,
        probes: Sequence[Probe],
        folder: Path,
        limits: Limits,
        progress: ProgressReceiver,
    ) -> None:
        self._kind, self._probes = kind, {probe.name: probe for probe in probes}
        self._folder, self._limits, self._progress = folder, limits, progress
        self._numbers = {name: str(number) for number, name in enumerate(self._probes)}
        self._answers: dict[Path, Answer] = {}
        for probe in probes:
            self._inputs_of(probe).mkdir(parents=True)
            write_tensors(self._inputs_of(probe), "input", probe.inputs)

    def rows(self) -> tuple[Row, ...]:
        """Return a row for each probe, in their order."""
        self._ask(self._first_round())
        again = [probe for probe in self._probes.values() if self._unclear(probe)]
        if PORTABLE in self._kind.dialects:
            self._ask(self._of_runtime(self._kind, PORTABLE, again))
        return tuple(self._row(probe) for probe in self._probes.values())

    # -- asking ----------------------------------------------------------------------

    def _ask(self, questions: Iterable[Question]) -> None:
        listed = list(questions)
        self._progress.expect(sum(len(question.cases) for question in listed))
        self._answers |= run_questions(listed, self._progress.advance)

    def _first_round(self) -> Iterator[Question]:
        everything = list(self._probes.values())
        if not runtime(PYTORCH).unavailable():
            supported = [probe for probe in everything if not probe.not_in_pytorch]
            yield from self._of_runtime(runtime(PYTORCH), STANDARD, supported)
        for dialect in (STANDARD, ORT):
            if dialect in self._kind.dialects:
                yield from self._of_runtime(self._kind, dialect, everything)
        if self._kind.name != REFERENCE:
            yield from self._of_runtime(runtime(REFERENCE), STANDARD, everything)

    def _of_runtime(
        self, kind: Runtime, dialect: str, probes: Sequence[Probe]
    ) -> Iterator[Question]:
        """Yield one question for each graph."""
        for graph in {probe.graph.name: probe.graph for probe in probes}.values():
            if dialect not in (graph.dialect, PORTABLE):
                continue
            path = write_graph(graph, dialect, self._folder)
            supported = [probe for probe in probes if probe.graph.name == graph.name]
            if path is not None:
                names = list(supported[0].inputs)
                start = functools.partial(worker_with, kind, self._limits, path, names)
                yield Question(start, self._cases(Side(kind.name, dialect), supported))

    def _cases(self, side: Side, probes: Sequence[Probe]) -> list[CaseFiles]:
        return [(p.name, self._inputs_of(p), self._outputs_of(side, p)) for p in probes]

    def _inputs_of(self, probe: Probe) -> Path:
        return self._folder / "inputs" / self._numbers[probe.name]

    def _outputs_of(self, side: Side, probe: Probe) -> Path:
        return self._folder / side.name / side.form / self._numbers[probe.name]

    # -- reading ---------------------------------------------------------------------

    def _unclear(self, probe: Probe) -> bool:
        """Return whether the portable form must clarify the result of the attention node."""
        found = self._here(probe)
        return any(
            each.outcome != RAN or (probe.says and each.reading != probe.says) for each in found
        )

    def _here(self, probe: Probe) -> tuple[ProbeFinding, ...]:
        forms = (probe.graph.dialect, PORTABLE)
        found = (self._finding(Side(self._kind.name, form), probe) for form in forms)
        given = tuple(each for each in found if each is not None)
        return given or (ProbeFinding(NO_OPERATOR, outcome="not run"),)

    def _finding(self, side: Side, probe: Probe) -> ProbeFinding | None:
        answer = self._answers.get(self._outputs_of(side, probe))
        if answer is None:
            return None
        if answer.outcome != RAN:
            reason = answer.reason.replace(f"{self._folder}/", "")
            return ProbeFinding(answer.outcome, reason, side.form, answer.outcome)
        if "output" not in answer.outputs:
            names = ", ".join(answer.outputs)
            return ProbeFinding(SOMETHING_ELSE, f"its outputs are {names}", side.form)
        return dataclasses.replace(probe.read(answer.outputs["output"]), form=side.form)

    def _row(self, probe: Probe) -> Row:
        reason = probe.not_in_pytorch or runtime(PYTORCH).unavailable()
        supported = self._finding(Side(PYTORCH, STANDARD), probe)
        return Row(
            probe.name, probe.about, self._here(probe), probe.says,
            self._finding(Side(REFERENCE, STANDARD), probe),
            supported or ProbeFinding(reason, outcome="not run"),
        )  # fmt: skip
