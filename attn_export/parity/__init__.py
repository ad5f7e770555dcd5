"""Test cases, their float64 results, and the rule by which a runtime's outputs pass."""
