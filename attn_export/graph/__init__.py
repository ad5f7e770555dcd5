"""ONNX graphs without torch: canonical form, checks, files."""
