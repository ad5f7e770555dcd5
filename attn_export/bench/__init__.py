"""Measures how fast candidates do the same work, against each other in one interleaved run."""
