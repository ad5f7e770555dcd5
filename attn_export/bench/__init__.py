"""Measurement of candidates that do the same work, in one interleaved run."""
