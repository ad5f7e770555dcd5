"""A graph in float64, value by value, with each step open to change."""
