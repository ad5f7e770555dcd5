"""Test cases: sizes and patterns that together show every known fault."""
