"""What a probe is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from attn_export.cases.draw import Arrays
from attn_export.fingerprint.findings import Finding
from attn_export.fingerprint.graphs import Graph


@dataclasses.dataclass(frozen=True)
class Probe:
    """One question to a runtime.

    Attributes:
        name: Unique, short: the first column of a table.
        about: What it shows.
        graph: What the inputs are run through.
        inputs: By the names of the graph's inputs, in their order.
        read: Says what an output means.
        says: The reading that the text of the ONNX specification asks for; "" where it is silent.
        not_in_pytorch: Why `scaled_dot_product_attention` is not asked; "" where it is.
    """

    name: str
    about: str
    graph: Graph
    inputs: Arrays
    read: Callable[[np.ndarray], Finding]
    says: str = ""
    not_in_pytorch: str = ""
