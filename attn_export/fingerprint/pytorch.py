"""Probes of PyTorch, in a process of its own, if it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from attn_export.fingerprint.probe import Probe
from attn_export.runtimes.child import module_command
from attn_export.runtimes.protocol import Limits
from attn_export.runtimes.serving import CaseFiles, Serving


def no_pytorch() -> str:
    """Return the reason that PyTorch is unavailable, or ""."""
    return "" if find_spec("torch") else "torch is not installed"


class SdpaServer(Serving):
    """A process with PyTorch's `scaled_dot_product_attention`.

    Args:
        limits: For it.
        probes: By the names of the cases.
        cases: The cases to run.
    """

    def __init__(
        self, limits: Limits, probes: Mapping[str, Probe], cases: Sequence[CaseFiles]
    ) -> None:
        super().__init__(module_command("attn_export.fingerprint.sdpa", limits.threads), limits)
        self._child.tell({"cases": [
            {"name": name, "inputs": str(source), "outputs": str(target),
             "names": list(probes[name].inputs), "causal": probes[name].graph.causal}
            for name, source, target in cases
        ]})  # fmt: skip
