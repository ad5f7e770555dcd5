"""The table of faults for `test_checks.py`: each an edit of a healthy graph."""

from __future__ import annotations

import dataclasses

import graph_edits as edit
import numpy as np
from graph_edits import Edit


@dataclasses.dataclass(frozen=True)
class Fault:
    """An edit, and the check that must find it.

    Attributes:
        message: Texts of its message: the thing, and what to do.
        also: Checks that cannot help noticing it too.
        known: Whether the check knows the expected properties, as of a spec or a bundle.
        beside: Bytes of a `weights.bin` beside the graph.
        exact: The graph that it should differ from by the rounding of inputs alone.
    """

    name: str
    check: str
    edit: Edit
    message: tuple[str, ...]
    also: tuple[str, ...] = ()
    known: bool = True
    beside: int | None = None
    exact: str = ""


UNIX, WINDOWS = "/home/ada/src/model.py", "C:\\Users\\ada\\model.py"
WEIGHT_BYTES = 32 * 32 * 4
CHECKER = ("onnx_checker",)

FAULTS: tuple[Fault, ...] = (
    Fault("products that should round inputs", "accuracy_level", lambda _: None,
          ("it rounds no inputs of products", "build it again"), exact="model.onnx"),
    # Invalid ONNX, and declared shapes other than the computed ones.
    Fault("a node after its reader", "onnx_checker", edit.node_after_its_reader,
          ("topologically sorted", "Concat", "correct the node")),
    Fault("an attribute that does not exist", "onnx_checker", edit.unknown_attribute,
          ("nonsense", "Transpose", "correct the node")),
    Fault("a weight of another shape", "strict_shape_inference", edit.narrow_weight,
          ("q_proj/MatMul", "Incompatible dimensions", "correct the node's inputs"),
          also=("onnx_checker",)),
    Fault("a computed shape that only data propagation knows", "strict_shape_inference",
          edit.axis("Expand.out", 1, 5), ("Expand", "(1) vs (5)", "correct the node's inputs"),
          also=("declared_shapes",)),
    Fault("a range with too many elements", "value_sizes", edit.long_range(10**12),
          ("long of Range has 1000000000000 elements", "no memory", "correct what gives its size"),
          known=False),
    Fault("an axis of a value declared 0", "declared_shapes", edit.axis("Attention.out", 2, 0),
          ("Attention.out", "[batch, 4, 0, 8]", "is [batch, 4, query_len, 8]", "declare that"),
          also=("empty_axes",)),
    Fault("an axis of an output declared 0", "empty_axes", edit.axis("present_key", 2, 0),
          ("present_key", "[batch, 2, 0, 8]", "no tensor has an axis of 0", "name it"),
          also=("dynamic_axes",)),
    Fault("another number of heads declared", "declared_shapes", edit.axis("Attention.out", 1, 5),
          ("declared [batch, 5, query_len, 8]", "is [batch, 4, query_len, 8]", "declare that"),
          also=("onnx_checker", "strict_shape_inference")),
    Fault("another width of an output declared", "declared_shapes", edit.axis("output", 2, 64),
          ("output", "[batch, query_len, 64]", "[batch, query_len, 32]", "declare that"),
          also=("onnx_checker", "strict_shape_inference", "dynamic_axes")),
    # Axes that are missing, or have other names.
    Fault("an input missing", "signature", edit.without_mask,
          ("inputs are query, past_key", "expected query, attn_mask", "export it again")),
    Fault("an output missing", "signature", lambda model: model.graph.output.pop(),
          ("outputs are output, present_key,", "expected output, present_key, present_value")),
    Fault("inputs in another order", "signature", edit.reversed_inputs,
          ("past_value, past_key, attn_mask, query", "expected query", "export it again")),
    Fault("an input renamed", "signature", edit.rename("query", "x"),
          ("inputs are x, attn_mask", "expected query, attn_mask", "export it again")),
    Fault("an output renamed", "signature", edit.rename("present_key", "k"),
          ("outputs are output, k", "expected output, present_key", "export it again")),
    Fault("a fixed axis", "dynamic_axes", edit.axis("query", 0, 2),
          ("axis 0 of query is fixed at 2", "'batch'", "name it")),
    Fault("a fixed axis of an output", "dynamic_axes", edit.axis("output", 1, 5),
          ("axis 1 of output is fixed at 5", "'query_len'", "name it"), also=("declared_shapes",)),
    Fault("a renamed axis", "dynamic_axes", edit.axis("query", 0, "N"),
          ("axis 0 of query is 'N'", "expected 'batch'", "rename it")),
    Fault("an axis not carried to an output", "dynamic_axes", edit.axis("output", 1, "sequence"),
          ("axis 1 of output is 'sequence'", "expected 'query_len'", "rename it")),
    Fault("another fixed size", "dynamic_axes", edit.axis("past_value", 3, 9),
          ("axis 3 of past_value is 9", "expected 8")),
    Fault("another rank", "dynamic_axes", lambda model: edit.dims_of(model, "attn_mask").pop(1),
          ("attn_mask is [batch, 1, total_len]", "expected [batch, 1, 1, total_len]", "export"),
          also=("declared_shapes",)),
    Fault("an unnamed axis", "named_axes", edit.axis("query", 0, ""),
          ("axis 0 of query has neither size nor name", "name it"), known=False),
    Fault("an unnamed axis of an output", "named_axes", edit.axis("output", 0, ""),
          ("axis 0 of output has neither size nor name", "name it"), also=("dynamic_axes",)),
    Fault("no declared shape", "named_axes",
          lambda model: model.graph.output[0].type.tensor_type.ClearField("shape"),
          ("output has no declared shape", "declare it"), also=("onnx_checker",), known=False),
    # Are the operators those of the dialect?
    Fault("two Attention nodes", "attention_count",
          edit.after_attention("Attention", "Transpose_2.out", "Transpose_3.out"),
          ("2 Attention nodes", "expected 1", "export it again")),
    Fault("no Attention node", "attention_count", edit.without_attention,
          ("0 Attention nodes", "expected 1", "export it again"), also=("signature",)),
    Fault("a Softmax", "attention_count", edit.after_attention("Softmax"),
          ("1 Softmax nodes", "taken apart", "export it again"), also=("expected_operators",)),
    Fault("an operator of another domain", "expected_operators",
          edit.after_attention("FastGelu", domain="com.microsoft"),
          ("FastGelu of com.microsoft", "not in the standard dialect", "lower it")),
    Fault("a foreign operator", "expected_operators", edit.after_attention("Relu"),
          ("Relu", "not an operator of this module", "export it again")),
    Fault("an opset that onnx does not know", "opset_version", edit.opset(999),
          ("opset 999 is newer than onnx", "export lower"), known=False),
    Fault("an opset that the dialect does not have", "opset_version", edit.opset(25),
          ("opset 25", "the standard dialect has (23, 24, 27)", "export it again")),
    Fault("Attention at opset 18", "opset_version", edit.opset(18),
          ("Attention at opset 18", "declare opset 23"), also=("onnx_checker", "ir_version")),
    Fault("an IR version that is too new", "ir_version", edit.ir_version(12),
          ("IR version 12 with opset 23", "goes with 11", "lower it")),
    # Is there anything in it that should not ship?
    Fault("a float64 initializer", "no_float64", edit.float64_constant,
          ("the initializer half is float64", "make it float32"), also=("expected_operators",)),
    Fault("a cast to float64", "no_float64", edit.through_float64,
          ("Cast 'up' casts to float64", "compute in float32")),
    Fault("a float64 value", "no_float64", edit.declared_float64,
          ("wide is float64", ".float() before the export")),
    Fault("a scale of NaN", "quantisation_scales", edit.scale(np.nan),
          ("DequantizeLinear 'DQ': 1 of 32 scales in scales are not finite", "quantise")),
    Fault("a division by a scale of 0", "quantisation_scales", edit.scale(0.0, "QuantizeLinear"),
          ("QuantizeLinear 'DQ': 1 of 32 scales in scales are 0", "quantise"), known=False),
    Fault("a dead node", "no_dead_nodes", edit.dead_node,
          ("the outputs of Shape 'dead' are not used", "remove it")),
    Fault("an unused initializer", "no_dead_nodes", edit.constant("spare", np.full(1, 7, np.int64)),
          ("the initializer spare is not used", "remove it")),
    Fault("an input that no node reads", "no_unread_inputs", edit.unread_input,
          ("the input extra is not read", "export it again or remove it"), known=False),
    Fault("a constant twice", "no_duplicate_initializers", edit.constant_twice,
          ("another_one and int64[1]_1", "keep one of them")),
    *(
        Fault(f"a {system} path at {where}", "no_host_paths", edit.text(where, path),
              (shown, path.replace("\\", "\\\\"), "strip metadata and doc strings"))
        for system, path in (("Unix", UNIX), ("Windows", WINDOWS))
        for where, shown in (
            ("model", "the doc string of the model"), ("model", "stack_trace of the model"),
            ("graph", "the doc string of the graph"), ("graph", "stack_trace of the graph"),
            ("node", "the doc string of MatMul 'q_proj/MatMul'"),
            ("node", "stack_trace of MatMul 'q_proj/MatMul'"),
            ("input", "the doc string of query"), ("input", "stack_trace of query"),
            ("value", "stack_trace of q_proj/Add.out"),
            ("initializer", "the doc string of q_proj.weight"),
            ("initializer", "stack_trace of q_proj.weight"),
        )
    ),
    *(
        Fault(f"external data {where}", "external_data", edit.external(**entries),
              ("q_proj.weight", *message), also=also, beside=beside)
        for also, where, entries, beside, message in (
            (CHECKER, "at an absolute path", {"location": "/etc/weights.bin"}, WEIGHT_BYTES,
             ("'/etc/weights.bin'", "outside the folder", "move it inside")),
            (CHECKER, "above the folder", {"location": "../weights.bin"}, WEIGHT_BYTES,
             ("'../weights.bin'", "outside the folder", "move it inside")),
            (CHECKER, "above the folder by a detour", {"location": "a/../../w.bin"}, WEIGHT_BYTES,
             ("outside the folder", "move it inside")),
            (CHECKER, "missing", {}, None,
             ("weights.bin, which is missing", "ship it beside the model")),
            ((), "cut off", {"offset": "0", "length": str(WEIGHT_BYTES)}, WEIGHT_BYTES - 1,
             ("beyond the end of weights.bin", "the file was cut off")),
            ((), "at an offset too far", {"offset": "1", "length": str(WEIGHT_BYTES)}, WEIGHT_BYTES,
             ("beyond the end of weights.bin", "the file was cut off")),
        )
    ),
)  # fmt: skip
