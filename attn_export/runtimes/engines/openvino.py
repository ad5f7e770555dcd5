"""OpenVINO, on the CPU, in float32."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.dialect_names import CUDA, DIALECTS
from attn_export.runtimes.protocol import Engine, Facts, Options, PackagedRuntime

if TYPE_CHECKING:
    import numpy as np

_DEVICE = "CPU"
_SNIPPETS = "SNIPPETS_MODE"
_ACTIVATION_GROUPS = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
PRECISION = "INFERENCE_PRECISION_HINT"


class _OpenVino(PackagedRuntime):
    """The runtime `openvino`."""

    name = "openvino"
    about = "OpenVINO, CPU, float32 pinned"
    packages = ("openvino",)
    required = True
    modules = ("openvino",)
    dialects = frozenset(DIALECTS) - {CUDA}
    measured = "2026.4.1"
    unsupported: Mapping[str, str] = {
        "com.microsoft.GroupQueryAttention": (
            "wrong numbers and shapes where the batch is not 1; without a past it is refused"
        ),
        "Greater with ReduceMax": "NaN in rows of which all keys are masked",
        "LinearAttention": "No conversion rule found for operations: LinearAttention-27",
        "com.microsoft.LinearAttention": "No conversion rule found for operations",
        "Softplus": "the gates of linear attention are not exact enough",
        "TensorScatter": "No conversion rule found for operations: TensorScatter-24",
        "Cast(to BFLOAT16)": (
            "numbers whose last bit is even are rounded towards 0, not to the nearest"
        ),
        "Cast(FLOAT to FLOAT16) with input FLOAT": (
            "numbers stay float32 until an output: attention reads keys that were not rounded"
        ),
    }
    counter_options: Mapping[str, Options] = {
        "precision pinned to f32": {PRECISION: "f32"},
        "generated kernels off": {_SNIPPETS: "DISABLE"},
    }

    def prepare(self) -> None:
        """Import the SDK."""
        sdk()

    def _load(self, graph: Path, threads: int, options: Options) -> Engine:
        core = sdk().Core()
        model = core.read_model(graph)
        names = [_name_of(port) for port in model.outputs]
        compiled = core.compile_model(model, _DEVICE, {**default_options(threads), **options})
        request = compiled.create_infer_request()

        def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            for name, array in inputs.items():
                request.set_tensor(name, _tensor_of(array))
            request.infer()
            return {n: _array_of(request.get_output_tensor(i)) for i, n in enumerate(names)}

        precision = compiled.get_property(PRECISION).get_type_name()
        facts: Facts = {"build": sdk().get_version(), "device": _DEVICE, "precision": precision}
        return Engine(run, facts)


RUNTIME = _OpenVino


def sdk() -> Any:
    """Import and return `openvino` without its telemetry."""
    # Importing openvino sends an event to Google Analytics and writes files in the user's home,
    # unless the optional package `openvino_telemetry` cannot be imported. Its only other switch is
    # one of those files.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


def default_options(threads: int) -> dict[str, Any]:
    """Return device properties for correct results and limited use of the machine."""
    return {
        # By default OpenVINO computes in bfloat16 on CPUs that can, with errors of 2e-2.
        PRECISION: "f32",
        # OpenVINO uses the kernel that it generates for unmasked attention with one query also for
        # 16 queries and more, with errors of 1 to 100.
        _SNIPPETS: "DISABLE",
        # By default, products with dequantised weights round inputs to 8 bits: errors of 7e-3.
        _ACTIVATION_GROUPS: 0,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        # Several processes run at once; pinned, they would all use the same cores.
        "ENABLE_CPU_PINNING": False,
    }


def _name_of(port: Any) -> str:
    """Return the ONNX name of an output, whose port may also have names of other values."""
    name: str = port.get_node().get_friendly_name().split("/sink_port_")[0]
    return name if name in port.get_names() else port.get_any_name()


def _tensor_of(array: np.ndarray) -> Any:
    openvino = sdk()
    if array.dtype.name != "bfloat16":
        return openvino.Tensor(array)
    import numpy as np

    shape = openvino.Shape(array.shape)  # passed as bits, as numpy has no bfloat16
    return openvino.Tensor(array.view(np.uint16), shape, openvino.Type.bf16)


def _array_of(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.data.copy()
    if tensor.element_type != sdk().Type.bf16:
        return array
    from attn_export.tensorfile import numpy_dtype

    return array.view(numpy_dtype("bfloat16"))
