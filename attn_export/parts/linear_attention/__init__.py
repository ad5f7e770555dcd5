"""Linear attention: `kind = "linear"` of a spec, and the operator `LinearAttention` of opset 27."""

from attn_export.parts import Part

PART = Part(
    kinds={"linear": f"{__name__}.linear_layer"},
    captures=f"{__name__}.called_rules",
    operators=f"{__name__}.linear_operator",
    lowers=dict.fromkeys(("LinearAttention", "CausalConvWithState"), f"{__name__}.lower_linear"),
    faults=(f"{__name__}.in_linear",),
    tests_need=("ort-cpu==1.32.0",),
)
