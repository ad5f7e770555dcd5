"""Probe of a runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from attn_export.cases.draw import Arrays
from attn_export.fingerprint.findings import Finding
from attn_export.fingerprint.probe_graphs import Graph


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
    graph: Graph
    inputs: Arrays
    read: Callable[[np.ndarray], Finding]
    says: str = ""
    not_in_pytorch: str = ""
