"""Asks PyTorch, in a process of its own, if it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

from attn_export.fingerprint.probe import Probe
from attn_export.nouns import Outcome
from attn_export.runtimes.child import Child, module_command
from attn_export.runtimes.process import CaseFiles, Served
from attn_export.runtimes.protocol import Limits


def no_pytorch() -> str:
    """Why it cannot be asked, or ""."""
    return "" if find_spec("torch") else "torch is not installed"


class SdpaServer:
    """A process with PyTorch's `scaled_dot_product_attention`.

    Args:
        limits: For it.
        probes: By the names of the cases.
        cases: What to run.
    """

    def __init__(
        self, limits: Limits, probes: Mapping[str, Probe], cases: Sequence[CaseFiles]
    ) -> None:
        self.outcome: Outcome = "crashed"
        self.reason = ""
        self.loaded = False
        self._seconds = limits.seconds
        self._child = Child(module_command("attn_export.fingerprint.sdpa", limits.threads))
        self._child.tell({"cases": [
            {"name": name, "inputs": str(source), "outputs": str(target),
             "names": list(probes[name].inputs), "causal": probes[name].graph.causal}
            for name, source, target in cases
        ]})  # fmt: skip

    def served(self) -> Iterator[Served]:
        """The cases as they are served."""
        while True:
            try:
                event = self._child.hear(self._seconds)
            except TimeoutError as error:
                self.outcome, self.reason = "hung", str(error)
                return
            if event is None:
                self.outcome, self.reason = "crashed", self._child.how_it_died()
                return
            if event["event"] == "case":
                yield Served(event["name"], event.get("outputs", 0), event.get("error", ""))
            elif event["event"] == "loaded":
                self.loaded = True
            elif event["event"] == "failed":
                self.outcome, self.reason = event["outcome"], event["reason"]
                return
            elif event["event"] == "done":
                self.outcome = "ran"
                return

    def close(self) -> None:
        """End the process."""
        self._child.close()
