"""Runtimes that run ONNX graphs: one file and one process for each."""
