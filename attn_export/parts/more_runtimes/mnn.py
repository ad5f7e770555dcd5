"""MNN, on the CPU. The graph is converted to MNN's own format first."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.dialect_names import PORTABLE
from attn_export.runtimes.protocol import Engine, PackagedRuntime

if TYPE_CHECKING:
    import numpy as np

DYNAMIC = True
"""The option that makes MNN plan each run anew. Without it, MNN reuses plans made for another batch
size, with wrong results where heads share keys."""


class _Mnn(PackagedRuntime):
    """The runtime `mnn`."""

    name = "mnn"
    about = "MNN, CPU"
    packages = ("MNN",)
    modules = ("MNN",)
    dialects = frozenset({PORTABLE})
    measured = "3.6.1"
    unsupported: Mapping[str, str] = {
        "Tanh": "its values near 0 are not precise enough: softcap by 50 is seen",
        "input BFLOAT16": "its interface to numpy knows no bfloat16",
        "input FLOAT16": "its interface to numpy knows no float16",
        "MatMulInteger": "its process ends with a signal",
        "input INT8": "its process ends with a signal",
        "input UINT8": "its process ends with a signal",
    }

    def engine(self, graph: Path, threads: int) -> Engine:
        """Return a graph that was converted to MNN's format."""
        import MNN
        import onnx

        proto = onnx.load(graph, load_external_data=False).graph
        inputs_of, outputs_of = ([v.name for v in some] for some in (proto.input, proto.output))
        with _temporary_file() as converted:
            _convert(graph, converted)
            module = MNN.nn.load_module_from_file(
                str(converted), inputs_of, outputs_of,
                dynamic=DYNAMIC, precision_mode=MNN.expr.PrecisionMode.High, thread_num=threads,
            )  # fmt: skip

        def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            result = module.forward([_var_of(inputs[name]) for name in inputs_of])
            outputs = result if isinstance(result, list) else [result]
            # Copies: an array from `read` is a view of the variable, which is freed here.
            arrays = (output.read().copy() for output in outputs)
            return dict(zip(outputs_of, arrays, strict=True))

        return Engine(run, {"device": "CPU", "precision": "high: f32"})


RUNTIME = _Mnn


@contextlib.contextmanager
def _temporary_file() -> Iterator[Path]:
    """Yield the path of an empty file, which is removed at the end."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryDirectory(prefix="attn-export-") as folder:
            converted = Path(folder) / "graph.mnn"
            converted.touch()
            yield converted
        return
    # A file in memory: nothing is left of it if this process is killed. Nor can a disk be full,
    # in which case the converter reports no error and writes zeros.
    number = os.memfd_create("graph.mnn")
    try:
        yield Path(f"/proc/self/fd/{number}")
    finally:
        os.close(number)


def _convert(graph: Path, converted: Path) -> None:
    # Not the program `mnnconvert`: it installs and uses a package for telemetry.
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

    # MNN has only int32 for integers and bools.
    is_integer = array.dtype.kind in "biu"
    data = np.ascontiguousarray(array, np.int32) if is_integer else array
    dtype = MNN.expr.int if is_integer else MNN.expr.float
    return MNN.expr.const(data, list(array.shape), MNN.expr.NCHW, dtype)
