"""Benchmarks: our graphs, peers and rooflines (candidates), measured in turns on the same work."""
