"""Linear attention: `kind = "linear"` of a spec, and the operator `LinearAttention` of opset 27."""

from attn_export.optional_parts import Part

PART = Part(
    hooks={
        "LAYERS": f"{__name__}.linear_layer",
        "capturing": f"{__name__}.called_rules",
        "OPERATORS": f"{__name__}.linear_operator",
        "lower_newer": f"{__name__}.lower_linear",
        "KNOWN": f"{__name__}.in_linear",
    },
    tests_need=("ort-cpu==1.32.0",),
)
