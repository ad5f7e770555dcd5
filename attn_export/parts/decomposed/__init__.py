"""Recognition of attention that is written out in operators, or in those of ONNX Runtime."""

from attn_export.optional_parts import Part

PART = Part(hooks={"recognise": f"{__name__}.decomposed"})
