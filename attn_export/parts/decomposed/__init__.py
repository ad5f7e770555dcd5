"""Recognition of attention that is written out in operators, or in those of ONNX Runtime."""

from attn_export.parts import Part

PART = Part(recognises=f"{__name__}.recognise")
