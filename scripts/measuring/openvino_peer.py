"""Candidates that run an ONNX graph in OpenVINO on the CPU, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_export.parts.benchmarks.feeds import Feed, Prepared, filled
from attn_export.parts.benchmarks.own_graphs import ensure_graph_file
from attn_export.runtimes.engines.openvino import sdk

KIND = "measuring.openvino_peer:make_in_openvino"
"""The kind of these candidates."""


def make_in_openvino(options: Mapping[str, Any], threads: int) -> Prepared:
    """Load a graph. Its inputs share memory with numpy arrays; OpenVINO allocates its outputs.

    Args:
        options: ``file``, the graph; ``inputs``, feeds by name; ``export``, see
            `ensure_graph_file`.
        threads: Threads for computing.

    Raises:
        Exception: Any error of OpenVINO.
    """
    openvino = sdk()
    core = openvino.Core()
    model = core.read_model(ensure_graph_file(options))
    config = {
        # The default precision is bfloat16 on processors that have it.
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
