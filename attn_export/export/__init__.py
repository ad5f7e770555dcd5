"""Export of a PyTorch module to one ONNX graph, with checks of the capture and of its limits."""
