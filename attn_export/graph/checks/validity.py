"""Checks of ONNX validity, and of declared against produced shapes."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from attn_export.errors import one_line
from attn_export.graph.checks.model import Checked, shape_of, show


def onnx_checker(graph: Checked) -> Iterator[str]:
    """Run the full onnx checker."""
    try:
        # By path, since it also looks at external data; a model over 2 GiB has no other way.
        onnx.checker.check_model(str(graph.path), full_check=True)
    except onnx.shape_inference.InferenceError as error:
        yield f"shapes do not fit: {one_line(error)}; mend the node or the declared shape"
    except Exception as error:  # its own, and what damaged files make of it
        yield f"{one_line(error)}; export it again or mend the node"


def strict_shape_inference(graph: Checked) -> Iterator[str]:
    """Run shape inference that stops at the first operator that it cannot infer."""
    try:
        onnx.shape_inference.infer_shapes(
            graph.proto, check_type=True, strict_mode=True, data_prop=True
        )
    except Exception as error:  # its own, and what damaged files make of it
        yield f"{one_line(error)}; mend the node's inputs or attributes"


def declared_shapes(graph: Checked) -> Iterator[str]:
    """Compare declared shapes with inferred ones; an axis declared 0 passes the checker."""
    bare = onnx.ModelProto()
    bare.CopyFrom(graph.proto)
    del bare.graph.value_info[:]
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    except Exception:
        return  # `strict_shape_inference` says so.
    produced = {v.name: shape_of(v) for v in (*inferred.graph.value_info, *inferred.graph.output)}
    values = (*graph.proto.graph.input, *graph.proto.graph.value_info, *graph.proto.graph.output)
    held = {tensor.name for tensor in graph.proto.graph.initializer}  # may well be empty
    for value in values:
        if value.name in held:
            continue
        declared, found = shape_of(value), produced.get(value.name)
        if declared is None:
            continue
        if 0 in declared:
            yield f"{value.name} is declared {show(declared)}: no tensor has an axis of 0; name it"
        elif found is not None and not _agree(declared, found):
            yield f"{value.name} is declared {show(declared)} but is {show(found)}; declare that"


def _agree(declared: tuple[str | int, ...], found: tuple[str | int, ...]) -> bool:
    # A declared size has to be the inferred one. A declared name may be another one, or stand for
    # what inference cannot work out ("" or unk__N; 0 for an unknown total length of `Attention`).
    sizes = zip(declared, found, strict=False)
    fixed = [
        (d, f) for d, f in sizes if isinstance(d, int) and f and not str(f).startswith("unk__")
    ]
    return len(declared) == len(found) and all(d == f for d, f in fixed)
