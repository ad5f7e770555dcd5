"""The work that a graph of unknown origin may take, stated once: steps, elements and types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from onnx.reference import ReferenceEvaluator

from attn_export.errors import GraphError, printable
from attn_export.interface import Input

MOST_STEPS = 2**18
"""The largest number of nodes that are computed in bodies of `Loop`, `Scan` and `If` in one
evaluation of a graph. A result of many elements counts as several."""

_ELEMENTS = 2**12
"""The number of elements that take about as long as a step."""

MOST_ELEMENTS = 2**26
"""The largest number of elements of an input that is drawn, and of a result in a body."""

_TYPES = frozenset({
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
})  # fmt: skip
"""The types of inputs that are drawn: no strings, complex or narrower numbers, and no sequences."""


class UnboundedError(GraphError):
    """A graph that takes more work than is allowed at any sizes."""


def refuse_unfit(name: str, input_: Input, path: object) -> None:
    """Refuse an input for which no array can be made.

    Raises:
        GraphError: If it is no array of numbers, or has too many elements or a negative size.
    """
    shown = f"{path}: the input {printable(name, 80)}"
    if input_.dtype not in _TYPES:
        dtype = "a string" if input_.dtype == "object" else input_.dtype
        raise GraphError(f"{shown} is {dtype}; let it be a number of 8 bits or more, or bool")
    fixed = [size for size in input_.shape if isinstance(size, int)]
    if min(fixed, default=0) < 0:
        raise GraphError(f"{shown} has the size {min(fixed)}; give that axis a name or a size")
    if math.prod(fixed) > MOST_ELEMENTS:
        raise GraphError(
            f"{shown} has {math.prod(fixed)} elements, and {MOST_ELEMENTS} is the most; export it "
            "with smaller or named axes"
        )


_left: ContextVar[list[int]] = ContextVar("left")
"""The steps that are left to the node that is computed, as the only element."""


class CountedSteps:
    """The steps that the nodes of a graph took when each was last computed."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._total = 0

    @contextmanager
    def counted(self, key: int) -> Iterator[None]:
        """Count the steps of a node in this block."""
        before = self._of.get(key, 0)
        allowed = MOST_STEPS - self._total + before
        left = [allowed]
        token = _left.set(left)
        try:
            yield
        finally:
            _left.reset(token)
            self._of[key] = allowed - left[0]
            self._total += self._of[key] - before


class BoundedEvaluator(ReferenceEvaluator):
    """onnx's evaluator, which counts what the bodies of nodes compute."""

    def run(self, output_names: Any, feed_inputs: dict[str, Any], *_: Any, **options: Any) -> Any:
        """Return the outputs of a body."""
        results: Any = super().run(None, feed_inputs, intermediate=True, **options)
        left = _left.get([MOST_STEPS])
        for node in self.rt_nodes_:
            size = sum(getattr(results[name], "size", 0) for name in node.output if name)
            left[0] -= 1 + size // _ELEMENTS
            if left[0] < 0:
                raise UnboundedError(f"takes more than {MOST_STEPS} steps in its body")
            if size > MOST_ELEMENTS:
                raise UnboundedError(
                    f"has values of more than {MOST_ELEMENTS} elements in its body"
                )
        return [results[name] for name in output_names or self.output_names]
