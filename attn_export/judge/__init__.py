"""Verdicts on outputs, and their gates."""
