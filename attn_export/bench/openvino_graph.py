"""A graph in OpenVINO on the CPU, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_export.bench.feeds import Feed, Prepared, filled
from attn_export.bench.own_graphs import file_of
from attn_export.runtimes.openvino import sdk


def make(options: Mapping[str, Any], threads: int) -> Prepared:
    """Load a graph; its inputs share memory, its outputs stay in OpenVINO's own.

    Args:
        options: ``file``, ``inputs``, feeds by name, and ``export``, see `file_of`.
        threads: Threads for computing.

    Raises:
        Exception: Any error of OpenVINO.
    """
    openvino = sdk()  # installed where it takes part only
    core = openvino.Core()
    model = core.read_model(file_of(options))
    config = {
        # By default it computes in bfloat16 where the processor can.
        "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1,
    }  # fmt: skip
    request = core.compile_model(model, "CPU", config).create_infer_request()
    arrays = []
    for number, port in enumerate(model.inputs):
        array = filled(Feed.from_json(options["inputs"][port.get_any_name()]), seed=number)
        request.set_tensor(port.get_any_name(), openvino.Tensor(array, shared_memory=True))
        arrays.append(array)

    def run() -> object:
        request.infer()
        return arrays

    return Prepared(run, {"device": "CPU", "precision": "f32"})
