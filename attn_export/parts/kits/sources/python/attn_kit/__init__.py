"""An attention in ONNX Runtime, with the golden vectors that prove it."""
