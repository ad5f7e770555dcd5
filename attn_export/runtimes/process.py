"""Runs a runtime in a process of its own, within limits, and says how that ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self

from attn_export.nouns import Outcome
from attn_export.runtimes.protocol import Facts, Limits, Runtime

CaseFiles = tuple[str, Path, Path]
"""The name of a case, the folder of its inputs, and the folder for its outputs."""

TAIL = 300
"""How many characters of what a crashed process said are kept."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A case that a runtime is done with.

    Attributes:
        outputs: How many output files it wrote.
        error: What went wrong; empty where nothing did.
    """

    case: str
    outputs: int
    error: str


class Worker:
    """One process for one graph. Started early, it imports its SDK while others work.

    Attributes:
        outcome: How it ended; `"ran"` only when every case was served.
        reason: Why it did not run to its end; empty where it did.
        facts: What the runtime said of itself.
    """

    def __init__(self, runtime: Runtime, limits: Limits) -> None:
        self.runtime = runtime
        self.limits = limits
        self.outcome: Outcome = "crashed"
        self.reason = ""
        self.facts: Facts = {
            "threads": limits.threads,
            "seconds_limit": limits.seconds,
            "memory_limit_mib": limits.memory_mib,
        }
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        memory = limits.memory_mib or 0
        self._process = subprocess.Popen(
            worker_command(runtime.name, memory, limits.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # Ctrl-C is for the process that the user started; it ends this one.
            start_new_session=True,
            text=True,
        )
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def start(self, graph: Path, inputs: Sequence[str], cases: Sequence[CaseFiles]) -> None:
        """Give it its graph and cases; the inputs have to lie on disk by now."""
        job = {
            "graph": str(graph),
            "inputs": list(inputs),
            "cases": [
                {"name": name, "inputs": str(source), "outputs": str(target)}
                for name, source, target in cases
            ],
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # Has it ended? `served` finds out how.
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()

    def served(self) -> Iterator[Served]:
        """The cases as they are served. Afterwards `outcome` and `reason` hold."""
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "ready": lambda _: None, "loaded": self._note_facts,
            "failed": self._note_failure, "done": self._note_end,
        }  # fmt: skip
        while True:
            try:
                event = self._events.get(timeout=self.limits.seconds)
            except queue.Empty:
                self.outcome = "hung"
                self.reason = f"gave no sign of life for {self.limits.seconds:g} s"
                return
            if event is None:
                self.outcome, self.reason = "crashed", self._how_it_died()
                return
            if event["event"] == "case":
                yield Served(event["name"], event.get("outputs", 0), event.get("error", ""))
                continue
            handlers[event["event"]](event)
            if event["event"] in ("failed", "done"):
                return

    def close(self) -> None:
        """End the process and what it started."""
        if self._process.poll() is None:
            _kill(self._process)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    # -- what it says ----------------------------------------------------------------

    def _listen(self, stream: IO[str]) -> None:
        try:
            for line in stream:
                self._events.put(json.loads(line))
        except ValueError:
            pass  # It printed garbage, or the stream was closed: both end the conversation.
        self._events.put(None)

    def _note_facts(self, event: dict[str, Any]) -> None:
        self.facts.update(event["facts"])

    def _note_failure(self, event: dict[str, Any]) -> None:
        self.outcome, self.reason = event["outcome"], event["reason"]

    def _note_end(self, event: dict[str, Any]) -> None:
        self.outcome, self.reason = (
            ("refused", event["objection"]) if event["objection"] else ("ran", "")
        )

    def _how_it_died(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"ended with {how}" + (f": {said[-1][-TAIL:]}" if said else "")


def worker_command(name: str, memory_mib: int, threads: int) -> list[str]:
    """The command that starts a runtime's process."""
    # -P: what lies in the current folder, a numpy.py say, is not for this process.
    module = "attn_export.runtimes.worker"
    return [sys.executable, "-P", "-m", module, name, str(memory_mib), str(threads)]


def _kill(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
