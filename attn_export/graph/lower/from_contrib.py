"""Conversion of attention in contrib operators of ONNX Runtime back to `Attention` nodes.

Callers must compare the graph with its source: lengths that a node gets may hide keys.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT
from attn_export.graph.ir_helpers import dims, optional_input
from attn_export.graph.lower.node_builder import Builder, take_over

BIAS = {"MultiHeadAttention": 5, "GroupQueryAttention": 10}
"""The index of the input that is added to the scores, by operator."""

LENGTHS = {"MultiHeadAttention": (), "GroupQueryAttention": (5, 6)}
"""Inputs that state the numbers of keys, which the operator otherwise takes from the keys."""

SAME = {"num_heads": 0, "kv_num_heads": 0, "scale": 0.0, "softcap": 0.0, "unidirectional": 0}
DEFAULTS = {"do_rotary": 0, "local_window_size": -1, "rotary_interleaved": 0, "smooth_softmax": 0}
"""Attributes that `Attention` has too, and those that it lacks with the value without effect."""


def from_contrib(model: ir.Model) -> int:
    """Replace contrib nodes without a cache by `Attention`, and return their number.

    Args:
        model: The graph; changed in place.
    """
    nodes = [node for node in model.graph if node.domain == MICROSOFT and _has_a_form(node)]
    for node in nodes:
        is_grouped = node.op_type == "GroupQueryAttention"
        heads = node.attributes.get_int("num_heads", 0)
        attributes: dict[str, Any] = {
            "q_num_heads": heads,
            "kv_num_heads": node.attributes.get_int("kv_num_heads", heads),
            "is_causal": int(is_grouped or node.attributes.get_int("unidirectional", 0) == 1),
        }
        for name in ("scale", "softcap"):
            if number := node.attributes.get_float(name, 0.0):
                attributes[name] = number
        bias = optional_input(node, BIAS[node.op_type])
        inputs = [*node.inputs[:3], *([] if bias is None else [bias])]
        op = Builder(model, node)
        take_over(node.outputs[0], op.add_node("Attention", inputs, 1, **attributes)[0])
        model.graph.remove(node, safe=True)
    return len(nodes)


def _has_a_form(node: ir.Node) -> bool:
    """Return whether `Attention` can say what a node computes."""
    if node.op_type not in BIAS or any(x is None or len(dims(x)) != 3 for x in node.inputs[:3]):
        return False
    known = (0, 1, 2, BIAS[node.op_type], *LENGTHS[node.op_type])
    other = [x for n, x in enumerate(node.inputs) if x is not None and n not in known]
    read = [x for x in node.outputs[1:] if x.uses() or x.is_graph_output()]
    attributes = node.attributes.items()
    return (
        not other
        and not read
        and len(node.inputs) > 2
        and all(
            name in SAME or attribute.value == DEFAULTS.get(name) for name, attribute in attributes
        )
    )
