"""Dry runs of graphs in the CUDA provider, over stand-in libraries: no GPU and no numbers."""
