"""Processes that try mutants: one that crashes takes its mutant with it, and no other."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from mutants.mutant import Mutant
from mutants.mutated_bundles import spec_of
from mutants.trial import Trials, Tried

from attn_export.temp_folders import scratch

SECONDS = 60.0
"""The longest that one mutant may take, the first of a bundle with all that it needs."""

SPAWN = multiprocessing.get_context("spawn")


@dataclasses.dataclass(frozen=True)
class Job:
    """A mutant of a graph, and its number among all of that graph."""

    bundle: str
    file: str
    number: int
    mutant: Mutant


class _Child:
    """A process that tries one mutant at a time."""

    def __init__(self, bundles: Path) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(theirs, bundles), daemon=True)
        self._process.start()
        theirs.close()

    def tried(self, job: Job) -> Tried | Exception | None:
        """Return what came of a mutant; None where the process ended or took too long."""
        with contextlib.suppress(EOFError, OSError):
            self._pipe.send((job.bundle, job.file, job.number))
            if self._pipe.poll(SECONDS):
                found: Tried | Exception = self._pipe.recv()
                return found
        return None

    def end(self) -> None:
        self._process.kill()


def all_tried(jobs: Sequence[Job], bundles: Path) -> Iterator[Tried]:
    """Yield what came of each mutant, in the order in which they are done."""
    results: queue.Queue[Tried | Exception] = queue.Queue()
    for part in _parts(jobs, os.cpu_count() or 1):
        threading.Thread(target=_work, args=(part, bundles, results), daemon=True).start()
    for _ in jobs:
        found = results.get()
        if isinstance(found, Exception):
            raise found
        yield found


def _work(jobs: Sequence[Job], bundles: Path, results: queue.Queue[Tried | Exception]) -> None:
    child = _Child(bundles)
    for job in jobs:
        found = child.tried(job)
        if found is None:
            child.end()
            child = _Child(bundles)
        results.put(found or _lost(job))
    child.end()


def _parts(jobs: Sequence[Job], count: int) -> list[Sequence[Job]]:
    size = max(-(-len(jobs) // count), 1)
    return [jobs[at : at + size] for at in range(0, len(jobs), size)]


def _lost(job: Job) -> Tried:
    mutant = job.mutant
    reason = "the process ended, or took too long"
    return Tried(job.bundle, job.file, mutant.kind, mutant.row, mutant.what, "refused", reason, "")


def _serve(pipe: Connection, bundles: Path) -> None:
    trials: Trials | None = None
    with scratch() as folder:
        while True:
            bundle, file, number = pipe.recv()
            if trials is None or trials.name != bundle:
                trials = Trials(bundle, bundles / bundle, spec_of(bundle))
            try:
                pipe.send(trials.tried(file, trials.mutants(file)[number], folder))
            except Exception as error:  # a fault of the engine, not of the mutant
                pipe.send(error)
