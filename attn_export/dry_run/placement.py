"""Reasons that nodes are not on CUDA, from ONNX Runtime's own log."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.dry_run.observed import NodeElsewhere
from attn_export.errors import printable
from attn_export.runtimes.ort_cuda import COMPUTING

NO_KERNEL = re.compile(r"CUDA kernel not found in registries for Op type: (\S+) node name: (\S*)")
FORCED = re.compile(r"Force fallback to CPU execution for node: (\S+) because")

SHAPES = "it computes shapes, which ONNX Runtime keeps on the host"
NONE_FITS = "the CUDA provider has no kernel of this operator for its types and opset"
UNSAID = "ONNX Runtime gives no reason"
MOST_LOG = 16 << 20


@contextlib.contextmanager
def captured_stderr(path: Path) -> Iterator[Callable[[], str]]:
    """Write what this process says on stderr to a file.

    Yields:
        A function that returns what was said so far, or in the block, after its end.
    """
    sys.stderr.flush()
    before = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: path.read_bytes()[:MOST_LOG].decode(errors="replace")
        finally:
            os.dup2(before, 2)
            os.close(before)


def reasons_in(log: str) -> dict[str, str]:
    """Return the reason of each node that the log names."""
    found = dict.fromkeys(FORCED.findall(log), SHAPES)
    found |= {name: NONE_FITS for _, name in NO_KERNEL.findall(log)}
    return found


def not_on_cuda(
    placed: Sequence[Any], reasons: Mapping[str, str], cuda: str
) -> tuple[dict[str, int], tuple[NodeElsewhere, ...]]:
    """Return how many nodes of each operator are on CUDA, and the nodes that are not.

    Args:
        placed: What the session says of the parts of its graph.
        reasons: The reasons by the names of nodes.
        cuda: The name of the CUDA provider.
    """
    on_cuda: dict[str, int] = {}
    elsewhere = []
    for part in placed:
        for node in part.get_nodes():
            if part.ep_name == cuda:
                on_cuda[node.op_type] = on_cuda.get(node.op_type, 0) + 1
                continue
            elsewhere.append(
                NodeElsewhere(
                    printable(node.name, 120), printable(node.op_type, 60), part.ep_name,
                    reasons.get(node.name, UNSAID), node.op_type in COMPUTING,
                )
            )  # fmt: skip
    return on_cuda, tuple(elsewhere)
