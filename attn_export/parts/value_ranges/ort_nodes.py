"""Operators that the float64 evaluation does not know, computed by ONNX Runtime in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from attn_export.dialect_names import MODEL
from attn_export.errors import GraphError, printable
from attn_export.float64.evaluate import OPERATORS, widen_model
from attn_export.runtimes.child import limited
from attn_export.temp_folders import scratch
from attn_export.tensorfile import (
    Array,
    ArrayDict,
    read_outputs,
    read_tensors,
    to_float64,
    write_tensors,
)


def unknown_operators(model: onnx.ModelProto) -> list[type[OpRun]]:
    """Return operators for the reference evaluator, one for each that it does not have."""
    found: dict[tuple[str, str], type[OpRun]] = {}
    tried = set()
    originals = {tuple(node.output): node for node in model.graph.node}
    for node in model.graph.node:
        key = node.domain, node.op_type
        if key not in tried and not _is_known(node, model):
            found[key] = _operator(key, originals, model)
        tried.add(key)
    return list(found.values())


def _run_model(folder: str, model: str) -> int:
    """Run a graph on the inputs in a folder, write its outputs beside them, return their number."""
    from attn_export.runtimes.engines.ort_cpu import CPU_PROVIDER, sdk

    place = Path(folder)
    session = sdk().InferenceSession(model, providers=[CPU_PROVIDER])
    names = [value.name for value in session.get_inputs()]
    results = session.run(None, read_tensors(place, "input", names))
    outputs = {value.name: x for value, x in zip(session.get_outputs(), results, strict=True)}
    write_tensors(place, "output", outputs)
    return len(outputs)


def run_beside(model: Path, inputs: Mapping[str, Array], about: str = "") -> ArrayDict:
    """Return the outputs of a graph in ONNX Runtime on the CPU, in a process with limits.

    `about`: What messages call the graph.  [default: the name of its file]

    Raises:
        GraphError: If it refuses the graph, or crashes.
    """
    with scratch() as folder:
        write_tensors(folder, "input", inputs)
        count = limited(
            f"{__name__}:_run_model",
            about or model.name,
            folder=str(folder),
            model=str(model.absolute()),
        )
        return read_outputs(folder, count)


def _is_known(node: onnx.NodeProto, model: onnx.ModelProto) -> bool:
    graph = onnx.GraphProto(name="node", node=[node])
    alone = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, graph=graph
    )
    try:
        ReferenceEvaluator(widen_model(alone), new_ops=OPERATORS)
    except Exception:  # what it raises depends on the operator
        return False
    return True


def _operator(
    key: tuple[str, str], originals: dict[tuple[str, ...], onnx.NodeProto], model: onnx.ModelProto
) -> type[OpRun]:
    def _run(self: OpRun, *inputs: Array | None, **_: Any) -> tuple[Array | None, ...]:
        return _in_ort(originals[tuple(self.onnx_node.output)], inputs, model)

    domain, name = key
    return type(name, (OpRun,), {"op_domain": domain, "_run": _run})


def _in_ort(
    node: onnx.NodeProto, inputs: tuple[Array | None, ...], model: onnx.ModelProto
) -> tuple[Array | None, ...]:
    narrow = [
        None if x is None else x.astype(np.float32) if x.dtype == np.float64 else x for x in inputs
    ]
    given = {name: x for name, x in zip(node.input, narrow, strict=False) if name and x is not None}
    graph = onnx.GraphProto(
        name="node", node=[node],
        input=[
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), None)
            for name, x in given.items()
        ],
        output=[onnx.ValueInfoProto(name=name) for name in node.output if name],
    )  # fmt: skip
    alone = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, graph=graph
    )
    with scratch() as folder:
        onnx.save_model(alone, folder / MODEL)
        try:
            outputs = run_beside(folder / MODEL, given, printable(node.op_type, 60))
        except GraphError as error:
            raise NotImplementedError(str(error)) from error
    return tuple(to_float64(outputs[name]) if name else None for name in node.output)
