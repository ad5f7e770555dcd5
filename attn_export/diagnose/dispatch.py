"""Distribution of cases to processes, with a fresh one after each crash, until all are answered."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from attn_export.diagnose.findings import RAN
from attn_export.results import Outcome
from attn_export.runtimes.process import CaseFiles, Worker
from attn_export.runtimes.protocol import Limits, Runtime
from attn_export.tensorfile import read_outputs

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
    worker.start(graph, inputs, cases)
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
    for served in server.served():
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
