"""Causes of numeric differences: counter-experiments, the first wrong node, known mistakes."""
