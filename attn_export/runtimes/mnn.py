"""MNN: the graph is converted to its own format and run on the CPU."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.dialect_names import PORTABLE
from attn_export.runtimes.protocol import (
    AllocatingEngine,
    Engine,
    Facts,
    PackagedRuntime,
    Unsupported,
    unsupported,
)

if TYPE_CHECKING:
    import numpy as np

UNSUPPORTED = (
    unsupported("Tanh", says="its values near 0 are not precise enough: softcap by 50 is seen"),
    unsupported("input BFLOAT16", says="its interface to numpy knows no bfloat16"),
    unsupported("input FLOAT16", says="its interface to numpy knows no float16"),
    unsupported("MatMulInteger", says="its process ends with a signal"),
    unsupported("input INT8", says="its process ends with a signal"),
    unsupported("input UINT8", says="its process ends with a signal"),
)

DYNAMIC = True
"""Otherwise plans for another batch are used again: wrong where heads share keys."""


class Mnn(PackagedRuntime):
    """`mnn`."""

    name = "mnn"
    packages = ("MNN",)
    modules = ("MNN",)
    dialects = frozenset({PORTABLE})
    measured = "3.6.1"
    unsupported: Sequence[Unsupported] = UNSUPPORTED

    def load(self, graph: Path, threads: int) -> Engine:
        """Convert and load the graph.

        Args:
            graph: The file of the graph.
            threads: The number of threads.
        """
        return MnnEngine(graph, threads)


class MnnEngine(AllocatingEngine):
    """A converted graph."""

    def __init__(self, graph: Path, threads: int) -> None:
        import MNN
        import onnx

        proto = onnx.load(graph, load_external_data=False)
        self._inputs = [value.name for value in proto.graph.input]
        self._outputs = [value.name for value in proto.graph.output]
        with _file() as converted:
            _convert(graph, converted)
            self._module = MNN.nn.load_module_from_file(
                str(converted), self._inputs, self._outputs,
                dynamic=DYNAMIC, precision_mode=MNN.expr.PrecisionMode.High, thread_num=threads,
            )  # fmt: skip

    def _run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = self._module.forward([_var_of(inputs[name]) for name in self._inputs])
        outputs = given if isinstance(given, list) else [given]
        # Copies: what is read is the memory of a variable that ends here.
        arrays = (output.read().copy() for output in outputs)
        return dict(zip(self._outputs, arrays, strict=True))

    def facts(self) -> Facts:
        """Return the facts: it runs on the CPU, in float32."""
        return {"device": "CPU", "precision": "high: f32"}


@contextlib.contextmanager
def _file() -> Iterator[Path]:
    """Yield an empty file, removed at the end."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryDirectory(prefix="attn-export-") as folder:
            converted = Path(folder) / "graph.mnn"
            converted.touch()
            yield converted
        return
    # In memory, without a name: nothing is left of it if this process is killed, and no folder
    # is too full for it. The converter says nothing where that is so, and leaves zeros.
    number = os.memfd_create("graph.mnn")
    try:
        yield Path(f"/proc/self/fd/{number}")
    finally:
        os.close(number)


def _convert(graph: Path, converted: Path) -> None:
    # Not by the program `mnnconvert`, which installs a package for telemetry and uses it.
    import _tools

    _tools.mnnconvert(
        ["mnnconvert", "-f", "ONNX", "--modelFile", str(graph), "--MNNModel", str(converted),
         "--bizCode", "attn-export", "--keepInputFormat=1"]
    )  # fmt: skip
    if not converted.stat().st_size:
        raise RuntimeError("the converter wrote nothing: it refuses the graph")


def _var_of(array: np.ndarray) -> Any:
    import MNN
    import numpy as np

    # Its only integers are of 32 bits, and bool is one of them.
    whole = array.dtype.kind in "biu"
    given = np.ascontiguousarray(array, np.int32) if whole else array
    kind = MNN.expr.int if whole else MNN.expr.float
    return MNN.expr.const(given, list(array.shape), MNN.expr.NCHW, kind)
